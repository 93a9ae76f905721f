"""make_entry: plans an op call, given the layouts of its tensors; Entry: the plan, in a cache.

Decision: what is the same about a plan in every world.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout, replicated_layout, shares_entries
from shardwise.core.mesh import Grid
from shardwise.core.sizes import unrecorded
from shardwise.core.world import world_caches
from shardwise.dispatch.catalog import (
    Path,
    at_path,
    find_rule,
    plain_op,
    rule_caches,
    tensor_paths,
    written_inputs,
)
from shardwise.dispatch.factors import bounded
from shardwise.dispatch.infer import outputs_of
from shardwise.dispatch.local_call import fastest, local_call
from shardwise.dispatch.propagate import (
    CallPlan,
    Combination,
    forbid_move,
    plan_of,
    propagate,
    unsupported,
)
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.dispatch.shapes import ASKED
from shardwise.dispatch.wrapped import note_write, reduced_once
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.redistribute.execute import prepare
from shardwise.simulation.ranks import my_coordinate, no_values

aten = torch.ops.aten


def make_entry(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], preferred: Layout | None = None
) -> Entry:
    """Plan a call; layouts stand for its tensors, except for plain 0-dim tensors."""
    called, op = op, plain_op(op)
    paths = list(tensor_paths(args))
    given = [at_path(args, path) for path in paths]
    layouts = on_one_mesh(op, given)
    rule = find_rule(op)
    if rule is None:
        raise UnsupportedError(unsupported(op, layouts))
    symbolic = any(layout.symbolic for layout in layouts) or _symbolic_arguments(args)
    # What a user's rule or a kernel says may depend on more than values.
    has_key = not (symbolic or rule.by_value or called in ASKED)
    key = _value_key(called, args, kwargs, layouts, preferred) if has_key else None
    known = _known_decision(key, rule)
    inputs = tuple(map(_meta, layouts))
    if known is None:
        outputs, shape = outputs_of(rule, called, args, kwargs, inputs, symbolic=symbolic)
    else:
        outputs, shape = known.outputs, known.shape
    call = Call(op, tuple(map(_without_mesh, args)), kwargs, inputs, outputs)
    written = written_inputs(op)
    fixed = [i for i, path in enumerate(paths) if path[0] in written]
    for number in fixed:
        check_writable(op, layouts[number])
        _check_own_entries(op, layouts[number])

    def decide() -> tuple[Combination, CallPlan]:
        chosen = (
            propagate(rule, call, layouts, fixed=fixed, preferred=preferred)
            if known is None
            else known.chosen
        )
        return chosen, plan_of(rule, call, layouts, chosen)

    # Comparisons made while planning do not belong in a graph.
    chosen, plan = unrecorded(decide) if symbolic else decide()
    entry = Entry(plan)
    if layouts[0].grid.outside:
        entry.call = _computes_nothing(layouts[0].grid, plan.outputs, shape, bool(written))
        return _finished(entry, op, layouts[0].grid, written, shape)
    if plan.steps is not None:
        entry.move = mover(paths, plan)
    binding = called if called is not op else None
    if known is not None:
        binding = known.binding
    elif binding is None and plan.local is None and isinstance(op, OpOverload) and not symbolic:
        binding = fastest(op, args, kwargs, shape)
    if known is None and key is not None:
        _keep_decision(key, Decision(rule, outputs, shape, chosen, binding))
    if op is torch.ops.aten.view.default and plan.outputs[0].snapshot:
        binding = torch.Tensor.reshape  # a copy may have other strides than the global ones
    call_local = functools.partial(local_call, op, binding=binding)
    entry.call = bounded(call_local, plan, args, kwargs)
    if written and plan.local is not None:
        check_written_once(op, layouts[fixed[0]])
        entry.call = _written_back(entry.call, written[0])
    return _finished(entry, op, layouts[0].grid, written, shape)


# -- decisions -----------------------------------------------------------------------------------
# Decision: what planning finds out from values alone, once in a process. Plans belong to a world,
# and tests open a simulated world each. Nothing here holds a mesh, a layout or a tensor.


@dataclass(frozen=True, slots=True)
class Decision:
    """The outputs of a call, the choices of `rule` and torch's function for the op."""

    rule: Rule
    outputs: tuple[TensorMeta, ...]
    shape: Any
    chosen: Combination
    binding: Callable[..., Any] | None


