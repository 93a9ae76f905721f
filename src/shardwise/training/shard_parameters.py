"""shard_parameters: parameters sharded over data axes, gathered while in use."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.training.contract import DataAxes, forbid_both, tensor_axes
from shardwise.training.mesh_axes import MeshAxes, mesh_axes
from shardwise.training.reducer import declare, follow_all, modules_with
from shardwise.training.start_values import sync_values

#: The attribute of a module with its calls of `shard_parameters`.
_ASKED = "_sharded_over"


@dataclass(slots=True)
class ShardRequest:
    """The axes to shard over, and whether outside of the axes that shard dim 0 already."""

    axes: MeshAxes
    outermost: bool
    num_split: int = 0


def shard_parameters(module: nn.Module, mesh: DeviceMesh, *, outermost: bool = False) -> nn.Module:
    """Shard DTensor parameters that data axes replicate along their dim 0, in place.

    Parameters, gradients and optimizer state take 1/n of the memory on each rank. A module gathers
    its own parameters over the axes when it is called, and backward reduce-scatters their
    gradients; the gathered copy lives until then. Where another axis shards dim 0 already, these
    shard within it, or around it with `outermost`.

    Each rank has its own batch along the axes. Plain parameters stay whole: they start from the
    values of the first coordinate, and backward reduces their gradients, as `data_parallel` does.
    Parameters that `parallelize_module` distributes later are sharded then.

    >>> import shardwise, torch
    >>> from shardwise.parallel import parallelize_module, shard_parameters
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ...     layer = parallelize_module(torch.nn.Linear(4, 8), mesh, "colwise")
    ...     layer = shard_parameters(layer, mesh["dp"])
    ...     layer(torch.ones(3, 4)).sum().backward()
    >>> layer.weight.placements, layer.weight.grad.placements
    ((Shard(0), Shard(0)), (Shard(0), Shard(0)))
    """
    axes = mesh_axes(mesh)
    forbid_both([axes], tensor_axes(module), "shard_parameters")
    declare(module, DataAxes(axes, False), source=0)
    sync_values((*module.parameters(), *module.buffers()), axes, 0)
    asked = module.__dict__.setdefault(_ASKED, [])
    if not asked:
        module.register_forward_pre_hook(_check_split)
    asked.append(ShardRequest(axes, outermost))
    split_parameters(module)
    return module


def split_parameters(module: nn.Module) -> None:
    """Shard what `shard_parameters`, here or around this module, still has to shard.

    A plan that is applied after it makes new DTensors.
    """
    parameters = list(module.parameters())
    declared_modules = {id(declared): declared for declared in modules_with(parameters)}
    for declared in declared_modules.values():
        for asked in declared.module.__dict__.get(_ASKED, ()):
            asked.num_split += _split_all(declared.module, asked)
    follow_all(parameters)


def _split_all(module: nn.Module, asked: ShardRequest) -> int:
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        if getattr(owner, "lays_out_itself", False):
            continue
        split = {name: _to_split(p, asked.axes) for name, p in owner._parameters.items()}
        split = {name: along for name, along in split.items() if along}
        for name, along in split.items():
            owner._parameters[name] = _split(owner._parameters[name], along, asked.outermost, made)
        if split:
            _gather_in_forward(owner, split)
    return len(made)


def _check_split(module: nn.Module, _: Any) -> None:
    for asked in module.__dict__[_ASKED]:
        if not asked.num_split and asked.axes.size > 1:
            raise LayoutError(
                f"shard_parameters found no DTensor that is replicated over axis "
                f"{asked.axes.names} of {asked.axes.grid!r}. Make some: "
                'parallelize_module(module, mesh, plan) with a mesh that has this axis and "tp" '
                "(of size 1, if no layer is to be split). For plain parameters that stay whole: "
                "data_parallel(module, mesh)."
            )


def _to_split(parameter: torch.Tensor | None, axes: MeshAxes) -> tuple[int, ...]:
    """The axes of its own mesh along which a parameter is still to be sharded."""
    if not isinstance(parameter, DTensor) or parameter.dim() == 0:
        return ()
    along, _ = axes.meet(parameter._layout.grid)
    return tuple(k for k in along if parameter.placements[k].is_replicate())


def _split(
    parameter: Any, along: tuple[int, ...], outermost: bool, made: dict[int, nn.Parameter]
) -> nn.Parameter:
    """The sharded parameter; a tied one stays tied."""
    if id(parameter) not in made:
        others = [a for a in parameter._layout.order if a not in along]
        order = [*along, *others] if outermost else [*others, *along]
        shards = parameter.detach().redistribute(
            placements=_with(parameter.placements, along, Shard(0)), order=order
        )
        made[id(parameter)] = nn.Parameter(shards, requires_grad=parameter.requires_grad)
    return made[id(parameter)]


def _with(
    placements: tuple[Placement, ...], along: tuple[int, ...], placement: Placement
) -> tuple[Placement, ...]:
    return tuple(placement if a in along else p for a, p in enumerate(placements))


def _gather_in_forward(owner: nn.Module, split: dict[str, tuple[int, ...]]) -> None:
    """An attribute of the instance hides the parameter of that name while forward runs."""
    owner.register_forward_pre_hook(functools.partial(_gather, split))
    owner.register_forward_hook(functools.partial(_release, list(split)), always_call=True)


def _gather(split: dict[str, tuple[int, ...]], module: nn.Module, _: Any) -> None:
    for name, along in split.items():
        parameter: Any = module._parameters[name]
        whole = _with(parameter.placements, along, REPLICATE)
        module.__dict__[name] = parameter.redistribute(
            placements=whole, order=parameter._layout.order, async_op=True
        )


def _release(names: list[str], module: nn.Module, *_: Any) -> None:
    for name in names:
        module.__dict__.pop(name, None)
