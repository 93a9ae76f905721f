"""What happens on a cache miss: an op call becomes an Entry, ready to run.

Tensors are given by their layouts here; the class that holds them is not known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from shardwise.comm.ranks import each_rank, my_coordinate
from shardwise.comm.watch import because, watch
from shardwise.core.grid import Coordinate
from shardwise.core.layout import Layout, make_layout
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.reduced import reduced_once
from shardwise.dtensor.strict import forbid_move, forbid_sent
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.redistribute.execute import in_memory_order, prepare
from shardwise.redistribute.steps import Step
from shardwise.rules.catalog import find_rule, written_inputs
from shardwise.rules.infer import hollowed, outputs_of
from shardwise.rules.positional import Positional, in_order, plain_op
from shardwise.rules.propagate import CallPlan, propagate, unsupported
from shardwise.rules.rule import Call, TensorMeta

aten = torch.ops.aten

#: Where a tensor stands in the arguments: a position, or a position and one inside a list.
Path = tuple[int, ...]


class Entry:
    """A planned call. `out` is the layout of a single output; otherwise `finish` wraps."""

    __slots__ = ("call", "finish", "hits", "move", "out", "plan")

    def __init__(self, plan: CallPlan) -> None:
        self.plan = plan
        self.hits = 0
        #: Brings the local operands where the plan wants them; None when nothing moves.
        self.move: Callable[[list[Any], Sequence[Any]], None] | None = None
        #: Runs on local operands.
        self.call: Callable[..., Any] = plan.op
        self.out: Layout | None = None
        #: From the local result and the call's own arguments to what the caller gets.
        self.finish: Callable[[Any, Sequence[Any], Callable[..., Any]], Any] | None = None


def make_entry(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], wish: Layout | None = None
) -> Entry:
    """Plan a call whose tensors are given by their layouts (or are plain 0-dim tensors)."""
    spelled, op = op, plain_op(op)
    paths = list(tensor_paths(args))
    given = [at_path(args, path) for path in paths]
    layouts = on_one_mesh(op, given)
    rule = find_rule(op)
    if rule is None:
        raise UnsupportedError(unsupported(op, layouts))
    symbolic = any(layout.symbolic for layout in layouts) or _symbolic_arguments(args)
    inputs = tuple(TensorMeta(lo.shape, lo.stride, lo.dtype) for lo in layouts)
    outputs, shape = outputs_of(rule, spelled, args, kwargs, inputs, symbolic=symbolic)
    call = Call(op, tuple(args), kwargs, inputs, outputs)
    written = written_inputs(op)
    fixed = [i for i, path in enumerate(paths) if path[0] in written]
    for number in fixed:
        if layouts[number].snapshot:
            raise UnsupportedError(
                f"{op} would write to a copy, and the write would be lost: the view it was called "
                f"on needed communication, and is {layouts[number]!r}. Write to the tensor itself "
                "(torch.where, or the op on the whole tensor), or clone() the view first."
            )
    plan = propagate(rule, call, layouts, fixed=fixed, wish=wish)
    entry = Entry(plan)
    if plan.steps is not None:
        entry.move = mover(paths, plan)
    binding = spelled if spelled is not op else None
    if (
        binding is None
        and plan.local is None
        and isinstance(op, torch._ops.OpOverload)
        and not symbolic
    ):
        binding = fastest(op, args, kwargs)
    entry.call = local_call(op, plan, binding)
    if written and plan.local is not None:
        entry.call = _written_back(entry.call, written[0])
    if written:
        entry.finish = _returns_argument(written[0]) if op._schema.returns else _returns_nothing
    elif isinstance(shape, TensorMeta):
        entry.out = plan.outputs[0]
    else:
        entry.finish = wraps_all(plan.outputs, shape)
    return entry


def tensor_paths(args: Sequence[Any]) -> Iterator[Path]:
    for i, arg in enumerate(args):
        if isinstance(arg, (Layout, torch.Tensor)):
            yield (i,)
        elif isinstance(arg, (list, tuple)):
            yield from ((i, j) for j, a in enumerate(arg) if isinstance(a, (Layout, torch.Tensor)))


def at_path(args: Sequence[Any], path: Path) -> Any:
    return args[path[0]] if len(path) == 1 else args[path[0]][path[1]]


def _symbolic_arguments(args: Sequence[Any]) -> bool:
    return any(
        isinstance(a, torch.SymInt)
        or (isinstance(a, (list, tuple)) and any(isinstance(b, torch.SymInt) for b in a))
        for a in args
    )


def on_one_mesh(op: Any, given: Sequence[Any]) -> list[Layout]:
    """The layouts of all tensors; a plain 0-dim tensor counts as replicated."""
    layouts = [g for g in given if isinstance(g, Layout)]
    grid = layouts[0].grid
    for other in layouts[1:]:
        if other.grid is not grid:
            raise LayoutError(
                f"{op} was called with tensors on two meshes: {layouts[0]!r} and {other!r}. "
                "Redistribute one of them to the mesh of the other."
            )
    whole = (REPLICATE,) * grid.num_axes
    return [
        g if isinstance(g, Layout) else make_layout(grid, whole, g.shape, g.stride(), g.dtype)
        for g in given
    ]


def mover(paths: Sequence[Path], plan: CallPlan) -> Callable[[list[Any], Sequence[Any]], None]:
    assert plan.steps is not None, "a plan without steps moves nothing"
    moving = [
        (path, steps, plan.inputs[i], prepare(steps), _reduces(steps))
        for i, (path, steps) in enumerate(zip(paths, plan.steps, strict=True))
        if steps
    ]

    def move(operands: list[Any], args: Sequence[Any]) -> None:
        for path, _, target, travel, reduces in moving:
            place = operands if len(path) == 1 else operands[path[0]]
            local = place[path[-1]]
            if reduces:
                place[path[-1]] = reduced_once(at_path(args, path), local, travel, target)
            else:
                place[path[-1]] = travel(local)

    def watched(operands: list[Any], args: Sequence[Any]) -> None:
        if not watch.on:
            return move(operands, args)
        if watch.strict:
            _forbid(plan, moving)
        with because(plan.op, implicit=True):
            return move(operands, args)

    return watched


def _reduces(steps: Sequence[Step]) -> bool:
    return all(step.kind == "all_reduce" for step in steps)


def _forbid(
    plan: CallPlan, moving: Sequence[tuple[Path, Sequence[Step], Layout, Any, Any]]
) -> None:
    for path, steps, target, _, _ in moving:
        forbid_move(plan.op, path[0], steps, target)


#: Ops whose kernels lay their results out otherwise than torch says without running them.
_LAID_OTHERWISE = frozenset(
    {aten.linalg_eig.default, aten._linalg_svd.default, aten.nonzero_static.default}
)


def local_call(
    op: Any, plan: CallPlan, binding: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """What runs on the local operands; its results lie in memory as the layouts say."""
    call = _local_call(op, plan, binding)
    return _relaid(call, plan.outputs) if op in _LAID_OTHERWISE else call


def _relaid(call: Callable[..., Any], outputs: Sequence[Layout]) -> Callable[..., Any]:
    def relay(layout: Layout, _: Coordinate, part: torch.Tensor) -> torch.Tensor:
        return in_memory_order(part, layout)

    def run(*operands: Any, **kwargs: Any) -> Any:
        result = call(*operands, **kwargs)
        parts = [result] if isinstance(result, torch.Tensor) else result
        relaid = [
            each_rank(layout.grid, functools.partial(relay, layout), part, axes=())
            for part, layout in zip(parts, outputs, strict=True)
        ]
        return relaid[0] if isinstance(result, torch.Tensor) else tuple(relaid)

    return run


def _local_call(op: Any, plan: CallPlan, binding: Callable[..., Any] | None) -> Callable[..., Any]:
    """What runs on the local operands, mapped over the ranks where they need to be apart.

    That is where the function or an argument differs between ranks, and, in a simulated world,
    where torch or a Python function would read the sizes of a LocalTensor.
    """
    fn = plan.local.fn if plan.local is not None else (binding or op)
    if plan.local is not None and plan.local.together:
        return _together(fn, plan)
    grid = plan.inputs[0].grid
    per_rank = plan.local is not None and plan.local.per_rank
    if plan.local is not None and isinstance(binding, Positional):
        fn = _spelled(binding, fn, per_rank)
    if not (per_rank or plan.local_shape or (grid.world.simulated and _reads_sizes(op, plan))):
        return fn
    layouts = (*plan.inputs, *plan.outputs)
    positions = {a.name: i for i, a in enumerate(op._schema.arguments)} if plan.local_shape else {}
    places = [(positions[name], plan.outputs[number]) for name, number in plan.local_shape]
    if not grid.world.simulated:
        coordinate = my_coordinate(grid)
        if per_rank:
            return functools.partial(fn, coordinate, layouts)
        return _with_shapes(fn, [(at, lo.local_shape(coordinate)) for at, lo in places])

    def mapped(*operands: Any, **kwargs: Any) -> Any:
        tensors, rest = _partition(operands)

        def here(coordinate: Coordinate, *parts: torch.Tensor) -> Any:
            merged = _merge(parts, rest)
            if per_rank:
                return fn(coordinate, layouts, *merged, **kwargs)
            for position, layout in places:
                merged[position] = layout.local_shape(coordinate)
            return fn(*merged, **kwargs)

        return each_rank(grid, here, *tensors, axes=None if per_rank or places else ())

    return mapped


def _together(fn: Callable[..., Any], plan: CallPlan) -> Callable[..., Any]:
    """A local function for all ranks present, whose collectives are caused by the call."""
    layouts = (*plan.inputs, *plan.outputs)

    def call(*operands: Any, **kwargs: Any) -> Any:
        if not watch.on:
            return fn(layouts, *operands, **kwargs)
        if watch.strict and plan.sent:
            forbid_sent(plan.op, plan.inputs, plan.sent)
        # A local function that only compares notes (are all ids in range?) moves nothing.
        with because(plan.op, implicit=bool(plan.sent)):
            return fn(layouts, *operands, **kwargs)

    return call


def _spelled(op: Positional, fn: Callable[..., Any], per_rank: bool) -> Callable[..., Any]:
    """A local function that takes what the op takes, called with all of it by position."""
    if not per_rank:
        return functools.partial(op.spell, fn)

    def call(coordinate: Coordinate, layouts: Sequence[Layout], *args: Any) -> Any:
        return op.spell(functools.partial(fn, coordinate, layouts), *args)

    return call


def _written_back(call: Callable[..., Any], position: int) -> Callable[..., Any]:
    """A local function returns a new tensor: for an op in place, its values go where they belong.

    After all ranks have run, since played ranks may share what they read and write.
    """

    def write(*operands: Any, **kwargs: Any) -> Any:
        target = operands[position]
        result = call(*operands, **kwargs)
        return target if result is target else target.copy_(result)

    return write


def _with_shapes(fn: Callable[..., Any], shapes: Sequence[tuple[int, Any]]) -> Callable[..., Any]:
    """`fn` with this rank's shapes in place of the global ones."""

    def call(*operands: Any, **kwargs: Any) -> Any:
        here = list(operands)
        for position, shape in shapes:
            here[position] = shape
        return fn(*here, **kwargs)

    return call


