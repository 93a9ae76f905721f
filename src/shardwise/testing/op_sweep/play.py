"""One operator in a simulated world and on one device, and where the two differ."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.simulate import simulate
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.testing.op_sweep.alone import Alone
from shardwise.testing.op_sweep.cases import Cases
from shardwise.testing.op_sweep.compare import Different
from shardwise.testing.op_sweep.refused import play_errors
from shardwise.testing.op_sweep.result import KINDS, OpResult, brief
from shardwise.testing.op_sweep.table import Sample, full_name, samples
from shardwise.testing.op_sweep.ways import ONE_AXIS, RANKS, TWO_AXES, Way, ways


def play_operator(
    entry: Any, num_samples: int, num_ways: int, kinds: Sequence[str] = KINDS
) -> OpResult:
    """The cases of one entry of torch's table, of the given kinds."""
    result = OpResult(full_name(entry))
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples(entry, num_samples)):
            _play_sample(entry, sample, number, num_ways, kinds, result)
        if "refused" in kinds:
            play_errors(entry, result)
    result.seconds = round(time.monotonic() - started, 2)
    return result


def _play_sample(
    entry: Any,
    sample: Sample,
    number: int,
    num_ways: int,
    kinds: Sequence[str],
    result: OpResult,
) -> None:
    try:
        alone = Alone(entry, sample)
    except Exception:
        return  # one device does not run it either
    result.random = result.random or alone.random
    for way_number, way, mesh in each_way(ways(sample.tensors, num_ways)):
        where = f"sample {number} {sample} on {way}"
        for kind, case in Cases(alone, way, mesh, way_number).each():
            if kind not in kinds:
                continue
            outcome, note = outcome_of(case)
            result.add(kind, outcome, f"{where}: {note}")
            if kind == "forward" and outcome != "ok":
                break


def each_way(chosen: Sequence[Way]) -> Iterator[tuple[int, Way, DeviceMesh]]:
    """The ways, numbered, each with its mesh; what runs meanwhile runs in a simulated world."""
    with simulate(RANKS):
        meshes: dict[tuple[int, ...], DeviceMesh] = {
            shape: init_device_mesh("cpu", shape) for shape in (ONE_AXIS, TWO_AXES)
        }
        for number, way in enumerate(chosen):
            yield number, way, meshes[way.mesh]


def outcome_of(case: Callable[[], None]) -> tuple[str, str]:
    """How a case ends, and why it does not end well."""
    try:
        case()
    except Different as error:
        return "wrong", str(error)
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {brief(error)}"
    return "ok", ""