_decisions: dict[Any, Decision] = {}
_MAX_DECISIONS = 8192


def _known_decision(key: Any, rule: Rule) -> Decision | None:
    known = None if key is None else _decisions.get(key)
    return known if known is not None and known.rule is rule else None


def _keep_decision(key: Any, decision: Decision) -> None:
    if len(_decisions) >= _MAX_DECISIONS:
        _decisions.clear()
    _decisions[key] = decision


#: The types of arguments that are values, beside layouts and lists.
_VALUES = frozenset(
    {int, float, bool, complex, str, type(None)}
    | {torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def _value_key(
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    layouts: Sequence[Layout],
    preferred: Layout | None,
) -> Any:
    """All that a decision depends on, as a value; None where an argument is not a value."""
    grid = layouts[0].grid
    if grid.outside:
        return None
    world_free = (grid.shape, grid.device_type, torch.get_default_dtype())
    try:
        values = [_value(each) for each in (*args, preferred, *kwargs.values())]
    except _NoValueError:
        return None
    return op, world_free, *kwargs, *values


class _NoValueError(Exception):
    """Raised for an argument that is not a value, such as a tensor."""


def _value(arg: Any) -> Any:
    kind = type(arg)
    if kind is Layout:
        return arg.placements, arg.order, arg.shape, arg.stride, arg.dtype, arg.snapshot
    if kind is list or kind is tuple:
        return kind, *map(_value, arg)
    if kind in _VALUES:
        return kind, arg  # True is not 1
    raise _NoValueError


def _without_mesh(arg: Any) -> Any:
    """The argument as a rule sees it: a choice that keeps it keeps no mesh."""
    if isinstance(arg, Layout):
        return _meta(arg)
    if isinstance(arg, (list, tuple)) and any(isinstance(each, Layout) for each in arg):
        return [_without_mesh(each) for each in arg]
    return arg


def _meta(layout: Layout) -> TensorMeta:
    return TensorMeta(layout.shape, layout.stride, layout.dtype)


def _finished(entry: Entry, op: Any, grid: Grid, written: Sequence[int], shape: Any) -> Entry:
    """The entry with what becomes of the local result; `shape` is what the op returns."""
    if written == (0,) and op._schema.returns:
        entry.writes = grid
    elif written:
        entry.finish = _counts_writes(grid, written, bool(op._schema.returns))
    elif isinstance(shape, TensorMeta):
        entry.out = entry.plan.outputs[0]
    else:
        entry.finish = wraps_all(entry.plan.outputs, shape)
    return entry


def _computes_nothing(
    grid: Grid, outputs: Sequence[Layout], shape: Any, writes: bool
) -> Callable[..., Any]:
    """The local call on a rank outside the mesh; see Note [Ranks outside a mesh]."""

    def call(*_: Any, **__: Any) -> Any:
        if writes:
            return None
        if not outputs:
            my_coordinate(grid)  # raises: the op returns a value
        empty = [no_values(grid, layout.dtype) for layout in outputs]
        return empty[0] if isinstance(shape, TensorMeta) else empty

    return call


def check_writable(op: Any, layout: Layout) -> None:
    """Raise if a write to a tensor of this layout would be lost."""
    if layout.snapshot:
        raise UnsupportedError(
            f"{op} would write to a copy, and the write would be lost: the view it was called "
            f"on needed communication, and is {layout!r}. Write to the tensor itself "
            "(torch.where, or the op on the whole tensor), or clone() the view first."
        )


#: torch lets these write to expanded tensors: they give every entry the same number.
_FILLS = frozenset({aten.fill_.Scalar, aten.zero_.default})
#: These write without reading what is there.
_OVERWRITES = _FILLS | {aten.fill_.Tensor, aten.copy_.default}


def _check_own_entries(op: Any, layout: Layout) -> None:
    """Raise, as one device does, where a write to one entry would reach others.

    The op itself would not raise on ranks with one entry or none.
    """
    dims = [d for d in layout.expanded if type(layout.shape[d]) is not int or layout.shape[d] > 1]
    empty = any(type(size) is int and size == 0 for size in layout.shape)
    if dims and not empty and op not in _FILLS:
        raise UnsupportedError(
            f"{op} would write to {layout!r}, where one entry stands for all along dim "
            f"{dims[0]}, as after expand(). Write to the tensor that was expanded, or clone() "
            "this one first."
        )


def check_written_once(op: Any, layout: Layout) -> None:
    """Raise if entries share memory and the result would be copied back.

    One device reads such an entry again after it has written it.
    """
    if layout.symbolic or op in _OVERWRITES:
        return
    own = [d for d, step in enumerate(layout.stride) if step]
    if shares_entries([layout.shape[d] for d in own], [layout.stride[d] for d in own]):
        raise UnsupportedError(
            f"{op} would write to {layout!r}, where several entries share memory, as after "
            "unfold(), and the op cannot run in place. Write to the tensor itself, or clone() "
            "this one first."
        )


def _symbolic_arguments(args: Sequence[Any]) -> bool:
    return any(
        isinstance(a, torch.SymInt)
        or (isinstance(a, (list, tuple)) and any(isinstance(b, torch.SymInt) for b in a))
        for a in args
    )


def _mesh_advice(one: Grid, other: Grid) -> str:
    """What to do about tensors of two meshes."""
    if one.world is not other.world:
        return (
            f"One is of {one.world}, the other of {other.world}. Tensors do not outlive their "
            "world: gather them before it ends, or load them from a checkpoint after."
        )
    whole = ", ".join(["Replicate()"] * one.num_axes)
    return (
        "Bring the second to the mesh of the first: "
        f"DTensor.from_local(x.full_tensor(), mesh, [{whole}])."
    )


def on_one_mesh(op: Any, given: Sequence[Any]) -> list[Layout]:
    """The layouts of all tensors; a plain 0-dim tensor is replicated."""
    layouts = [g for g in given if isinstance(g, Layout)]
    grid = layouts[0].grid
    for other in layouts[1:]:
        if other.grid is not grid:
            raise LayoutError(
                f"{op} was called with tensors on two meshes: {layouts[0]!r} and {other!r}. "
                + _mesh_advice(grid, other.grid)
            )
    return [g if isinstance(g, Layout) else replicated_layout(grid, g) for g in given]


def mover(paths: Sequence[Path], plan: CallPlan) -> Callable[[list[Any], Sequence[Any]], None]:
    assert plan.steps is not None, "a plan without steps moves nothing"
    moving = [
        (path, steps, plan.inputs[i], prepare(steps), all(s.kind == "all_reduce" for s in steps))
        for i, (path, steps) in enumerate(zip(paths, plan.steps, strict=True))
        if steps
    ]

    def move(operands: list[Any], args: Sequence[Any]) -> None:
        for path, _, target, run, reduces in moving:
            place = operands if len(path) == 1 else operands[path[0]]
            local = place[path[-1]]
            if reduces:
                place[path[-1]] = reduced_once(at_path(args, path), local, run, target)
            else:
                place[path[-1]] = run(local)

    def watched(operands: list[Any], args: Sequence[Any]) -> None:
        if not watch.on:
            return move(operands, args)
        if watch.strict:
            for path, steps, target, *_ in moving:
                forbid_move(plan.op, path[0], steps, target)
        with because(plan.op, implicit=True):
            return move(operands, args)

    return watched


def _written_back(call: Callable[..., Any], position: int) -> Callable[..., Any]:
    """Copy the result of a local function to the tensor that an in-place op writes to.

    After all ranks have run, since simulated ranks may share what they read and write.
    """

    def write(*operands: Any, **kwargs: Any) -> Any:
        target = operands[position]
        result = call(*operands, **kwargs)
        return target if result is target else target.copy_(result)

    return write


def _counts_writes(grid: Grid, written: Sequence[int], returns: bool) -> Callable[..., Any]:
    """A `finish` that counts the writes and, if the op `returns`, returns the first of them."""

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        for position in written:
            note_write(grid, args[position])
        return args[written[0]] if returns else None

    return finish


def wraps_all(outputs: Sequence[Layout], shape: Any = None) -> Callable[..., Any]:
    """A `finish` that wraps a list of results; `shape` has a TensorMeta for each output."""
    # Kernels may return more than the op: what is not an output becomes None.
    asked = None if shape is None else [isinstance(item, TensorMeta) for item in shape]
    all_asked = bool(outputs) and (asked is None or all(asked))

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        # Nearly always. Row-sparse gradients are not tensors, and stay as they are.
        known = all_asked and len(result) == len(outputs)
        if known and all(isinstance(each, torch.Tensor) for each in result):
            every = map(wrap, result, outputs)
            return list(every) if isinstance(result, list) else tuple(every)
        if not outputs:
            return result
        remaining = iter(outputs)
        wrapped = [
            r
            if not isinstance(r, torch.Tensor)
            else wrap(r, next(remaining))
            if asked is None or asked[i]
            else None
            for i, r in enumerate(result)
        ]
        return wrapped if isinstance(result, list) else tuple(wrapped)

    return finish


# -- plan cache ----------------------------------------------------------------------------------
# Entry: a planned call; and the cache of entries.


class Entry:
    """A planned call. It has one of `out`, `writes` and `finish`, which say what it returns."""

    __slots__ = ("call", "finish", "hits", "move", "out", "plan", "writes")

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.hits = 0
        #: Redistributes the local operands as planned; None when nothing moves.
        self.move: Callable[[list[Any], Sequence[Any]], None] | None = None
        #: Runs on local operands.
        self.call: Callable[..., Any] = plan.op
        #: The layout of a single output.
        self.out: Layout | None = None
        #: The mesh of a call that writes to its first argument, and returns that.
        self.writes: Grid | None = None
        #: From the local result and the call's arguments to the result of the call.
        self.finish: Callable[[Any, Sequence[Any], Callable[..., Any]], Any] | None = None


#: (op, layouts and static arguments) -> Entry. Emptied when full, and when a world comes or goes.
entries: dict[Any, Entry] = {}
_MAX_ENTRIES = 8192
#: Keys of in-place calls whose result has another layout: they make a new tensor, and copy it back.
_write_backs: set[Any] = set()
#: Hits of dropped entries, and all misses; see cache_counts.
_past_hits, _misses = 0, 0


def _forget_entries() -> None:
    global _past_hits
    _past_hits += sum(entry.hits for entry in entries.values())
    entries.clear()
    _write_backs.clear()


world_caches.append(_forget_entries)
rule_caches.append(_forget_entries)


def cache_counts() -> tuple[int, int, int, int]:
    """Hits and misses of this process so far, entries now, and how many there may be."""
    hits = _past_hits + sum(entry.hits for entry in entries.values())
    return hits, _misses, len(entries), _MAX_ENTRIES


def add_entry(key: list[Any], entry: Entry) -> None:
    """Count a miss, and keep its entry unless it has symbolic sizes."""
    global _misses
    _misses += 1
    plan = entry.plan
    if any(layout.symbolic for layout in (*plan.inputs, *plan.outputs)):
        return
    if len(entries) >= _MAX_ENTRIES:
        _forget_entries()
    with contextlib.suppress(TypeError):  # a symbolic int has no hash
        entries[tuple(key)] = entry


def known_entry(key: list[Any]) -> Entry | None:
    """What `add_entry` kept under this key."""
    try:
        return entries.get(tuple(key))
    except TypeError:
        return None


def add_write_back(key: list[Any]) -> None:
    """Record that the in-place call of this key makes a new tensor and copies it back."""
    if len(_write_backs) < _MAX_ENTRIES:
        with contextlib.suppress(TypeError):
            _write_backs.add(tuple(key))


def is_write_back(key: list[Any]) -> bool:
    """Whether `add_write_back` was called for this key."""
    try:
        return tuple(key) in _write_backs
    except TypeError:
        return False
