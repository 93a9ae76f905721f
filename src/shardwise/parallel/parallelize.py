"""parallelize_module: a plan applied to a module; plans in files, and `check_plan`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.agreement import agree
from shardwise.core.mesh import current_mesh, grid_of
from shardwise.core.placements import Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.parallel.resolve import (
    Placed,
    Resolved,
    Target,
    describe_style,
    entry_of,
    fit_heads,
    fits,
    note_placed,
    problems,
    readable,
    resolve,
    styles_of,
)
from shardwise.parallel.style import ParallelStyle, tensor_axis
from shardwise.parallel.styles import ColwiseParallel, RowwiseParallel, SharedHeads
from shardwise.parallel.tied import Owner, counterparts, distributed_since, tie_again, tied_owners
from shardwise.plans import read_plan_file, write_plan_file
from shardwise.training.contract import DataAxes, MeshAxes, check_axes_differ
from shardwise.training.fully_sharded.fully_shard import opened
from shardwise.training.reducer import declare, modules_with, update_declared

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
    communicated. Otherwise the ranks compare their arguments first: if they differ, or one rank
    finds a mistake, all of them raise before anything is changed. An entry that matches nothing and
    an empty plan cause warnings, or errors if `strict`.

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
        module = _replaced_module(module, target.path, target.module, changed)
        if isinstance(target.style, SharedHeads):
            target.style.regroup(module)
        tie_again(ties)
    late = distributed_since(ties, before, (*found.targets, *added), mesh)
    _apply_automatically(late, mesh, src_data_rank, ties)
    if found.targets:
        declare(module, *_data_axes(mesh))
        update_declared(replaced)
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
            check_axes_differ(data, {(grid, axis): reason}, "parallelize_module")


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
    """A description of what this rank is about to do, to be compared between ranks."""
    lines = [f"src_data_rank={src_data_rank}"]
    for target in (*added, *targets):
        held = dict(target.module.named_parameters(recurse=False))
        shapes = [tuple(p.shape) for p in held.values()]
        lines.append(f"{target.path!r}: {describe_style(target.style)} on {shapes}")
        lines += [f"{target.path!r}: {n} is frozen" for n, p in held.items() if not p.requires_grad]
    return "\n".join(lines)


def _warn(message: str, strict: bool) -> None:
    if strict:
        raise LayoutError(message)
    warnings.warn(message, UserWarning, stacklevel=5)  # the caller of parallelize_module


def _replaced_module(root: nn.Module, path: str, before: nn.Module, after: nn.Module) -> nn.Module:
    """The root, with the module that a style returned; mostly the same module."""
    if after is before:
        return root
    if not path:
        return after
    parent, _, name = path.rpartition(".")
    setattr(root.get_submodule(parent), name, after)
    return root


# -- plan ----------------------------------------------------------------------------------------
# Plans in files, and `check_plan`: what a plan would do to a module, without doing it.


def load_plan(path: str | os.PathLike[str]) -> dict[str, ParallelStyle]:
    """The plan in a TOML or JSON file, ready for `parallelize_module`.

    >>> import tempfile
    >>> from shardwise.parallel import ColwiseParallel, load_plan, save_plan
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_plan({"layers.*.up": "colwise", "norm": "sequence_parallel"}, f"{folder}/p.toml")
    ...     plan = load_plan(f"{folder}/p.toml")
    >>> {pattern: type(style).__name__ for pattern, style in plan.items()}
    {'layers.*.up': 'ColwiseParallel', 'norm': 'SequenceParallel'}
    """
    return styles_of(read_plan_file(path))


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a .toml or .json file; `load_plan` reads it.

    Styles of your own cannot be saved.
    """
    write_plan_file(path, {p: entry_of(style, p) for p, style in styles_of(plan).items()})


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a plan would do to a module. Printed, it is a table."""

    #: Each sharded parameter and its placement over the tensor axis.
    sharded: Mapping[str, Placement]
    #: Parameters that become DTensors, whole on every rank.
    replicated: tuple[str, ...]
    #: Parameters that the plan does not touch.
    untouched: tuple[str, ...]
    #: Bytes of parameters on each rank along the tensor axis.
    bytes_per_rank: tuple[int, ...]
    mistakes: tuple[str, ...]
    #: Warnings: plain parameters that may be used with a shard of an activation.
    doubts: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{'sharded':12} {name}: {where}" for name, where in self.sharded.items()]
        lines += [f"{'replicated':12} {name}" for name in self.replicated]
        lines += [f"{'not in plan':12} {name}" for name in self.untouched]
        lines += [f"{'mistake':12} {mistake}" for mistake in self.mistakes]
        lines += [f"{'doubt':12} {doubt}" for doubt in self.doubts]
        sizes = ", ".join(f"{size:,}" for size in self.bytes_per_rank)
        return "\n".join([*lines, f"bytes of parameters per rank: {sizes}"])


def check_plan(module: nn.Module, plan: Plan, device_mesh: DeviceMesh | int) -> PlanReport:
    """What a plan would do to a module, with its mistakes and doubts; nothing is changed.

    A doubt is a plain parameter beside layers that pass sharded activations to each other: the
    order of calls is unknown, so whether the parameter is used between them is unknown too.

    `device_mesh` may be a number of ranks: no process group is needed, and the module may be on the
    meta device.

    >>> import torch
    >>> from shardwise.parallel import check_plan
    >>> mlp = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6))
    >>> print(check_plan(mlp, {"0": "colwise", "1": "rowwise"}, 4))     # doctest: +ELLIPSIS
    sharded      0.weight: Shard(0)
    sharded      0.bias: Shard(0)
    not in plan  1.weight
    not in plan  1.bias
    mistake      Module '1' is a LayerNorm; RowwiseParallel is for nn.Linear and nn.Embedding. ...
    bytes of parameters per rank: 88, 88, 88, 48
    """
    if isinstance(device_mesh, int):
        num_ranks = device_mesh
    elif not isinstance(device_mesh, DeviceMesh):
        raise ArgumentError(
            "check_plan(module, plan, device_mesh) takes a mesh or a number of ranks last, found a "
            f"{type(device_mesh).__name__}."
        )
    else:
        num_ranks = device_mesh.size(tensor_axis(device_mesh))
    if num_ranks < 1:
        raise LayoutError(f"A plan is for at least one rank, found {num_ranks}.")
    styles, unreadable = readable(plan) if isinstance(plan, Mapping) else (plan, [])
    found = resolve(module, styles, check=False)
    wrong = [*unreadable, *problems(list(found.targets))]
    added: list[Target] = []
    try:
        if not wrong:
            found = replace(found, targets=tuple(fit_heads(module, found.targets, num_ranks)))
            added = counterparts(tied_owners(module), found.targets)
    except ShardwiseError as error:
        wrong.append(error)
    names = {id(p): name for name, p in module.named_parameters()}
    noted: dict[int, Placed] = {}
    note_placed(noted, (*found.targets, *added))
    placed = {i: each.placement for i, each in noted.items() if i in names}
    sizes = [0] * num_ranks
    for parameter in module.parameters():
        for rank, size in enumerate(_bytes(parameter, placed.get(id(parameter)), num_ranks)):
            sizes[rank] += size
    return PlanReport(
        {names[i]: p for i, p in placed.items() if isinstance(p, Shard)},
        tuple(names[i] for i, p in placed.items() if not isinstance(p, Shard)),
        tuple(name for i, name in names.items() if i not in placed),
        tuple(sizes),
        (*map(str, wrong), *found.unmatched),
        _doubts(module, found.targets, placed),
    )


def _bytes(parameter: torch.Tensor, placement: Placement | None, num_ranks: int) -> list[int]:
    whole = parameter.numel() * parameter.element_size()
    if not isinstance(placement, Shard) or placement.dim >= parameter.dim() or not whole:
        return [whole] * num_ranks
    size = parameter.shape[placement.dim]
    return [whole // size * length for length in lengths(size, num_ranks, placement.sizes)]


def _doubts(
    module: nn.Module, targets: Sequence[Target], placed: Container[int]
) -> tuple[str, ...]:
    """A warning for each plain parameter beside a colwise and a rowwise layer.

    Between such layers each rank has only some columns. A plain parameter that is used there does
    not fit them, or gets the gradient of only this rank's columns. A plan does not say in which
    order a module calls its children, so this only warns. `placed` are the ids of parameters that
    the plan places.
    """
    colwise = _parents(targets, ColwiseParallel)
    rowwise = _parents(targets, RowwiseParallel)
    found = []
    for parent in colwise:
        if parent not in rowwise:
            continue
        prefix = f"{parent}." if parent else ""
        for name, parameter in module.get_submodule(parent).named_parameters():
            if id(parameter) not in placed:
                found.append(
                    f"{prefix + name!r} is plain and stands beside {colwise[parent]!r} and "
                    f"{rowwise[parent]!r}, between which each rank has some of the columns. If it "
                    "is used there, the plan needs an entry for its module, such as "
                    '"replicated_with_grad_allreduce" for a norm of each head.'
                )
    return tuple(found)


def _parents(
    targets: Sequence[Target], style: type[ColwiseParallel | RowwiseParallel]
) -> dict[str, str]:
    """The parents of layers of this style with sharded columns, each with one such layer."""
    found: dict[str, str] = {}
    for target in filter(fits, targets):
        if not isinstance(target.style, style):
            continue
        colwise = isinstance(target.style, ColwiseParallel)
        layout = target.style.output_layouts if colwise else target.style.input_layouts
        takes_ids = isinstance(target.module, nn.Embedding) and not colwise
        if not takes_ids and (layout is None or layout.is_shard(-1)):
            found.setdefault(target.path.rpartition(".")[0], target.path)
    return found
