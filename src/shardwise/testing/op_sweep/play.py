"""One operator in a simulated world and on one device, and where the two differ."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.simulation.world import simulate
from shardwise.testing.op_sweep.alone import Alone
from shardwise.testing.op_sweep.cases import Cases
from shardwise.testing.op_sweep.compare import Different
from shardwise.testing.op_sweep.refused import play_errors
from shardwise.testing.op_sweep.result import KINDS, OpResult, brief
from shardwise.testing.op_sweep.table import OpCall, full_name, samples
from shardwise.testing.op_sweep.ways import OperandLayouts, further_ways, ways


def play_operator(
    entry: Any,
    num_samples: int,
    num_ways: int,
    kinds: Sequence[str] = KINDS,
    num_doors: int = 1,
) -> OpResult:
    """The cases of one entry of torch's table, of the given kinds.

    `num_doors` is how many further meshes a sample is laid out on, and how many readings and
    writes are played of each case.
    """
    result = OpResult(full_name(entry))
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples(entry, num_samples)):
            _play_sample(entry, sample, number, num_ways, kinds, result, num_doors)
        if "refused" in kinds:
            play_errors(entry, result)
    result.seconds = round(time.monotonic() - started, 2)
    return result


def _play_sample(
    entry: Any,
    sample: OpCall,
    number: int,
    num_ways: int,
    kinds: Sequence[str],
    result: OpResult,
    num_doors: int,
) -> None:
    try:
        alone = Alone(entry, sample)
    except Exception:
        return  # one device does not run it either
    result.random = result.random or alone.random
    chosen = ways(sample.tensors, num_ways)
    chosen += further_ways(sample.tensors, num_doors, f"{full_name(entry)} {number}")
    for way_number, way, mesh in each_way(list(dict.fromkeys(chosen))):
        where = f"sample {number} {sample} on {way}"
        for kind, case in Cases(alone, way, mesh, way_number, num_doors=num_doors).each():
            if kind not in kinds:
                continue
            outcome, note = outcome_of(case)
            result.add(kind, outcome, f"{where}: {note}")
            if kind == "forward" and outcome != "ok":
                break


def each_way(chosen: Sequence[OperandLayouts]) -> Iterator[tuple[int, OperandLayouts, DeviceMesh]]:
    """The ways, numbered, each with its mesh; what runs meanwhile runs in a simulated world."""
    numbered = sorted(enumerate(chosen), key=lambda pair: math.prod(pair[1].mesh))
    for ranks, some in itertools.groupby(numbered, lambda pair: math.prod(pair[1].mesh)):
        with simulate(ranks):
            meshes: dict[tuple[int, ...], DeviceMesh] = {}
            for number, way in some:
                if way.mesh not in meshes:
                    meshes[way.mesh] = init_device_mesh("cpu", way.mesh)
                yield number, way, meshes[way.mesh]


def outcome_of(case: Callable[[], None]) -> tuple[str, str]:
    """How a case ends, and why it does not end well."""
    try:
        case()
    except Different as error:
        return "wrong", brief(error)
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {brief(error)}"
    return "ok", ""
