"""fully_shard: parameters, gradients and optimizer state in shards over a data axis."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import agreeing
from shardwise.core.layout import contiguous_stride, make_layout, shard_with
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.autograd import refuse_hooks
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, WorldError
from shardwise.simulation.ranks import present
from shardwise.training.contract import (
    DataAxes,
    MeshAxes,
    check_axes_differ,
    describe_trained,
    mesh_axes,
    note_own_gradient,
    ranks_along,
    sync_values,
    tensor_axes,
)
from shardwise.training.fully_sharded.buffer import FlatBuffer
from shardwise.training.fully_sharded.group import GROUP, ParameterGroup, group_of, zero_grad
from shardwise.training.fully_sharded.members import (
    CPUOffloadPolicy,
    Member,
    MixedPrecisionPolicy,
    ShardAxes,
    name_of_replaced,
    note_replaced,
    pack,
    rows_of,
    rows_per_chunk,
    split_dim,
)
from shardwise.training.reducer import declare, update_declared

_Modules = TypeVar("_Modules", bound="nn.Module | list[nn.Module]")

#: The forward of a class that defines none.
_NO_FORWARD: Any = nn.Module.forward
#: The group of each sharded parameter, by id.
_groups: weakref.WeakValueDictionary[int, ParameterGroup] = weakref.WeakValueDictionary()


def fully_shard(
    module: _Modules,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: CPUOffloadPolicy | None = None,
    prefetch: int = 1,
    ignored_params: Iterable[nn.Parameter] | None = (),
) -> _Modules:
    """Shard the parameters of a module over a data axis, in place; returns the module.

    Each rank keeps 1/n of the parameters, gradients and optimizer state. The parameters of the
    module that no inner call has taken form a group: it is gathered with one all-gather before the
    module's forward and again before its backward, and reduced with one reduce-scatter. So call it
    on each layer first, then on the model. Outside of forward, parameters are DTensors with rows of
    one dim on each rank.

    A list of modules that run one after another, such as the last norm and the head, is one group:
    gathered before the first of them runs, and freed after the last.

    `mesh` has one axis, or several: then the last shards and the others hold replicas. Each rank
    has its own batch along all of them. Parameters that are DTensors already are sharded further;
    scalars, tables with `sparse=True`, embedding collections and `ignored_params` stay whole, and
    their gradients are reduced as `data_parallel` does. Start values are those of the first rank.

    `reshard_after_forward`: whether to free the gathered parameters between forward and backward;
    with a number n, every n neighbouring ranks keep one copy among them. By default all groups do,
    except those that backward needs first: the outermost module's, and the one that ran last in the
    step before. While a group computes, the next `prefetch` groups are gathered.

    The module gets methods: `set_requires_gradient_sync(False)` accumulates unreduced gradients
    until a backward pass with True, or `zero_grad()`; `unshard()` gathers the group until
    `reshard()`.

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
    modules = _listed(module)
    around = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
    place: ShardAxes | None = None
    found: list[Member] = []
    ignored: set[str] = set()
    axes = mesh_axes(mesh)
    if axes.given.outside:
        raise WorldError(
            f"fully_shard: rank {axes.grid.world.rank} is not in {axes.given!r} of ranks "
            f"{list(axes.given.ranks)}, which keep the parameters. Call it there only, or use a "
            "mesh of all ranks."
        )
    with agreeing(axes.given, "fully_shard") as request:
        request.append(f"{(reshard_after_forward, mp_policy, offload_policy, prefetch)}")
        ignored = _names_of(around, ignored_params)
        place = find_place(around, axes)
        _check_options(place, reshard_after_forward, mp_policy, offload_policy, prefetch)
        check_axes_differ([axes], tensor_axes(around), "fully_shard")
        _check_free(around, modules)
        found = _members(around, place, ignored)
        request += describe_trained(around)
        for member in found:
            request.append(f"{member.name}: {member.layout.shape} {member.layout.dtype}")
            refuse_hooks(member.parameter, f"fully_shard: parameter {member.name!r}")
    assert place is not None, "a problem was raised"
    group = ParameterGroup(
        around,
        modules,
        place,
        reshard_after_forward=_reshards(reshard_after_forward, place.parts),
        precision=mp_policy or MixedPrecisionPolicy(),
        offload=offload_policy if hasattr(offload_policy, "pin_memory") else None,
        prefetch=prefetch,
        ignored=ignored,
    )
    sync_values((*(m.parameter for m in found), *around.buffers()), axes, 0)
    _close(group, found)
    _attach(group, axes)
    return module


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method of a fully sharded module gather its parameters, as forward does.

    For methods that use parameters and do not call the module. A module that is not fully sharded
    is left alone.

    >>> import shardwise, torch
    >>> from shardwise.parallel import fully_shard, register_fsdp_forward_method
    >>> class Encoder(torch.nn.Linear):
    ...     def encode(self, x):
    ...         return self.forward(x).relu()
    >>> with shardwise.simulate(2):
    ...     encoder = fully_shard(Encoder(2, 3), shardwise.init_device_mesh("cpu", (2,)))
    ...     register_fsdp_forward_method(encoder, "encode")
    ...     encoder.encode(torch.ones(4, 2)).shape
    torch.Size([4, 3])
    """
    group = group_of(module)
    if group is None:
        return
    method, unbound = module.__dict__.get(method_name), getattr(type(module), method_name, None)
    if getattr(method, "func", None) == group.run:
        return  # it is registered
    if method is None and callable(unbound):
        method = functools.partial(unbound, module)  # unlike a bound method, copied with the module
    if not callable(method):
        raise ArgumentError(
            f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}."
        )
    module.__dict__[method_name] = functools.partial(group.run, module, method)


def _listed(module: nn.Module | list[nn.Module]) -> list[nn.Module]:
    modules = [module] if isinstance(module, nn.Module) else list(module)
    if not modules or not all(isinstance(each, nn.Module) for each in modules):
        raise ArgumentError(f"fully_shard takes a module or a list of modules, found {module!r}.")
    for each in modules:
        if isinstance(each, (nn.ModuleList, nn.ModuleDict)) and type(each).forward is _NO_FORWARD:
            raise ArgumentError(
                f"fully_shard: a {type(each).__name__} is never called, so nothing would gather "
                "its parameters. Call fully_shard on each module in it, or on the one around it."
            )
    return modules


# -- what is sharded, and along which axis ---------------------------------------------------------


def _names_of(module: nn.Module, parameters: Any) -> set[str]:
    """The names under which a module holds these parameters."""
    if parameters is None:
        return set()
    given = list(parameters) if isinstance(parameters, Iterable) else [parameters]
    if not all(isinstance(p, nn.Parameter) for p in given):
        raise ArgumentError(
            f"fully_shard: ignored_params are parameters of the module, found {parameters!r:.100}."
        )
    numbers = {id(p) for p in given}
    named = module.named_parameters(remove_duplicate=False)
    return {name for name, parameter in named if id(parameter) in numbers}


def _check_options(
    place: ShardAxes, reshards: Any, policy: Any, offload: Any, prefetch: int
) -> None:
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
    if policy is not None and not hasattr(policy, "cast_forward_inputs"):
        raise ArgumentError(f"fully_shard: mp_policy is a MixedPrecisionPolicy, found {policy!r}.")
    if offload is not None and not type(offload).__name__.endswith("OffloadPolicy"):
        raise ArgumentError(
            f"fully_shard: offload_policy is a CPUOffloadPolicy or None, found {offload!r}."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype") if policy is not None else ():
        dtype = getattr(policy, name)
        if dtype is not None and not getattr(dtype, "is_floating_point", False):
            raise ArgumentError(f"fully_shard: {name} is a floating dtype, found {dtype!r}.")


def _reshards(asked: bool | int | None, parts: int) -> bool | int | None:
    if type(asked) is int:
        return {1: False, parts: True}.get(asked, asked)
    return asked


def _check_free(module: nn.Module, modules: list[nn.Module]) -> None:
    for each in modules:
        if group_of(each) is not None:
            raise LayoutError(
                f"fully_shard: this {type(each).__name__} is fully sharded already. Call it once "
                "for each module: inner modules first, then those around them."
            )
    groups = [group for group in map(group_of, module.modules()) if group is not None]
    inner = {id(member.parameter) for group in groups for member in group.parameters.members}
    for path, parameter in module.named_parameters():
        group = group_with(parameter)
        if group is not None and id(parameter) not in inner:
            name = next(m.name for m in group.parameters.members if m.parameter is parameter)
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
    members = group.parameters.members if group is not None else ()
    return group if any(member.parameter is parameter for member in members) else None


def _members(module: nn.Module, place: ShardAxes, ignored: set[str]) -> list[Member]:
    """The members of a module's group, with their current layouts; tied parameters once."""
    found: dict[int, Member] = {}
    for path, owner in _own_modules(module, ""):
        if getattr(owner, "lays_out_itself", False) or getattr(owner, "sparse", False) is True:
            continue
        for name, parameter in owner._parameters.items():
            full_name = f"{path}.{name}" if path else name
            if parameter is None or full_name in ignored or not can_shard(parameter, place):
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
            own = whole is None or not axes_along(place, whole.grid)
            found[id(parameter)] = Member(full_name, [(owner, name)], parameter, layout, whole, own)
    return list(found.values())