def _reads_sizes(op: Any, plan: CallPlan) -> bool:
    """Whether the local call asks a tensor for its sizes before the dispatcher sees an op."""
    if plan.local is not None or not isinstance(op, torch._ops.OpOverload):
        return True
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), composite.name)


_HOLE = object()


def _partition(operands: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
    """The tensors, those in lists too, and what is left with holes in their places."""
    tensors: list[torch.Tensor] = []
    rest: list[Any] = []
    for operand in operands:
        if isinstance(operand, torch.Tensor):
            tensors.append(operand)
            rest.append(_HOLE)
        elif isinstance(operand, (list, tuple)):
            inner, kept = _partition(operand)
            tensors += inner
            rest.append(kept if inner else operand)
        else:
            rest.append(operand)
    return tensors, rest


def _merge(tensors: Sequence[torch.Tensor], rest: Sequence[Any]) -> list[Any]:
    return _filled(iter(tensors), rest)


def _filled(remaining: Iterator[torch.Tensor], rest: Sequence[Any]) -> list[Any]:
    return [
        next(remaining) if r is _HOLE else _filled(remaining, r) if isinstance(r, list) else r
        for r in rest
    ]


def _returns_argument(position: int) -> Callable[..., Any]:
    return lambda result, args, wrap: args[position]


def _returns_nothing(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> None:
    return None


def wraps_all(outputs: Sequence[Layout], shape: Any = None) -> Callable[..., Any]:
    """`shape` is the result with a TensorMeta for each output, and something else where none is."""
    # Kernels may return what nobody asked for: a place without an output stays without one.
    asked = None if shape is None else [isinstance(item, TensorMeta) for item in shape]

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
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


class _OtherOp(Exception):
    """A Python function led to another op than the one it was tried for."""


class _Only(TorchDispatchMode):
    """Lets exactly one call through: some bindings have other defaults than their op."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self.op = op
        self.given = in_order(op, args, kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what wraps it otherwise imports the compiler, for most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self.op or not all(
            map(_same, in_order(func, args, kwargs or {}), self.given)
        ):
            raise _OtherOp
        return func(*args, **(kwargs or {}))


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; any tensor is as good as any other."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


#: Bindings of composite ops: a mode sees only what these consist of, so they cannot be tried.
_COMPOSITE = {torch.ops.aten.linear.default: torch._C._nn.linear}


def fastest(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Torch's own binding of an op where there is one, else the op.

    An OpOverload called from Python takes about twice as long as the binding. The binding is tried
    without data under a mode that lets nothing but the very op through.
    """
    if op in _COMPOSITE:
        return _COMPOSITE[op]
    with _disable_current_modes(), torch.no_grad():
        for binding in _bindings(op):
            hollow_args, hollow_kwargs = hollowed(args, kwargs)
            try:
                with _Only(op, hollow_args, hollow_kwargs):
                    binding(*hollow_args, **hollow_kwargs)
            except (_OtherOp, TypeError, RuntimeError, NotImplementedError):
                continue
            return binding
    return op._op  # without the Python method around it


def _bindings(op: torch._ops.OpOverload) -> list[Callable[..., Any]]:
    name = op._schema.name.partition("::")[2]
    homes = (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase)
    return [getattr(home, name) for home in homes if hasattr(home, name)]
