"""Ops without a rule: decomposed, run on gathered operands, or fused optimizer steps.

Each op of a decomposition is planned like any other call. An op with a kernel above autograd comes
here if there is no autograd (`torch.inference_mode`, the meta device): the kernel is then its
decomposition. Operands are gathered if the shape of the result is data-dependent (`nonzero`,
`masked_select`), and inside `fallback("replicate")` if nothing else works.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload, decompositions, is_composite
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout, replicated_layout
from shardwise.core.placements import REPLICATE
from shardwise.dispatch.catalog import (
    at_path,
    find_rule,
    has_unknown_shape,
    plain_op,
    rule_caches,
    tensor_paths,
    written_inputs,
)
from shardwise.dispatch.plan import Entry, check_writable, mover, on_one_mesh
from shardwise.dispatch.propagate import CallPlan, forbid_move
from shardwise.dispatch.variants import FUSED_STEPS, UNSCALE, count_writes, is_foreach
from shardwise.dispatch.wrapped import Wrapped, remember
from shardwise.dtensor import autograd
from shardwise.dtensor.autograd import reduced_together
from shardwise.dtensor.conversion import stride_like
from shardwise.dtensor.foreach import one_by_one
from shardwise.dtensor.snapshots import read_current
from shardwise.errors import (
    ArgumentError,
    LayoutError,
    MixedTensorsError,
    ReplicationWarning,
)
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import (
    from_parts,
    held_like,
    one_part,
    parts_of,
    plain_if_equal,
    roster_of,
)
from shardwise.simulation.roster import Roster

aten = torch.ops.aten

#: Ops that torch does not decompose, or not for all sizes; `ops.catalog` adds more.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}

#: The kernels above autograd, by op; `ops.catalog` fills it.
kernels_above: dict[Any, Callable[..., Any]] = {}


@functools.lru_cache(maxsize=1024)
def decomposition_of(op: Any) -> Callable[..., Any] | None:
    """A function that computes `op` with other ops, or None."""
    if not isinstance(op, OpOverload):
        return None
    if op in DECOMPOSITIONS:
        return DECOMPOSITIONS[op]
    if op in kernels_above:
        return kernels_above[op]
    if op in FUSED_STEPS:
        return functools.partial(fused_step, op)
    if is_foreach(op):
        return functools.partial(one_by_one, op)
    if op._schema.is_mutable:
        return None
    if is_composite(op):
        return op.decompose
    # Last: importing them takes most of a second, and most programs never need it.
    return decompositions().get(op)


rule_caches.append(decomposition_of.cache_clear)


def _unscale(tensors: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """The op of a GradScaler: scale gradients, and note whether any holds an infinity or NaN.

    Partial gradients are reduced together, and their reductions are cached. The counts of all
    gradients are added first, so that one collective per mesh axis suffices.
    """
    distributed = [tensor for tensor in tensors if hasattr(tensor, "_layout")]
    whole = [tensor for tensor in tensors if not hasattr(tensor, "_layout")]
    for tensor, (local, layout) in zip(distributed, reduced_together(distributed), strict=True):
        if local is not tensor._local:
            remember(tensor, local, layout)
        whole.append(type(tensor)._wrap(local, layout))
    total: Any = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in whole]).sum()
    found_inf.masked_fill_(plain_if_equal(total.full_tensor()) > 0, 1.0)
    for tensor in tensors:
        tensor.mul_(inv_scale)
    count_writes(tensors)


DECOMPOSITIONS.update(
    {
        UNSCALE: _unscale,
        aten._is_any_true.default: aten.any.default,
        aten._is_all_true.default: aten.all.default,
        aten.is_same_size.default: lambda x, other: x.shape == other.shape,
        # Compares a value and its tangent, whose layouts may differ: only global sizes count.
        aten._has_same_storage_numel.default: lambda x, other: x.numel() == other.numel(),
        # Called by torch's C++ where it takes no symbols: sizes are specialised, as on one device.
        aten.size.default: lambda x: tuple(map(int, x.shape)),
        aten.stride.default: lambda x: tuple(map(int, x.stride())),
        aten.storage_offset.default: lambda x: 0,
    }
)


# -- gathered operands -----------------------------------------------------------------------


def unknown_shape_entry(op: Any, args: Sequence[Any]) -> Entry | None:
    """The entry of an op whose output shape is data-dependent; None for any other call."""
    rule = find_rule(plain_op(op))
    found_shapes = rule is not None and rule.found_shapes
    if found_shapes or (isinstance(op, OpOverload) and has_unknown_shape(op, args)):
        return whole_entry(op, args)
    return None


def whole_entry(op: Any, args: Sequence[Any]) -> Entry:
    """An entry that replicates all operands; `args` has layouts in place of tensors."""
    paths = list(tensor_paths(args))
    layouts = on_one_mesh(op, [at_path(args, path) for path in paths])
    grid = layouts[0].grid
    whole = tuple(lo.with_placements((REPLICATE,) * grid.num_axes) for lo in layouts)
    steps = tuple(find_steps(a, b) for a, b in zip(layouts, whole, strict=True))
    entry = Entry(CallPlan(op, steps if any(steps) else None, whole, (), None, ()))
    if any(steps):
        entry.move = mover(paths, entry.plan)

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        # The shape was not planned.
        return _wrapped(result, lambda local: wrap(local, replicated_layout(grid, one_part(local))))

    entry.finish = finish
    if op in _UNIQUE:
        entry.call = _unique(op, _UNIQUE[op])
    return entry


#: Ops whose fake results have a wrong shape for a negative dim and, before torch 2.13, a wrong
#: dtype of indices and counts; and the position of that dim.
_UNIQUE = {
    torch.ops.aten._unique2.default: None,
    torch.ops.aten.unique_dim.default: 1,
    torch.ops.aten.unique_dim_consecutive.default: 1,
    torch.ops.aten.unique_consecutive.default: 3,
}


def _unique(op: Any, position: int | None) -> Callable[..., Any]:
    """The op with a non-negative dim, and with indices and counts as int64."""

    def call(x: torch.Tensor, *options: Any) -> Any:
        given = [x, *options]
        if position is not None and position < len(given):
            dim = given[position]
            if dim is not None and -x.dim() <= dim < 0:
                given[position] = dim + x.dim()
        values, indices, counts = op(*given)
        return values, indices.long(), counts.long()

    return call


def _wrapped(result: Any, wrap: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(result, torch.Tensor):
        return wrap(result)
    if isinstance(result, (list, tuple)):
        found = [_wrapped(r, wrap) for r in result]
        return found if isinstance(result, list) else tuple(found)
    return result


#: The ops that were warned about.
_warned: set[str] = set()


@contextlib.contextmanager
def fallback(how: str) -> Iterator[None]:
    """Inside, an op that no rule covers gathers its operands and runs on whole tensors.

    Each such op gives one `ReplicationWarning`, with the bytes that a rank receives.
    Random ops are excluded: each rank would draw its own numbers.
    """
    if how != "replicate":
        raise ArgumentError(f'fallback() knows one way, "replicate"; found {how!r}.')
    watch.gather_unknown += 1
    try:
        yield
    finally:
        watch.gather_unknown -= 1
        if not watch.gather_unknown:
            _warned.clear()


def may_fall_back(op: Any) -> bool:
    """Whether `fallback` is on and the op's result is the same on every rank."""
    tags = getattr(plain_op(op), "tags", ())
    return bool(watch.gather_unknown) and torch.Tag.nondeterministic_seeded not in tags


