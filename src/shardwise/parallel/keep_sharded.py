"""shard_parameters: parameters that lie in pieces over the data axis too, whole while in use."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.parallel.line import Line, line_of


def shard_parameters(module: nn.Module, mesh: DeviceMesh, *, outermost: bool = False) -> nn.Module:
    """Split DTensor parameters that a data axis replicates along their dim 0, in place.

    Parameters, gradients and what an optimizer keeps of them take a rank 1/n of the memory. A
    module gathers its own parameters over the axis when it is called, and backward brings their
    gradients back in pieces: a reduce-scatter. The gathered copy lives until then. Where another
    axis splits dim 0 already, this one splits within it, or around it with `outermost`.

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
    if mesh.ndim != 1:
        raise LayoutError(
            f"shard_parameters works along one axis; the mesh has {mesh.ndim}. Give it that axis: "
            'shard_parameters(module, mesh["dp"]).'
        )
    line = line_of(mesh)
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        names = [name for name, p in owner._parameters.items() if _splits(p, line)]
        for name in names:
            owner._parameters[name] = _split(owner._parameters[name], line, outermost, made)
        if names:
            _gather_in_forward(owner, names, line)
    if not made:
        raise LayoutError(
            f"shard_parameters found no DTensor that is replicated over axis "
            f"{line.grid.axis_name(line.axis)!r} of {line.grid!r}. Make them first: "
            "parallelize_module(module, mesh, plan) with the whole mesh."
        )
    return module


def _splits(parameter: torch.Tensor | None, line: Line) -> bool:
    if not isinstance(parameter, DTensor) or parameter.dim() == 0:
        return False
    axis = line.axis_in(parameter._layout.grid)
    return axis is not None and parameter.placements[axis].is_replicate()


def _split(
    parameter: Any, line: Line, outermost: bool, made: dict[int, nn.Parameter]
) -> nn.Parameter:
    """The parameter in pieces; a shared one stays shared."""
    if id(parameter) not in made:
        axis = line.axis_in(parameter._layout.grid)
        assert axis is not None, "only parameters on a mesh with the axis are split"
        others = [a for a in parameter._layout.order if a != axis]
        order = [axis, *others] if outermost else [*others, axis]
        pieces = parameter.detach().redistribute(
            placements=_with(parameter.placements, axis, Shard(0)), order=order
        )
        made[id(parameter)] = nn.Parameter(pieces, requires_grad=parameter.requires_grad)
    return made[id(parameter)]


def _with(
    placements: tuple[Placement, ...], axis: int, placement: Placement
) -> tuple[Placement, ...]:
    return (*placements[:axis], placement, *placements[axis + 1 :])


def _gather_in_forward(owner: nn.Module, names: list[str], line: Line) -> None:
    """An attribute of the instance hides the parameter of that name while forward runs."""
    owner.register_forward_pre_hook(functools.partial(_gather, names, line))
    owner.register_forward_hook(functools.partial(_release, names), always_call=True)


def _gather(names: list[str], line: Line, module: nn.Module, _: Any) -> None:
    for name in names:
        parameter: Any = module._parameters[name]
        axis = line.axis_in(parameter._layout.grid)
        assert axis is not None, "a parameter does not change its mesh"
        whole = _with(parameter.placements, axis, REPLICATE)
        module.__dict__[name] = parameter.redistribute(
            placements=whole, order=parameter._layout.order, async_op=True
        )


def _release(names: list[str], module: nn.Module, *_: Any) -> None:
    for name in names:
        module.__dict__.pop(name, None)
