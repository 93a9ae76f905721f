"""parallelize_module: a plan applied to a module."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import agree
from shardwise.core.mesh import current_mesh, grid_of
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.parallel.boundary import tensor_axis
from shardwise.parallel.resolve import Resolved, Target, fit_heads, resolve
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.style_registry import describe_style
from shardwise.parallel.styles import SharedHeads
from shardwise.parallel.tied import Owner, counterparts, distributed_since, tie_again, tied_owners
from shardwise.training.contract import DataAxes, forbid_both
from shardwise.training.fully_sharded.fully_shard import opened
from shardwise.training.mesh_axes import MeshAxes
from shardwise.training.reducer import declare, follow_all, modules_with

Plan = ParallelStyle | str | Mapping[str, ParallelStyle | str]


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: Plan | None = None,
    *,
    src_data_rank: int | None = 0,
    strict: bool = False,
) -> nn.Module:
    """Make a module parallel as the plan says, in place, and return it.

    The plan is a style for the module itself, or a dict from paths to styles or their words. A
    path's parts may contain `*`, `?` and `[1-2]`; "" is the module itself. The mesh is that of a
    surrounding `with device_mesh:` unless given; see docs/howto/parallel.md for several axes. Every
    rank gets the values of rank `src_data_rank`; with None, each keeps its own and nothing is
    communicated. Otherwise the ranks compare their arguments first: where they differ, or one of
    them finds a mistake, all of them raise before anything is changed. An entry that matches
    nothing and an empty plan are warnings, or errors when `strict`.

    >>> import shardwise, torch
    >>> from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    >>> mlp = torch.nn.Sequential(
    ...     torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)
    ... )
    >>> x = torch.ones(2, 4)
    >>> expected = mlp(x)
    >>> with shardwise.simulate(2):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     mlp = parallelize_module(mlp, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    ...     torch.testing.assert_close(mlp(x).agreed(), expected)
    >>> mlp[0].weight.placements, mlp[2].weight.placements
    ((Shard(0),), (Shard(1),))
    """
    mesh = device_mesh if device_mesh is not None else current_mesh()
    with opened(module):
        return _parallelized(module, mesh, parallelize_plan, src_data_rank, strict)


def _parallelized(
    module: nn.Module,
    mesh: DeviceMesh,
    parallelize_plan: Plan | None,
    src_data_rank: int | None,
    strict: bool,
) -> nn.Module:
    grid = grid_of(mesh)
    found, ties, added, problem = Resolved((), ()), [], [], None
    try:
        found = _resolved(module, parallelize_plan, src_data_rank, strict)
        fitted = fit_heads(module, found.targets, mesh.size(tensor_axis(mesh)))
        found = Resolved(tuple(fitted), found.unmatched)
        _forbid_data_axes(found, mesh)
        if found.targets:
            ties = tied_owners(module)
            added = counterparts(ties, found.targets)
            for target in (*added, *found.targets):
                target.style.check_distributed(target.module, mesh)
    except Exception as error:  # of any kind: the other ranks wait for this one
        if src_data_rank is None:
            raise
        problem = error
    if src_data_rank is not None:
        agree(grid, "parallelize_module", _request(found.targets, added, src_data_rank), problem)
    replaced = list(module.parameters())
    before = {id(p) for group in ties for p in (group[0].parameter,) if isinstance(p, DTensor)}
    _apply_automatically(added, mesh, src_data_rank, ties)
    for target in found.targets:
        try:
            changed = target.style.apply(target.module, mesh)
        except Exception as error:
            error.add_note(f"While {type(target.style).__name__} was applied to {target.path!r}.")
            raise
        module = _put(module, target.path, target.module, changed)
        if isinstance(target.style, SharedHeads):
            target.style.regroup(module)
        tie_again(ties)
    late = distributed_since(ties, before, (*found.targets, *added), mesh)
    _apply_automatically(late, mesh, src_data_rank, ties)
    if found.targets:
        declare(module, *_data_axes(mesh))
        follow_all(replaced)
    return module


def _data_axes(mesh: DeviceMesh) -> list[DataAxes]:
    """All axes but the tensor axis: along them each rank has its own batch."""
    grid, split = grid_of(mesh), tensor_axis(mesh)
    others = tuple(axis for axis in range(grid.num_axes) if axis != split)
    return [DataAxes(MeshAxes(grid, others, grid), False)] if others else []


def _forbid_data_axes(found: Resolved, mesh: DeviceMesh) -> None:
    grid, axis = grid_of(mesh), tensor_axis(mesh)
    for target in found.targets:
        if "parameters" in target.style.decides:
            declared_modules = modules_with(list(target.module.parameters()))
            data = [each.axes for declared in declared_modules for each in declared.data_axes]
            reason = f"{type(target.style).__name__} is to shard module {target.path!r} along it"
            forbid_both(data, {(grid, axis): reason}, "parallelize_module")


def _apply_automatically(
    targets: list[Target], mesh: DeviceMesh, src_data_rank: int | None, ties: list[list[Owner]]
) -> None:
    for target in targets:
        target.style.src_data_rank = src_data_rank
        target.style.apply_automatically(target.module, mesh)
        tie_again(ties)


def _resolved(
    module: nn.Module, plan: Plan | None, src_data_rank: int | None, strict: bool
) -> Resolved:
    if plan is None or (isinstance(plan, Mapping) and not plan):
        _warn("parallelize_plan is empty: the module stays as it is.", strict)
        return Resolved((), ())
    found = resolve(module, plan, src_data_rank)
    for message in found.unmatched:
        _warn(message, strict)
    return found


def _request(targets: Iterable[Target], added: Iterable[Target], src_data_rank: int) -> str:
    """What this rank is about to do, to be compared between ranks."""
    lines = [f"src_data_rank={src_data_rank}"]
    for target in (*added, *targets):
        shapes = [tuple(p.shape) for p in target.module.parameters(recurse=False)]
        lines.append(f"{target.path!r}: {describe_style(target.style)} on {shapes}")
    return "\n".join(lines)


def _warn(message: str, strict: bool) -> None:
    if strict:
        raise LayoutError(message)
    warnings.warn(message, UserWarning, stacklevel=4)


def _put(root: nn.Module, path: str, before: nn.Module, after: nn.Module) -> nn.Module:
    """The root, with the module that a style returned; mostly the same module."""
    if after is before:
        return root
    if not path:
        return after
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, after)
    return root
