"""Parameters that several modules share stay shared.

Note [Tied modules]
A plan may name only one of the modules that share a weight. The others then hold a DTensor too, and
get the style that places the weight alike, with whole inputs and outputs: to the code around them
nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import REPLICATE, Placement
from shardwise.dtensor.tensor import DTensor
from shardwise.parallel.matrix import ColwiseParallel, RowwiseParallel
from shardwise.parallel.sequence import ReplicateParallel
from shardwise.parallel.spot import tensor_axis
from shardwise.parallel.style import ParallelStyle


@dataclass(frozen=True, slots=True)
class Owner:
    """A module that holds a parameter under a name."""

    path: str
    module: nn.Module
    name: str


def tied_owners(root: nn.Module) -> list[list[Owner]]:
    """The owners of each parameter that has several."""
    owners: dict[int, list[Owner]] = {}
    for path, module in root.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append(Owner(path, module, name))
    return [group for group in owners.values() if len(group) > 1]


def tie_again(groups: Iterable[list[Owner]]) -> None:
    """Give all owners the DTensor that replaced the parameter of one of them."""
    for group in groups:
        held = [owner.module._parameters[owner.name] for owner in group]
        made = next((p for p in held if isinstance(p, DTensor)), None)
        if made is not None:
            for owner in group:
                owner.module._parameters[owner.name] = made


def style_untouched(
    groups: Iterable[list[Owner]],
    touched: set[int],
    mesh: DeviceMesh,
    src_data_rank: int | None,
) -> None:
    """Give a style to modules that hold a DTensor only because it is tied."""
    for group in groups:
        for owner in group:
            parameter = owner.module._parameters[owner.name]
            if id(owner.module) in touched or not isinstance(parameter, DTensor):
                continue
            style = counterpart(owner.module, parameter.placements[tensor_axis(mesh)])
            style.path, style.src_data_rank = owner.path, src_data_rank
            style.apply(owner.module, mesh)
            touched.add(id(owner.module))


def counterpart(module: nn.Module, placement: Placement) -> ParallelStyle:
    """The style under which a module's weight lies as `placement`, whole from the outside."""
    if placement.is_replicate():
        return ReplicateParallel()
    if placement.is_shard(0) == isinstance(module, nn.Linear):
        return ColwiseParallel(output_layouts=REPLICATE)
    return RowwiseParallel(input_layouts=REPLICATE)
