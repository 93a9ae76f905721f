"""Foreach ops: one op for each item of lists, planned item by item and run on all shards at once.

Note [Foreach calls]
The plan for an item is that of the op for a single tensor; items of equal layouts share it. Where
nothing moves and shards need nothing special, the foreach op itself runs on the local tensors of
all such items; in a simulated world, of those that the same ranks share. Others have a local
function, which is called without a dispatch for each. Items that move are called one by one. Plain
tensors, and tensors of another mesh than a number beside the lists, are called together, with the
value of that number.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload
from shardwise.core.layout import Layout
from shardwise.dispatch.catalog import find_rule
from shardwise.dispatch.plan import Entry, make_entry
from shardwise.dispatch.propagate import CallPlan
from shardwise.dispatch.variants import (
    count_writes,
    count_writes_by_grid,
    is_dense,
    is_foreach,
)
from shardwise.dispatch.wrapped import Wrapped, is_partial
from shardwise.dtensor.operands import as_list, number_as_plain
from shardwise.errors import UnsupportedError
from shardwise.simulation.ranks import plays_all, roster_of

aten = torch.ops.aten

#: Single ops of another name: where the second argument is a tensor, and where it is not.
_OTHER_NAMES = {
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "norm": ("linalg_vector_norm", "linalg_vector_norm"),
}
#: Arguments that the single op calls otherwise.
_OTHER_ARGUMENTS = {"scalars": "value"}


@dataclass(frozen=True, slots=True)
class SingleForm:
    """The op that a foreach op applies to each item."""

    op: OpOverload
    writes: bool
    #: For each positional argument of the foreach op, its keyword here; None: it is positional.
    names: tuple[str | None, ...]

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
    ) -> tuple[list[Any], dict[str, Any]]:
        """Those of the item with this number."""
        own: list[Any] = []
        named = {name: _item(value, number) for name, value in kwargs.items()}
        for name, value in zip(self.names, args, strict=False):
            if name is None:
                own.append(_item(value, number))
            else:
                named[name] = _item(value, number)
        return own, named

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int) -> Any:
        """Call the op for one item."""
        own, named = self.arguments(args, kwargs, number)
        result = self.op(*own, **named)
        if self.writes:
            if not self.op._schema.is_mutable:
                own[0].copy_(result)
            count_writes(own[:1])  # a later item may be a view of the same tensor
        return result


@functools.lru_cache(maxsize=1024)
def single_form(op: Any) -> SingleForm | None:
    """The single form of a foreach op; None for other ops, and where there is none.

    >>> single_form(torch.ops.aten._foreach_mul_.ScalarList).op
    <OpOverload(op='aten.mul_', overload='Scalar')>
    """
    if not is_foreach(op):
        return None
    arguments = op._schema.arguments
    writes = op._schema.is_mutable
    name = op._schema.name.removeprefix("aten::_foreach_").removesuffix("_" if writes else "")
    second = len(arguments) > 1 and "Tensor" in str(arguments[1].type)
    name = _OTHER_NAMES.get(name, (name, name))[0 if second else 1]
    for packet in (name + "_", name) if writes else (name,):
        for overload in _overloads(packet):
            names = _matched(arguments, overload._schema.arguments)
            if names is not None:
                return SingleForm(overload, writes, names)
    return None


def one_by_one(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A foreach op as a loop: the same op for a single tensor, once per item."""
    form = single_form(op)
    if form is None or not isinstance(args[0], (list, tuple)):
        raise UnsupportedError(f"{op} has no form for a single tensor.")
    results = [form.run(args, kwargs, number) for number in range(len(args[0]))]
    return None if form.writes else results


def _overloads(packet: str) -> list[OpOverload]:
    found = getattr(aten, packet, None)
    every = [getattr(found, name) for name in found.overloads()] if found is not None else []
    return [op for op in every if not any(a.is_out for a in op._schema.arguments)]


def _matched(given: Sequence[Any], wanted: Sequence[Any]) -> tuple[str | None, ...] | None:
    """The keyword, or None, of each argument of a foreach op for the single op that has `wanted`.

    None if that op does not take such arguments.
    """
    by_name = {a.name: str(a.type) for a in wanted}
    names: list[str | None] = []
    num_positional = 0
    for argument in given:
        kind = _item_type(str(argument.type))
        name = _OTHER_ARGUMENTS.get(argument.name, argument.name)
        at = wanted[num_positional] if num_positional < len(wanted) else None
        if at is not None and not (argument.kwarg_only or at.kwarg_only) and str(at.type) == kind:
            names.append(None)
            num_positional += 1
        elif by_name.get(name) == kind:
            names.append(name)
        else:
            return None
    taken = {name for name in names if name is not None}
    missing = (a for a in wanted[num_positional:] if a.name not in taken)
    return tuple(names) if all(a.has_default_value() for a in missing) else None


