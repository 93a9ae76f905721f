"""What one device refuses is refused with an error of the same type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.simulation.world import simulate
from shardwise.testing.op_sweep.alone import placed
from shardwise.testing.op_sweep.lay_out import laid_out
from shardwise.testing.op_sweep.result import OpResult, brief
from shardwise.testing.op_sweep.table import OpCall, error_samples
from shardwise.testing.op_sweep.ways import ONE_AXIS, RANKS, OperandLayouts, ways


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
