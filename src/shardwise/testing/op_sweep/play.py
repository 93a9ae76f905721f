"""One operator in a simulated world and on one device, and where the two differ."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.simulation.world import simulate
from shardwise.testing.op_sweep.alone import Alone, placed
from shardwise.testing.op_sweep.cases import Cases
from shardwise.testing.op_sweep.compare import KINDS, Different, OpResult, brief
from shardwise.testing.op_sweep.table import OpCall, error_samples, full_name, samples
from shardwise.testing.op_sweep.ways import (
    ONE_AXIS,
    RANKS,
    OperandLayouts,
    further_ways,
    laid_out,
    ways,
)

# What one device refuses is refused with an error of the same type.


def play_errors(entry: Any, result: OpResult) -> None:
    """Play what torch's table says is refused."""
    try:
        refused = list(error_samples(entry))
    except Exception:
        return  # the table itself fails to make them
    for sample, kind in refused:
        if overlap(sample.tensors):
            continue  # laid out, they do not overlap any more
        with simulate(RANKS):
            mesh = init_device_mesh("cpu", ONE_AXIS)
            for way in [w for w in ways(sample.tensors, 100) if w.mesh == ONE_AXIS][:2]:
                outcome, note = _refused(entry, sample, way, mesh, kind)
                result.add("refused", outcome, f"{sample} on {way}: {note}")


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them repeats memory, or two that are not the same share some."""
    if any(0 in t.stride() and t.numel() > 1 for t in tensors):
        return True
    held: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if held.setdefault(tensor.untyped_storage().data_ptr(), tensor) is not tensor:
            return True
    return False


def _refused(
    entry: Any, sample: OpCall, way: OperandLayouts, mesh: DeviceMesh, kind: type[BaseException]
) -> tuple[str, str]:
    placements = iter(way.placements)
    made: dict[int, Any] = {}

    def place(tensor: torch.Tensor) -> Any:
        placement = next(placements)
        if id(tensor) not in made:
            made[id(tensor)] = laid_out(tensor, mesh, placement)
        return made[id(tensor)]

    args, kwargs, _ = placed(sample, place)
    try:
        entry(*args, **kwargs)
    except kind:
        return "ok", ""
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__} instead of {kind.__name__}: {brief(error)}"
    return "wrong", f"accepted, where one device raises {kind.__name__}"


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