def run_gathered(
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    layouts: Sequence[Any],
    operands: list[Any],
    wrap: Callable[..., Any],
) -> Any:
    """Run a call that no rule covers on whole tensors. The plan is not cached."""
    entry = whole_entry(op, layouts)
    read_current(layouts, entry)
    _warn(op, entry)
    written = written_inputs(plain_op(op))
    if entry.move is not None:
        entry.move(operands, args)
    for position in written:
        operands[position] = operands[position].clone()
    result = op(*operands, **kwargs)
    assert entry.finish is not None, "whole_entry sets it"
    if not written:
        return entry.finish(result, args, wrap)
    for position in written:
        value = entry.finish(operands[position], args, wrap)
        torch.ops.aten.copy_.default(args[position], value)
    return args[written[0]] if plain_op(op)._schema.returns else None


def _warn(op: Any, entry: Entry) -> None:
    name = str(plain_op(op))
    if name in _warned:
        return
    _warned.add(name)
    moved = [steps[0].source for steps in entry.plan.steps or () if steps]
    num_bytes = sum(int(torch.Size(lo.shape).numel()) * lo.dtype.itemsize for lo in moved)
    warnings.warn(
        f"{name} has no sharding rule: {len(moved)} operands were gathered, {num_bytes:,} bytes on "
        "each rank. Register a rule with shardwise.register_rule to avoid it.",
        ReplicationWarning,
        stacklevel=2,
    )


# -- fused step ----------------------------------------------------------------------------------
# torch's fused optimizer steps: one kernel for whole lists of parameters, gradients and states.
#
# The steps are elementwise, so the kernel is right on local tensors of one layout. A tensor in
# another layout than its parameter is redistributed first, and written back afterwards.


#: The list of numbers, one per parameter; all other lists hold tensors shaped like the parameters.
_STEPS = "state_steps"
#: The list that the first step fills without reading it.
_MOMENTA = "momentum_buffer_list"