def _item_type(name: str) -> str:
    return {"List[Tensor]": "Tensor", "List[number]": "number"}.get(name, name)


def _item(argument: Any, number: int) -> Any:
    return argument[number] if isinstance(argument, (list, tuple)) else argument


# -- plans -----------------------------------------------------------------------------------

#: How an item is called: on local tensors, one by one, or together with others for which a DTensor
#: beside the lists must be a plain number.
_LOCALLY, _ALONE, _WITH_PLAIN = _HOWS = ("locally", "alone", "with a plain number")


@dataclass(frozen=True, slots=True)
class _ItemPlan:
    """The plan for one item, shared by those of equal layouts."""

    how: str
    #: The layouts of its tensors, and of its result or the tensor written to.
    inputs: tuple[Layout, ...] = ()
    out: Layout | None = None
    #: Runs on its local tensors; None: the foreach op itself does.
    call: Callable[..., Any] | None = None


def foreach_entry(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Entry | None:
    """The entry of a foreach op; None where a loop finds out what each item needs, or raises.

    `args` has layouts in place of the tensors of meshes.
    """
    form = single_form(op)
    if form is None or not isinstance(args[0], (list, tuple)):
        return None
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    num = len(args[0])
    if any(len(each) != num for each in lists):
        return None
    by_value = is_by_value(op)
    items: list[_ItemPlan] = []
    known: dict[Any, _ItemPlan | None] = {}
    for number in range(num):
        key = tuple([_key(each[number], by_value) for each in lists])
        if key not in known:
            known[key] = _plan(form, args, kwargs, number)
        item = known[key]
        if item is None:
            return None
        items.append(item)
    if all(item.how is _LOCALLY for item in items):
        return _local_entry(op, form, args, items)
    return _divided_entry(op, form, items)


def is_by_value(op: Any) -> bool:
    """Whether the plans for a foreach op's items depend on the values of floats."""
    form = single_form(op)
    rule = None if form is None else find_rule(form.op)
    return rule is not None and rule.by_value


def _key(cell: Any, by_value: bool) -> Any:
    if isinstance(cell, torch.Tensor):
        return torch.Tensor
    return cell if by_value or isinstance(cell, Layout) else type(cell)


def _plan(
    form: SingleForm, args: Sequence[Any], kwargs: Mapping[str, Any], number: int
) -> _ItemPlan | None:
    own, named = form.arguments(args, kwargs, number)
    cells = [arg[number] for arg in args if isinstance(arg, (list, tuple))]
    layouts = tuple(cell for cell in cells if isinstance(cell, Layout))
    grids = {layout.grid for layout in layouts}
    is_plain = any(isinstance(cell, torch.Tensor) for cell in cells)
    if len(grids) + is_plain != 1:
        return None
    if is_plain or any(isinstance(arg, Layout) and arg.grid not in grids for arg in args):
        return _ItemPlan(_WITH_PLAIN)
    if any(layout.snapshot or layout.expanded for layout in layouts):
        return None  # a write would be lost, or reach other entries
    if form.writes and (is_partial(layouts[0]) or not all(map(is_dense, layouts))):
        return _ItemPlan(_ALONE)
    try:
        entry = make_entry(form.op, own, named)
    except Exception:  # of whatever kind: the loop raises it again, with tensors
        return None
    out = layouts[0] if form.writes else entry.out
    runs_itself = _runs_itself(entry, layouts)
    if entry.move is not None or out is None:
        return _ItemPlan(_ALONE)
    if form.writes and entry.writes is None:  # the op has no single form in place
        made = entry.out
        if made is None or made.placements != out.placements or not runs_itself:
            return _ItemPlan(_ALONE)
    return _ItemPlan(_LOCALLY, layouts, out, None if runs_itself else entry.call)


def _runs_itself(entry: Entry, layouts: Sequence[Layout]) -> bool:
    """Whether the foreach op is right on local tensors of these layouts."""
    plan = entry.plan
    if plan.local is not None or plan.local_shape or layouts[0].grid.outside:
        return False
    # Whole numbers may be refused, such as a zero that divides: the ranks have to agree.
    return all(x.dtype.is_floating_point and not is_partial(x) for x in plan.inputs)


def _local_entry(
    op: Any, form: SingleForm, args: Sequence[Any], items: Sequence[_ItemPlan]
) -> Entry:
    """The entry of a call that sends nothing."""
    layouts = [layout for arg in args for layout in as_list(arg) if isinstance(layout, Layout)]
    outs = [item.out for item in items if item.out is not None]
    entry = Entry(CallPlan(op, None, tuple(layouts), tuple(outs), None, ()))
    by_ranks = any(plays_all(layout.grid) for layout in outs)
    entry.call = _local_call(op, form, [item.call for item in items], by_ranks=by_ranks)
    if not form.writes:
        entry.finish = lambda result, args, wrap: list(map(wrap, result, outs))
        return entry
    num_writes = Counter(layout.grid for layout in outs)

    def count(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> None:
        count_writes_by_grid(num_writes, args[0])

    entry.finish = count
    return entry


def _local_call(
    op: Any,
    form: SingleForm,
    calls: Sequence[Callable[..., Any] | None],
    *,
    by_ranks: bool,
) -> Callable[..., Any]:
    together = [number for number, call in enumerate(calls) if call is None]
    apart = [(number, call) for number, call in enumerate(calls) if call is not None]
    run = getattr(torch, op._schema.name.removeprefix("aten::"), op)
    every = [together] if together else []
    if not (apart or by_ranks):
        return run

    def call(*operands: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = [None] * len(calls)
        for numbers in _shared_alike(operands, together) if by_ranks else every:
            _set(results, numbers, run(*_picked(operands, numbers), **kwargs))
        for number, each in apart:
            own, named = form.arguments(operands, kwargs, number)
            results[number] = each(*own, **named)
        return results

    return call


def _shared_alike(operands: Sequence[Any], numbers: Sequence[int]) -> Iterable[list[int]]:
    """The items whose local tensors are shared by the same simulated ranks, together."""
    lists = [operand for operand in operands if isinstance(operand, (list, tuple))]
    alike: dict[Any, list[int]] = {}
    for number in numbers:
        rosters = tuple([id(roster_of(each[number])) for each in lists])
        alike.setdefault(rosters, []).append(number)
    return alike.values()


def _divided_entry(op: Any, form: SingleForm, items: Sequence[_ItemPlan]) -> Entry:
    """The entry of a call that is several calls, for its items are not called alike."""
    entry = Entry(CallPlan(op, None, (), (), None, ()))
    num = {how: [i for i, item in enumerate(items) if item.how is how] for how in _HOWS}

    def give_tensors(operands: list[Any], args: Sequence[Any]) -> None:
        operands[:] = args

    def call(*args: Any, **kwargs: Any) -> list[Any]:
        results: list[Any] = [None] * len(items)
        if num[_LOCALLY]:
            _set(results, num[_LOCALLY], op(*_picked(args, num[_LOCALLY]), **kwargs))
        alone = num[_ALONE]
        if any(isinstance(arg, Wrapped) and arg.requires_grad for arg in args):
            alone = alone + num[_WITH_PLAIN]
        elif num[_WITH_PLAIN]:
            own = _picked(args, num[_WITH_PLAIN])
            own = [number_as_plain(arg) if isinstance(arg, Wrapped) else arg for arg in own]
            _set(results, num[_WITH_PLAIN], op(*own, **kwargs))
            if form.writes and not any(isinstance(tensor, Wrapped) for tensor in own[0]):
                count_writes(own[0])
        for number in alone:
            results[number] = form.run(args, kwargs, number)
        return results

    entry.move, entry.call = give_tensors, call
    entry.finish = lambda result, args, wrap: None if form.writes else result
    return entry


def _picked(args: Sequence[Any], numbers: Sequence[int]) -> list[Any]:
    """The arguments with only these items of each list."""
    return [[a[i] for i in numbers] if isinstance(a, (list, tuple)) else a for a in args]


def _set(results: list[Any], numbers: Sequence[int], found: Sequence[Any] | None) -> None:
    for number, result in zip(numbers, found or (), strict=bool(found)):
        results[number] = result
