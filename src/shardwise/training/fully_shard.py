"""fully_shard: parameters, gradients and optimizer state in shards over a data axis."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import agree
from shardwise.core.layout import contiguous_stride, make_layout, shard_with
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.gradients import refuse_hooks
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError, WorldError
from shardwise.simulation.ranks import present
from shardwise.training.contract import DataAxes, forbid_both, note_own_gradient, tensor_axes
from shardwise.training.flat_buffer import (
    FlatBuffer,
    Member,
    name_of_replaced,
    note_replaced,
    rows_of,
)
from shardwise.training.flat_packing import pack, rows_per_chunk
from shardwise.training.in_flight import GROUP, group_of
from shardwise.training.mesh_axes import MeshAxes, mesh_axes, ranks_along
from shardwise.training.reducer import declare, follow_all
from shardwise.training.shard_group import CPUOffloadPolicy, MixedPrecisionPolicy, ParameterGroup
from shardwise.training.start_values import sync_values

#: The group of each sharded parameter, by id.
_groups: weakref.WeakValueDictionary[int, ParameterGroup] = weakref.WeakValueDictionary()


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    prefetch: int = 1,
    ignored_params: Iterable[nn.Parameter] = (),
) -> nn.Module:
    """Shard the parameters of a module over a data axis, in place; returns the module.

    Each rank keeps 1/n of the parameters, gradients and optimizer state. The parameters of the
    module that no inner call has taken form a group: it is gathered with one all-gather before the
    module's forward and again before its backward, and reduced with one reduce-scatter. So call it
    on each layer first, then on the model. Outside of forward, parameters are DTensors with rows of
    dim 0 on each rank.

    `mesh` has one axis, or several: then the last shards and the others hold replicas. Each rank
    has its own batch along all of them. Parameters that are DTensors already are sharded further;
    scalars, tables with `sparse=True`, embedding collections and `ignored_params` stay whole, and
    their gradients are reduced as `data_parallel` does. Start values are those of the first rank.

    `reshard_after_forward`: whether to free the gathered parameters between forward and backward; a
    number keeps a copy on each set of so many neighbouring ranks. By default all do but what
    backward needs first: the outermost module, and the one that ran last in the step before. While
    a group computes, the next `prefetch` groups are gathered.

    The module gets methods: `set_requires_gradient_sync(False)` accumulates unreduced gradients
    until a backward pass with True; `unshard()` gathers the group until `reshard()`.

    >>> import shardwise, torch
    >>> from shardwise.parallel import fully_shard
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1, bias=False))
    ...     for layer in model:
    ...         _ = fully_shard(layer, mesh)
    ...     model = fully_shard(model, mesh)
    ...     batch = shardwise.LocalTensor.per_rank(lambda rank: torch.full((4, 3), float(rank)))
    ...     model(batch).mean().backward()
    >>> model[0].weight.placements, model[0].weight.grad.placements
    ((Shard(0, sizes=(3, 1)),), (Shard(0, sizes=(3, 1)),))
    """
    place: _Place | None = None
    found: list[Member] = []
    problem: Exception | None = None
    axes = mesh_axes(mesh)
    if axes.given.outside:
        raise WorldError(
            f"fully_shard: rank {axes.grid.world.rank} is not in {axes.given!r} of ranks "
            f"{list(axes.given.ranks)}, which keep the parameters. Call it there only, or use a "
            "mesh of all ranks."
        )
    left_out = {id(p) for p in ignored_params}
    named = module.named_parameters(remove_duplicate=False)
    ignored = {name for name, parameter in named if id(parameter) in left_out}
    try:
        place = _place(module, axes)
        _check_options(place, reshard_after_forward, mp_policy, prefetch)
        forbid_both([axes], tensor_axes(module), "fully_shard")
        _check_free(module)
        found = _members(module, place, ignored)
        for member in found:
            refuse_hooks(member.parameter, f"fully_shard: parameter {member.name!r}")
    except (ShardwiseError, RuntimeError) as error:
        problem = error
    request = "\n".join(f"{m.name}: {m.layout.shape} {m.layout.dtype}" for m in found)
    options = (reshard_after_forward, mp_policy, offload_policy, prefetch)
    agree(axes.grid, "fully_shard", f"{options}\n{request}", problem)
    assert place is not None, "agree() raised"
    group = ParameterGroup(
        module,
        place.grid,
        place.axis,
        place.replicas,
        reshard_after_forward=_reshards(reshard_after_forward, place.parts),
        precision=mp_policy,
        offload=offload_policy,
        prefetch=prefetch,
        ignored=ignored,
    )
    sync_values((*(m.parameter for m in found), *module.buffers()), axes, 0)
    _close(group, found)
    declare(module, DataAxes(axes, False), source=0)
    module.__dict__[GROUP] = group
    module.register_forward_pre_hook(group.before_forward, with_kwargs=True)
    module.register_forward_hook(group.after_forward, always_call=True)
    methods = {
        "set_requires_gradient_sync": group.set_sync,
        "unshard": group.unshard,
        "reshard": group.reshard_now,
    }
    module.__dict__.update(methods)
    return module


# -- what is sharded, and along which axis ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """The mesh of sharded parameters, the axis that shards them, and those with replicas."""

    grid: Grid
    axis: int
    replicas: tuple[int, ...]

    @property
    def parts(self) -> int:
        return self.grid.shape[self.axis]


def _place(module: nn.Module, axes: MeshAxes) -> _Place:
    """Where the parameters go: to the mesh of the module's DTensors, or else to the given one.

    What ranks hold may differ between parallel submeshes (a shard of a plan). So with several of
    them it is the whole mesh, in which every rank has a coordinate of its own.
    """
    if axes.given.num_axes == 1 and len(axes.axes) > 1:  # a flattened axis
        ((grid, axis),) = axes.collectives()
        return _Place(grid, axis, ())
    *others, axis = axes.axes
    for parameter in module.parameters():
        if isinstance(parameter, DTensor) and parameter._layout.grid is not axes.given:
            grid = parameter._layout.grid
            along = [MeshAxes(axes.grid, (a,), axes.given).meet(grid)[0] for a in axes.axes]
            if all(
                len(each) == 1 and ranks_along(grid, each[0]) == ranks_along(axes.grid, a)
                for each, a in zip(along, axes.axes, strict=True)
            ):
                *first, (last,) = along
                return _Place(grid, last, tuple(a for each in first for a in each))
            return _Place(axes.grid, axis, tuple(others))
    if axes.given is axes.grid or len(present(axes.grid)) > 1:
        return _Place(axes.grid, axis, tuple(others))
    last = axes.given.num_axes - 1
    return _Place(axes.given, last, tuple(range(last)))


def _check_options(place: _Place, reshards: Any, policy: Any, prefetch: int) -> None:
    if type(reshards) is int and (reshards < 1 or place.parts % reshards):
        raise LayoutError(
            f"fully_shard: reshard_after_forward={reshards} does not divide axis "
            f"{place.grid.axis_name(place.axis)!r} of size {place.parts}."
        )
    if not isinstance(reshards, (int, type(None))):
        raise ArgumentError(
            f"fully_shard: reshard_after_forward is True, False, None or a number of ranks, found "
            f"{reshards!r}."
        )
    if not isinstance(prefetch, int) or prefetch < 0:
        raise ArgumentError(f"fully_shard: prefetch is a number of groups, found {prefetch!r}.")
    for name in ("param_dtype", "reduce_dtype", "output_dtype") if policy is not None else ():
        dtype = getattr(policy, name)
        if dtype is not None and not dtype.is_floating_point:
            raise ArgumentError(f"fully_shard: {name} is a floating dtype, found {dtype}.")


def _reshards(asked: bool | int | None, parts: int) -> bool | int | None:
    if type(asked) is int:
        return {1: False, parts: True}.get(asked, asked)
    return asked


def _check_free(module: nn.Module) -> None:
    if group_of(module) is not None:
        raise LayoutError(
            f"fully_shard: this {type(module).__name__} is fully sharded already. Call it once for "
            "each module: inner modules first, then those around them."
        )
    inner = {
        id(p) for group in _inner_groups(module) for m in group.members for p in (m.parameter,)
    }
    for path, parameter in module.named_parameters():
        group = group_with(parameter)
        if group is not None and id(parameter) not in inner:
            name = next(m.name for m in group.members if m.parameter is parameter)
            raise _two_groups(path, f"{name!r} of {type(group.module).__name__}")
        known = name_of_replaced(parameter)
        if known is not None:
            raise _two_groups(path, repr(known))


def _two_groups(path: str, other: str) -> LayoutError:
    return LayoutError(
        f"fully_shard: parameter {path!r} is in another group already, as {other}. A parameter "
        "belongs to one group: call fully_shard on a module that has all its users, and not on "
        "those, or name it in ignored_params."
    )


def group_with(parameter: torch.Tensor) -> ParameterGroup | None:
    """The group of a sharded parameter."""
    group = _groups.get(id(parameter))
    known = group is not None and any(m.parameter is parameter for m in group.members)
    return group if known else None


def _inner_groups(module: nn.Module) -> list[ParameterGroup]:
    return [group for group in map(group_of, module.modules()) if group is not None]


def _members(module: nn.Module, place: _Place, ignored: set[str]) -> list[Member]:
    """What the group of a module shards, with the layouts of now; tied parameters once."""
    found: dict[int, Member] = {}
    for path, owner in _own_modules(module, ""):
        if getattr(owner, "lays_out_itself", False) or getattr(owner, "sparse", False) is True:
            continue
        for name, parameter in owner._parameters.items():
            full_name = f"{path}.{name}" if path else name
            if parameter is None or full_name in ignored or not _can_shard(parameter, place):
                continue
            known = found.get(id(parameter))
            if known is not None:
                known.owners.append((owner, name))
                continue
            whole = parameter._layout if isinstance(parameter, DTensor) else None
            layout = whole or make_layout(
                place.grid,
                (REPLICATE,) * place.grid.num_axes,
                parameter.shape,
                contiguous_stride(parameter.shape),
                parameter.dtype,
            )
            own = whole is None or not _axes_along(place, whole.grid)
            found[id(parameter)] = Member(full_name, [(owner, name)], parameter, layout, whole, own)
    return list(found.values())


def _own_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and those inside, without those that form groups of their own."""
    yield path, module
    for name, child in module.named_children():
        if group_of(child) is None:
            yield from _own_modules(child, f"{path}.{name}" if path else name)