def fused_step(op: Any, *lists: Sequence[torch.Tensor], **options: Any) -> None:
    """Run a fused step on lists that hold DTensors, and perhaps plain tensors too."""
    names = [argument.name for argument in op._schema.arguments[: len(lists)]]
    given = {name: items for name, items in zip(names, lists, strict=True) if items}
    rows: list[list[Any]] = []
    loans: list[_LentTensors] = []
    for cells in zip(*given.values(), strict=True):
        row = dict(zip(given, cells, strict=True))
        found, lent = _local_rows(op, row, unset=bool(options.get("is_first_step")))
        rows += found
        loans += lent
    columns = dict(zip(given, zip(*rows, strict=True), strict=True))
    op(*(list(columns.get(name, ())) for name in names), **options)
    written = written_lists(op, options)
    for loan in loans:
        if loan.name in written:
            loan.give_back()
    count_writes([tensor for name in given if name in written for tensor in given[name]])


def written_lists(op: Any, options: Mapping[str, Any]) -> set[str]:
    """The lists that the kernel writes to: gradients only where it unscales them."""
    unscales = options.get("grad_scale") is not None
    listed = {a.name for a in op._schema.arguments if not a.kwarg_only}
    return listed - ({_STEPS} if unscales else {_STEPS, "grads"})


@dataclass(slots=True)
class _LentTensors:
    """The local tensors of a DTensor in the kernel's lists."""

    name: str
    tensor: Any
    layout: Layout
    roster: Roster | None
    parts: list[torch.Tensor]
    #: Whether these are copies, not the DTensor's own memory.
    apart: bool = False

    def give_back(self) -> None:
        if self.apart:
            local = from_parts(self.parts, self.roster)
            torch.ops.aten.copy_.default(self.tensor, self.tensor._wrap(local, self.layout))


def _local_rows(
    op: Any, cells: Mapping[str, Any], *, unset: bool
) -> tuple[list[list[Any]], list[_LentTensors]]:
    """One parameter with its gradient and state: one row, or one per part in a simulated world.

    `unset`: its momentum has no values yet.
    """
    tensors = {name: tensor for name, tensor in cells.items() if name != _STEPS}
    if not any(isinstance(tensor, Wrapped) for tensor in tensors.values()):
        return [list(cells.values())], []
    _check(op, tensors)
    loans: dict[str, _LentTensors] = {}
    for position, (name, tensor) in enumerate(tensors.items()):
        if unset and name == _MOMENTA:
            tensor.zero_()  # simulated ranks must hold equal values
        loans[name] = _lend(op, position, name, tensor, next(iter(loans.values()), None))
    step = cells.get(_STEPS)
    if isinstance(step, Wrapped):
        step = plain_if_equal(autograd.move(step, autograd.whole_layout(step._layout))._local)
    num = len(next(iter(loans.values())).parts)
    for number in range(num):
        _share_strides(list(loans.values()), number)
    rows = [[loans[n].parts[k] if n in loans else step for n in cells] for k in range(num)]
    return rows, list(loans.values())


def _check(op: Any, tensors: Mapping[str, Any]) -> None:
    """Raise where shapes differ: the kernels check none, and would access other memory."""
    plain = [name for name, tensor in tensors.items() if not isinstance(tensor, Wrapped)]
    if plain:
        raise MixedTensorsError(
            f"{op} got mixed torch.Tensor and DTensor: a parameter with its gradient and state, of "
            f"which {', '.join(plain)} {'is' if len(plain) == 1 else 'are'} plain. Wrap all of "
            "them alike: distribute_tensor(x, mesh, placements)."
        )
    layouts = on_one_mesh(op, [tensor._layout for tensor in tensors.values()])
    for name, layout in zip(tensors, layouts, strict=True):
        check_writable(op, layout)
        if layout.shape != layouts[0].shape:
            raise LayoutError(
                f"{op} got {layout!r} in {name} for the parameter {layouts[0]!r}: both must have "
                "the same shape."
            )


def _lend(
    op: Any, position: int, name: str, tensor: Any, first: _LentTensors | None
) -> _LentTensors:
    """`tensor` in the layout of the parameter, which is the first loan; a Partial is reduced."""
    layout = tensor._layout
    if first is None:
        target = layout.reduced()
    else:
        target = layout.with_placements(first.layout.placements, first.layout.order)
    moved = tensor
    if target is not layout:
        if watch.strict:
            forbid_move(op, position, find_steps(layout, target), target)
        with because(op, implicit=True):
            moved = autograd.move(tensor, target, own=True)
    local = moved._local
    roster = roster_of(local) if first is None else first.roster
    apart = moved is not tensor or roster_of(local) is not roster
    parts = list(parts_of(held_like(local, roster)))
    return _LentTensors(name, tensor, target, roster, parts, apart)


def _share_strides(loans: Sequence[_LentTensors], number: int) -> None:
    """Give the tensors of a row the same dense strides, since the kernels ignore strides."""
    parts = [loan.parts[number] for loan in loans]
    if all(part.is_contiguous() for part in parts):
        return
    stride = parts[0].stride()
    if stride == stride_like(parts[0], parts[0].shape) and all(p.stride() == stride for p in parts):
        return  # dense, with the dims in another order
    for loan in loans:
        if not loan.parts[number].is_contiguous():
            loan.parts[number] = loan.parts[number].contiguous()
            loan.apart = True