def _own_modules(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The module and those inside, without those that form separate groups."""
    yield path, module
    for name, child in module.named_children():
        if group_of(child) is None:
            yield from _own_modules(child, f"{path}.{name}" if path else name)


# -- making and undoing a group ------------------------------------------------------------------


def _attach(group: ParameterGroup, axes: MeshAxes) -> None:
    """Make the modules of a group gather it when they are called."""
    methods = {
        "set_requires_gradient_sync": group.set_sync,
        "unshard": group.unshard,
        "reshard": group.reshard_now,
    }
    for module in group.modules:
        declare(module, DataAxes(axes, False), source=0)
        zeroes = functools.partial(zero_grad, module)
        module.__dict__.update(methods, zero_grad=zeroes, **{GROUP: group})
        # Before other hooks: they would send new parameters, and this one refuses them.
        module.register_forward_pre_hook(group.before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(group.after_forward, always_call=True)


@torch.no_grad()
def _close(group: ParameterGroup, found: list[Member]) -> None:
    """Replace the parameters that were found by shards."""
    replaced = [member.parameter for member in found]
    apart = group.parameters.dtype is not None
    group.parameters.buffers = make_buffers(found, group.place, norms_apart=apart)
    for buffer in group.parameters.buffers:
        tensors: list[Any] = [member.parameter for member in buffer.members]
        whole = [t._local if isinstance(t, DTensor) else t.detach() for t in tensors]
        shards = buffer.cut(whole)
        for member, local in zip(buffer.members, shards, strict=True):
            _replace(group, member, DTensor._wrap(local, member.layout))
    group.parameters.offload_shards()
    group.parameters.hold()
    update_declared(replaced)


def _replace(group: ParameterGroup, member: Member, made: torch.Tensor) -> None:
    old = member.parameter
    member.parameter = nn.Parameter(made, requires_grad=old.requires_grad)
    member.trained = old.requires_grad
    for name, value in vars(old).items():
        if not name.startswith("_"):
            setattr(member.parameter, name, value)
    note_replaced(old, member.name)
    note_own_gradient(member.parameter, member.whole is None)
    _groups[id(member.parameter)] = group
    for owner, name in member.owners:
        owner._parameters[name] = member.parameter
    group.parameters.follow_flat_weights()


@contextlib.contextmanager
def opened(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters of the module are whole, as before `fully_shard`.

    For front doors that replace parameters; afterwards the new parameters are sharded.
    """
    groups = {id(group): group for p in module.parameters() if (group := group_with(p)) is not None}
    for group in groups.values():
        _open(group)
    try:
        yield
    finally:
        for group in groups.values():
            _close(group, _members(group.module, group.place, group.ignored))


@torch.no_grad()
def _open(group: ParameterGroup) -> None:
    group.reshard()
    parameters = group.parameters
    parameters.gather_plainly()
    replaced = [member.parameter for member in parameters.members]
    parameters.let_go()
    for member, tensor in zip(parameters.members, parameters.tensors(), strict=True):
        made = nn.Parameter(tensor.clone(), requires_grad=member.parameter.requires_grad)
        for owner, name in member.owners:
            owner._parameters[name] = made
    group.reshard()
    parameters.buffers = []
    update_declared(replaced)


# -- layouts -------------------------------------------------------------------------------------
# Where parameters go: the mesh and axis that shard them, their buffers, and their layouts.


def find_place(module: nn.Module, axes: MeshAxes) -> ShardAxes:
    """The mesh for the parameters: that of the module's DTensors, or else the given one.

    Ranks may hold different values in parallel submeshes (shards by a plan). So with several
    submeshes the whole mesh is used, in which every rank has its own coordinate.
    """
    if axes.given.num_axes == 1 and len(axes.axes) > 1:  # a flattened axis
        ((grid, axis),) = axes.collectives()
        return ShardAxes(grid, axis, ())
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
                return ShardAxes(grid, last, tuple(a for each in first for a in each))
            return ShardAxes(axes.grid, axis, tuple(others))
    if axes.given is axes.grid or len(present(axes.grid)) > 1:
        return ShardAxes(axes.grid, axis, tuple(others))
    last = axes.given.num_axes - 1
    return ShardAxes(axes.given, last, tuple(range(last)))


def axes_along(place: ShardAxes, grid: Grid) -> list[int]:
    """The axes of `grid` that together have the ranks of the axis that shards."""
    along = MeshAxes(place.grid, (place.axis,), place.grid).meet(grid)[0]
    if along and math.prod(grid.shape[axis] for axis in along) != place.parts:
        raise LayoutError(
            f"fully_shard: a parameter is on {grid!r} of ranks {list(grid.ranks)}, which has other "
            f"ranks than axis {place.grid.axis_name(place.axis)!r} of {place.grid!r}. Take both "
            "from one mesh."
        )
    return along


def can_shard(parameter: torch.Tensor, place: ShardAxes) -> bool:
    if parameter.dim() == 0 or parameter.numel() == 0:
        return False
    if not isinstance(parameter, DTensor):
        return True
    along = axes_along(place, parameter._layout.grid)
    return all(parameter._layout.placements[axis].is_replicate() for axis in along)


def make_buffers(
    found: list[Member], place: ShardAxes, *, norms_apart: bool = False
) -> list[FlatBuffer]:
    """Buffers by dtype and device; a parameter whose shape differs between ranks gets its own.

    With `norms_apart`, parameters beside running statistics get their own too: they are computed
    in the dtype of the statistics.
    """
    alike: dict[Any, list[Member]] = {}
    made = []
    for member in found:
        ranks = member.whole.grid.ranks if member.whole is not None else present(place.grid)
        shapes = {member.whole_shape(rank) for rank in ranks}
        if len(shapes) == 1:
            beside = norms_apart and member.statistics is not None
            kind = (member.layout.dtype, member.parameter.device, beside)
            alike.setdefault(kind, []).append(member)
        else:
            member.dim = split_dim(max(shapes, key=math.prod), place.parts)
            member.layout = _sharded(member, None, place)
            made.append(FlatBuffer(place.grid, place.axis, [member], [0], None))
    for members in alike.values():
        rank = present(place.grid)[0]
        wholes = [member.whole_shape(rank) for member in members]
        for packing in pack(wholes, place.parts):
            for number, offset in packing.offsets.items():
                member = members[number]
                member.dim = packing.dims[number]
                num_rows, row = rows_of(wholes[number], member.dim)
                sizes = rows_per_chunk(offset, num_rows, row, packing.ends)
                member.layout = _sharded(member, tuple(sizes), place)
            inside = [members[number] for number in packing.offsets]
            offsets = list(packing.offsets.values())
            made.append(FlatBuffer(place.grid, place.axis, inside, offsets, packing.ends))
    return made


def _sharded(member: Member, sizes: tuple[int, ...] | None, place: ShardAxes) -> Any:
    """The layout of a member's shards: rows of its local tensor while gathered."""
    whole, shape = member.whole, member.layout.shape
    grid, axis = place.grid, place.axis
    placements: list[Placement] = [REPLICATE] * grid.num_axes
    if whole is not None:
        along = axes_along(place, whole.grid)
        if len(along) == 1:
            grid, (axis,) = whole.grid, along
            placements = list(whole.placements)
        else:  # the axis is one of another mesh, or a flattened one
            for k, placement in enumerate(whole.placements):
                if k not in along and whole.grid.shape[k] > 1:
                    placements[_axis_like(whole.grid, k, grid)] = placement
    if sizes is None:
        placements[axis] = Shard(member.dim)
    else:
        placements[axis] = shard_with(member.dim, sizes, sum(sizes), place.parts)
        assert shape[member.dim] % sum(sizes) == 0, "other axes split the dim evenly"
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
        f"{grid.axis_name(axis)!r} is not an axis of {other!r}. Take both meshes from one."
    )