def _axes_along(place: _Place, grid: Grid) -> list[int]:
    """The axes of `grid` that together have the ranks of the axis that shards."""
    along = MeshAxes(place.grid, (place.axis,), place.grid).meet(grid)[0]
    if along and math.prod(grid.shape[axis] for axis in along) != place.parts:
        raise LayoutError(
            f"fully_shard: a parameter is on {grid!r} of ranks {list(grid.ranks)}, which has other "
            f"ranks than axis {place.grid.axis_name(place.axis)!r} of {place.grid!r}. Take both "
            "from one mesh."
        )
    return along


def _can_shard(parameter: torch.Tensor, place: _Place) -> bool:
    if parameter.dim() == 0 or parameter.numel() == 0:
        return False
    if not isinstance(parameter, DTensor):
        return True
    along = _axes_along(place, parameter._layout.grid)
    return all(parameter.placements[axis].is_replicate() for axis in along)


# -- making and undoing a group ------------------------------------------------------------------


@torch.no_grad()
def _close(group: ParameterGroup, found: list[Member]) -> None:
    """Replace the parameters that were found by shards."""
    replaced = [member.parameter for member in found]
    place = _Place(group.grid, group.axis, group.replicas)
    group.buffers = _buffers(found, place)
    for buffer in group.buffers:
        tensors: list[Any] = [member.parameter for member in buffer.members]
        whole = [t._local if isinstance(t, DTensor) else t.detach() for t in tensors]
        shards = buffer.cut(whole)
        for member, local in zip(buffer.members, shards, strict=True):
            _replace(group, member, DTensor._wrap(local, member.layout))
    if group.offload is not None:
        group.offload_shards()
    follow_all(replaced)


