"""Calls for which every operand is gathered: each rank runs the op on whole tensors.

That is so where the values decide the shape of the result (`nonzero`, `masked_select`), and, where
`fallback("replicate")` asks for it, for ops that no rule covers.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload
from shardwise.comm.watch import watch
from shardwise.core.grid import Grid
from shardwise.core.layout import Layout, make_layout
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.entries import Entry
from shardwise.dtensor.planning import at_path, mover, on_one_mesh, tensor_paths
from shardwise.dtensor.snapshots import read_current
from shardwise.errors import ArgumentError, ReplicationWarning
from shardwise.redistribute.search import find_steps
from shardwise.rules.catalog import find_rule, has_unknown_shape, written_inputs
from shardwise.rules.positional import plain_op
from shardwise.rules.propagate import CallPlan
from shardwise.simulation.parts import one_part


def unknown_shape_entry(op: Any, args: Sequence[Any]) -> Entry | None:
    """The entry of an op whose result's shape depends on values; None for any other call."""
    rule = find_rule(plain_op(op))
    if rule is not None and rule.found_shapes:
        return whole_entry(op, args)
    if not isinstance(op, OpOverload) or not has_unknown_shape(op, args):
        return None
    return whole_entry(op, args)


def whole_entry(op: Any, args: Sequence[Any]) -> Entry:
    """Every operand whole, and so every result; `args` has layouts in place of tensors."""
    paths = list(tensor_paths(args))
    layouts = on_one_mesh(op, [at_path(args, path) for path in paths])
    grid = layouts[0].grid
    whole = tuple(lo.with_placements((REPLICATE,) * grid.num_axes) for lo in layouts)
    steps = tuple(find_steps(a, b) for a, b in zip(layouts, whole, strict=True))
    entry = Entry(CallPlan(op, steps if any(steps) else None, whole, (), None, ()))
    if any(steps):
        entry.move = mover(paths, entry.plan)

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        return _wrapped(result, lambda local: wrap(local, _found_layout(local, grid)))

    entry.finish = finish
    if op in _UNIQUE:
        entry.call = _unique(op, _UNIQUE[op])
    return entry


#: Ops of which torch's shape function finds a wrong shape where their dim is negative, and before
#: torch 2.13 a wrong dtype of their indices and counts; and the position of that dim.
_UNIQUE = {
    torch.ops.aten._unique2.default: None,
    torch.ops.aten.unique_dim.default: 1,
    torch.ops.aten.unique_dim_consecutive.default: 1,
    torch.ops.aten.unique_consecutive.default: 3,
}


def _unique(op: Any, position: int | None) -> Callable[..., Any]:
    """The op with a dim that counts from the front, and integers where there are integers."""

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


def _found_layout(local: torch.Tensor, grid: Grid) -> Layout:
    """The layout of a whole tensor that was made without a plan for its shape."""
    part = one_part(local)
    whole = (REPLICATE,) * grid.num_axes
    return make_layout(grid, whole, part.shape, part.stride(), part.dtype)


# -- the fallback ----------------------------------------------------------------------------

_told: set[str] = set()


@contextlib.contextmanager
def fallback(how: str) -> Iterator[None]:
    """Inside, an op that no rule covers gathers its operands and runs on whole tensors.

    Each op that does so is told of once, with the bytes that a rank receives
    (`ReplicationWarning`). Random numbers are never drawn this way: ranks would draw their own.
    """
    if how != "replicate":
        raise ArgumentError(f'fallback() knows one way, "replicate"; found {how!r}.')
    watch.gather_unknown += 1
    try:
        yield
    finally:
        watch.gather_unknown -= 1
        if not watch.gather_unknown:
            _told.clear()


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
    """Run a call that no rule covers on whole tensors. Nothing is remembered of it."""
    entry = whole_entry(op, layouts)
    read_current(layouts, entry)
    _tell(op, entry)
    written = written_inputs(plain_op(op))
    if entry.move is not None:
        entry.move(operands, args)
    for position in written:
        operands[position] = operands[position].clone()
    result = op(*operands, **kwargs)
    assert entry.finish is not None, "a gathered call knows how to finish"
    if not written:
        return entry.finish(result, args, wrap)
    for position in written:
        value = entry.finish(operands[position], args, wrap)
        torch.ops.aten.copy_.default(args[position], value)
    return args[written[0]] if plain_op(op)._schema.returns else None


def _tell(op: Any, entry: Entry) -> None:
    name = str(plain_op(op))
    if name in _told:
        return
    _told.add(name)
    moved = [steps[0].source for steps in entry.plan.steps or () if steps]
    num_bytes = sum(int(torch.Size(lo.shape).numel()) * lo.dtype.itemsize for lo in moved)
    warnings.warn(
        f"{name} has no sharding rule: {len(moved)} operands were gathered, {num_bytes:,} bytes on "
        "each rank. Register a rule with shardwise.register_rule to avoid it.",
        ReplicationWarning,
        stacklevel=2,
    )
