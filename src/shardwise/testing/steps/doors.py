"""The front doors of a case, called in its order."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import Placement, Replicate, Shard
from shardwise.dtensor.create import distribute_module, distribute_tensor
from shardwise.parallel import data_parallel, parallelize_module, shard_parameters
from shardwise.shard import ChunkShardingSpec, ShardingPlan, shard_module
from shardwise.testing.mesh import TENSOR_AXIS
from shardwise.testing.steps.case import Door, StepCase
from shardwise.testing.steps.models import KINDS, Kind


def open_doors(case: StepCase, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The module after all doors of the case."""
    flattened: dict[tuple[str, ...], DeviceMesh] = {}

    def axes_of(door: Door) -> DeviceMesh:
        if mesh.ndim == 1:
            return mesh
        if len(door.axes) == 1:
            return mesh[door.axes[0]]
        if door.flattened:
            if door.axes not in flattened:
                flattened[door.axes] = mesh[door.axes]._flatten("data")
            return flattened[door.axes]
        return mesh[door.axes]

    for door in case.doors:
        axes = functools.partial(axes_of, door)
        module = _CALLS[door.name](door, KINDS[case.kind], module, mesh, axes)
    return module


Axes = Callable[[], DeviceMesh]


def _parallelize(
    door: Door, kind: Kind, module: nn.Module, mesh: DeviceMesh, axes: Axes
) -> nn.Module:
    part = axes() if door.axes else mesh
    return parallelize_module(module, part, dict(kind.plan), strict=True)


def _replicate(_: Door, __: Kind, module: nn.Module, mesh: DeviceMesh, ___: Axes) -> nn.Module:
    layers = [
        name
        for name, layer in module.named_modules()
        if name and not any(layer.children()) and any(True for _ in layer.parameters())
    ]
    return parallelize_module(module, mesh, dict.fromkeys(layers, "replicate"), strict=True)


def _data_parallel(door: Door, _: Kind, module: nn.Module, __: DeviceMesh, axes: Axes) -> nn.Module:
    for target in _targets(door, module):
        data_parallel(target, axes())
    return module


def _shard_parameters(
    door: Door, _: Kind, module: nn.Module, __: DeviceMesh, axes: Axes
) -> nn.Module:
    for target in _targets(door, module):
        shard_parameters(target, axes())
    return module


def _shard_module(door: Door, kind: Kind, module: nn.Module, _: DeviceMesh, __: Axes) -> nn.Module:
    ranks = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
    spec = ChunkShardingSpec(dim=int(door.detail), placements=list(ranks))
    return shard_module(module, ShardingPlan(dict.fromkeys(kind.cut, spec)))


def _tables(door: Door, _: Kind, module: nn.Module, __: DeviceMesh, axes: Axes) -> nn.Module:
    collection: Any = module.tables
    collection.shard(axes(), door.detail)
    return module


def _distribute(_: Door, kind: Kind, module: nn.Module, mesh: DeviceMesh, __: Axes) -> nn.Module:
    return distribute_module(module, mesh, functools.partial(_by_plan, kind))


def _by_plan(kind: Kind, name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Shards of what the plan splits, along the tensor axis; the rest is left to be replicated."""
    names = mesh.mesh_dim_names or ()
    dim = {"colwise": 0, "rowwise": 1}.get(kind.plan.get(name, ""))
    if TENSOR_AXIS not in names or dim is None or not isinstance(layer, nn.Linear):
        return
    for key, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.dim() > dim:
            placements: list[Placement] = [Replicate()] * mesh.ndim
            placements[names.index(TENSOR_AXIS)] = Shard(dim)
            made = distribute_tensor(parameter.detach(), mesh, placements)
            layer._parameters[key] = nn.Parameter(made, parameter.requires_grad)


def _targets(door: Door, module: nn.Module) -> Iterator[nn.Module]:
    if door.path == "*":
        yield from (child for child in module.children() if any(True for _ in child.parameters()))
    else:
        yield module.get_submodule(door.path)


_CALLS: dict[str, Callable[[Door, Kind, nn.Module, DeviceMesh, Axes], nn.Module]] = {
    "tp": _parallelize,
    "replicate": _replicate,
    "dp": _data_parallel,
    "fs": _shard_parameters,
    "sm": _shard_module,
    "tables": _tables,
    "dm": _distribute,
}


def global_batch(case: StepCase, batch: Any, mesh: DeviceMesh) -> Any:
    """A batch as DTensors that lie in parts over the data axes."""
    placements = [Shard(0) if name in case.data_axes else Replicate() for name in case.mesh.names]

    def placed(value: Any) -> Any:
        return (
            distribute_tensor(value, mesh, placements) if isinstance(value, torch.Tensor) else value
        )

    return tuple(placed(value) for value in batch)