def _replace(group: ParameterGroup, member: Member, made: torch.Tensor) -> None:
    old = member.parameter
    member.parameter = nn.Parameter(made, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if not name.startswith("_"):
            setattr(member.parameter, name, value)
    note_replaced(old, member.name)
    note_own_gradient(member.parameter, member.whole is None)
    _groups[id(member.parameter)] = group
    for owner, name in member.owners:
        owner._parameters[name] = member.parameter
    group._follow_flat_weights()


def _buffers(found: list[Member], place: _Place) -> list[FlatBuffer]:
    """Buffers of parameters of one dtype and device; those with shapes of their own are alone."""
    alike: dict[Any, list[Member]] = {}
    made = []
    for member in found:
        ranks = member.whole.grid.ranks if member.whole is not None else present(place.grid)
        shapes = {member.whole_shape(rank) for rank in ranks}
        if len(shapes) == 1:
            kind = (member.layout.dtype, member.parameter.device)
            alike.setdefault(kind, []).append(member)
        else:
            member.layout = _sharded(member, None, place)
            made.append(FlatBuffer(place.grid, place.axis, [member], [0], None))
    for members in alike.values():
        rank = present(place.grid)[0]
        items = [rows_of(member.whole_shape(rank)) for member in members]
        for packing in pack(items, place.parts):
            for number, offset in packing.offsets.items():
                num_rows, row = items[number]
                sizes = rows_per_chunk(offset, num_rows, row, packing.length, place.parts)
                members[number].layout = _sharded(members[number], tuple(sizes), place)
            inside = [members[number] for number in packing.offsets]
            offsets = list(packing.offsets.values())
            made.append(FlatBuffer(place.grid, place.axis, inside, offsets, packing.length))
    return made


def _sharded(member: Member, sizes: tuple[int, ...] | None, place: _Place) -> Any:
    """The layout of a member's shards: rows of what is local while it is gathered."""
    whole, shape = member.whole, member.layout.shape
    grid, axis = place.grid, place.axis
    placements: list[Placement] = [REPLICATE] * grid.num_axes
    if whole is not None:
        along = _axes_along(place, whole.grid)
        if len(along) == 1:
            grid, (axis,) = whole.grid, along
            placements = list(whole.placements)
        else:  # the axis is one of another mesh, or a flattened one
            for k, placement in enumerate(whole.placements):
                if k not in along and whole.grid.shape[k] > 1:
                    placements[_axis_like(whole.grid, k, grid)] = placement
    num_rows = shape[0]
    if sizes is None:
        placements[axis] = Shard(0)
    else:
        placements[axis] = shard_with(0, sizes, sum(sizes), place.parts)
    assert sizes is None or num_rows % sum(sizes) == 0, "other axes split dim 0 evenly"
    order = (*(a for a in range(grid.num_axes) if a != axis), axis)
    if whole is not None and grid is whole.grid:
        order = (*(a for a in whole.order if a != axis), axis)
    return make_layout(
        grid, tuple(placements), shape, contiguous_stride(shape), member.layout.dtype, order
    )


def _axis_like(grid: Grid, axis: int, other: Grid) -> int:
    """The axis of `other` along the same ranks."""
    ranks = ranks_along(grid, axis)
    for k in range(other.num_axes):
        if ranks_along(other, k) == ranks:
            return k
    raise LayoutError(
        f"fully_shard: a parameter is on {grid!r} of ranks {list(grid.ranks)}, and axis "
        f"{grid.axis_name(axis)!r} is no axis of {other!r}. Take both meshes from one."
    )


@contextlib.contextmanager
def opened(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of the module are whole, as before `fully_shard`.

    For front doors that replace parameters; afterwards they are sharded as they are then.
    """
    groups = {id(group): group for p in module.parameters() if (group := group_with(p)) is not None}
    for group in groups.values():
        _open(group)
    try:
        yield
    finally:
        for group in groups.values():
            place = _Place(group.grid, group.axis, group.replicas)
            _close(group, _members(group.module, place, group.ignored))


@torch.no_grad()
def _open(group: ParameterGroup) -> None:
    group.reshard()
    group.gather_plainly()
    replaced = [member.parameter for member in group.members]
    tensors = [tensor.clone() for buffer in group.buffers for tensor in buffer.tensors()]
    for member, tensor in zip(group.members, tensors, strict=True):
        made = nn.Parameter(tensor, requires_grad=member.parameter.requires_grad)
        for owner, name in member.owners:
            owner._parameters[name] = made
    group.reshard()
    group.buffers = []
    follow_all(replaced)
