"""What a plan runs on local operands: the op or a local function, mapped over ranks if needed.

Note [Ops that refuse values]
An index out of range, a probability above one, a division by zero: if ranks hold different values,
one rank may raise alone, and the others would wait for it in the next collective. So the ranks
agree (`comm.agreement.raise_together`). They also agree if all see the same values but some have an
empty shard, for which a kernel does not read them. On CUDA most ops assert on the device, and ranks
agree only on what torch checks on the host (`ON_HOST`), for which it waits for the device anyway.
Compiled code does not read values, so there is nothing to agree on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import (
    BINDINGS,
    OpOverload,
    TorchDispatchMode,
    is_composite,
    outside_modes,
)
from shardwise._torch.functions import tree_leaves, tree_map_only
from shardwise.comm.agreement import raise_together
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout, differing_axes, emptying_axes
from shardwise.core.mesh import Coordinate
from shardwise.core.untraced import is_cast_before, without_autocast
from shardwise.dispatch.catalog import Positional, copies_view, functional_twin, in_order
from shardwise.dispatch.infer import faked
from shardwise.dispatch.propagate import CallPlan, forbid_sent
from shardwise.dispatch.rule import TensorMeta
from shardwise.dispatch.shapes import same_stride
from shardwise.lookup.ids import has_values
from shardwise.redistribute.execute import in_memory_order
from shardwise.simulation.ranks import each_rank, is_per_rank, parts_of, rank_call

aten = torch.ops.aten


def local_call(
    op: Any, plan: CallPlan, binding: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """The function that runs on the local operands; its results have the layouts' memory order."""
    call = _local_call(op, plan, binding)
    if _runs_other_ops(op, plan) and not _runs_itself_cast(op, plan):
        call = without_autocast(call)
    call = raising_together(op, plan.inputs, call)
    # The local function of an op that copies a view may return a view.
    return unaliased(call) if plan.local is not None and copies_view(op) else call


def has_other_strides(result: Any, outputs: Sequence[Layout]) -> bool:
    """Whether a result is not dense, or is in another memory order than its layout.

    Traced results are not checked: the graph keeps their strides.
    """
    found = [result] if isinstance(result, torch.Tensor) else result
    tensors = [x for x in found if isinstance(x, torch.Tensor)] if outputs else []
    if len(tensors) != len(outputs):
        return False  # kernels may return more than the op
    return any(
        type(part) is torch.Tensor
        and part.layout is torch.strided
        and part.numel() > 0
        and not same_stride(part.shape, part.stride(), in_memory_order(part, layout).stride())
        for x, layout in zip(tensors, outputs, strict=True)
        for part in parts_of(x)
    )


def restrided(call: Callable[..., Any], outputs: Sequence[Layout]) -> Callable[..., Any]:
    """`call`, with results in the memory order of their layouts."""

    def restride(layout: Layout, _: Coordinate, part: torch.Tensor) -> torch.Tensor:
        return in_memory_order(part, layout)

    grid = outputs[0].grid
    fixes = [functools.partial(restride, layout) for layout in outputs]

    def run(*operands: Any, **kwargs: Any) -> Any:
        result = call(*operands, **kwargs)
        if isinstance(result, torch.Tensor):
            return each_rank(grid, fixes[0], result, axes=())
        remaining = iter(fixes)
        return type(result)(
            each_rank(grid, next(remaining), part, axes=())
            if isinstance(part, torch.Tensor)
            else part
            for part in result
        )

    return run


def is_memory_of(result: Any, operands: Sequence[Any]) -> bool:
    """Whether a result shares memory with an operand: a kernel may not copy a small shard.

    Traced results are not checked: a graph returns new memory.
    """
    held = {part.untyped_storage()._cdata for part in _plain_parts(operands)}
    return any(part.untyped_storage()._cdata in held for part in _plain_parts(result))


def _plain_parts(values: Any) -> Iterator[torch.Tensor]:
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            for part in parts_of(value):
                if type(part) is torch.Tensor and part.layout is torch.strided:
                    yield part


def unaliased(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, with results in new memory."""
    return lambda *operands, **kwargs: tree_map_only(
        torch.Tensor, torch.clone, call(*operands, **kwargs)
    )


def _local_call(op: Any, plan: CallPlan, binding: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function that runs on the local operands, mapped over the ranks if needed.

    That is needed if the function or an argument differs between ranks, or if torch or a Python
    function reads sizes, which may differ.
    """
    if op is aten.detach.default and plan.local is None:
        return _detached
    fn = plan.local.fn if plan.local is not None else (binding or op)
    if plan.local is not None and plan.local.collective:
        return _collective_call(fn, plan)
    grid = plan.inputs[0].grid
    per_rank = plan.local is not None and plan.local.per_rank
    if plan.local is not None and isinstance(binding, Positional):
        fn = _with_keywords(binding, fn, per_rank)
    if not (per_rank or plan.local_shape or _runs_other_ops(op, plan)):
        return fn
    layouts = (*plan.inputs, *plan.outputs)
    positions = {a.name: i for i, a in enumerate(op._schema.arguments)} if plan.local_shape else {}
    places = [(positions[name], plan.outputs[number]) for name, number in plan.local_shape]

    def here(coordinate: Coordinate) -> Callable[..., Any]:
        if per_rank:
            return functools.partial(fn, coordinate, layouts)
        if not places:
            return fn
        return _with_shapes(fn, [(at, lo.local_shape(coordinate)) for at, lo in places])

    # Along other axes ranks share one tensor, and must share its view: it is written once.
    return rank_call(grid, here, differing_axes(layouts) if per_rank or places else ())


def _detached(x: torch.Tensor) -> torch.Tensor:
    """`x` itself: the two DTensors share one local tensor, and so its version counter."""
    return x if type(x) is torch.Tensor or is_per_rank(x) else aten.detach.default(x)


def _collective_call(fn: Callable[..., Any], plan: CallPlan) -> Callable[..., Any]:
    """A local function for all ranks present; the call is the cause of its collectives."""
    run = fn((*plan.inputs, *plan.outputs))

    def call(*operands: Any, **kwargs: Any) -> Any:
        if not watch.on:
            return run(*operands, **kwargs)
        if watch.strict and plan.sent:
            forbid_sent(plan.op, plan.inputs, plan.sent)
        # A local function without `sent` only checks (are all ids in range?), and moves no data.
        with because(plan.op, implicit=bool(plan.sent)):
            return run(*operands, **kwargs)

    return call


def _with_keywords(op: Positional, fn: Callable[..., Any], per_rank: bool) -> Callable[..., Any]:
    """A local function with the op's signature, to be called with positional arguments."""
    if not per_rank:
        return functools.partial(op.call, fn)

    def call(coordinate: Coordinate, layouts: Sequence[Layout], *args: Any) -> Any:
        return op.call(functools.partial(fn, coordinate, layouts), *args)

    return call


def _with_shapes(fn: Callable[..., Any], shapes: Sequence[tuple[int, Any]]) -> Callable[..., Any]:
    """`fn` with this rank's shapes in place of the global ones."""

    def call(*operands: Any, **kwargs: Any) -> Any:
        here = list(operands)
        for position, shape in shapes:
            here[position] = shape
        return fn(*here, **kwargs)

    return call


def _runs_other_ops(op: Any, plan: CallPlan) -> bool:
    """Whether the local call is not a single op: it may read sizes, and autocast sees its ops."""
    if plan.local is not None or not isinstance(op, OpOverload):
        return True
    return is_composite(op)


def _runs_itself_cast(op: Any, plan: CallPlan) -> bool:
    """Whether the local call is the op itself, and autocast is off in it."""
    itself = plan.local is None and isinstance(op, OpOverload)
    return itself and is_cast_before(op)


# -- torch's Python bindings of ops, which are faster to call
# ---------------------------------------

#: Bindings of composite ops: a mode sees only their decomposition, so they cannot be tried.
_COMPOSITE = {torch.ops.aten.linear.default: torch.nn.functional.linear}


def fastest(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any
) -> Callable[..., Any]:
    """Torch's own binding of an op if there is one, else the op.

    Calling an OpOverload from Python takes about twice as long as its binding. The binding is tried
    on fake tensors under a mode that lets only this op through; `made` is its result, as
    `infer_outputs` gives it.
    """
    if op in _COMPOSITE:
        return _COMPOSITE[op]
    with outside_modes(), torch.no_grad():
        for binding in _bindings(op):
            fake_args, fake_kwargs = faked(args, kwargs)
            try:
                with _Only(op, fake_args, fake_kwargs, made):
                    binding(*fake_args, **fake_kwargs)
            except (_OtherOp, TypeError, RuntimeError, NotImplementedError):
                continue
            return binding
    return op._op  # without the Python method around it


def _bindings(op: OpOverload) -> list[Callable[..., Any]]:
    name = op._schema.name.partition("::")[2]
    return [getattr(home, name) for home in BINDINGS if hasattr(home, name)]


class _OtherOp(Exception):
    """A binding called another op."""


class _Only(TorchDispatchMode):
    """Lets only this call through: some bindings have other defaults than their op."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        super().__init__()
        self.op, self.made = op, made
        self.given = in_order(op, args, kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what wraps it otherwise imports the compiler, for most of a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not self.op or not all(
            map(_same, in_order(func, args, kwargs or {}), self.given)
        ):
            raise _OtherOp
        # Not run if that can be avoided: its shape function may import the compiler.
        schema, made = func._schema, self.made
        if isinstance(made, TensorMeta) and len(schema.returns) == 1:
            first = schema.arguments[0].alias_info
            if schema.returns[0].alias_info is None:
                return torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
            if first is not None and first.is_write:
                return args[0]
        return func(*args, **(kwargs or {}))


def _same(one: Any, other: Any) -> bool:
    """Whether two arguments are the same; tensors always are."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and one == other


#: The inputs whose values an op may refuse, as a slice; `ops.catalog` fills it.
REFUSED: dict[Any, slice] = {}
#: Those of them that torch checks on the host, whatever the device; `ops.catalog` fills it.
ON_HOST: set[Any] = set()

#: Ops that refuse a division of integers by zero.
DIVISIONS = (
    aten.floor_divide.default,
    aten.div.Tensor_mode,
    aten.remainder.Tensor,
    aten.remainder.Scalar_Tensor,
    aten.fmod.Tensor,
)


def raising_together(
    op: Any, inputs: Sequence[Layout], call: Callable[..., Any]
) -> Callable[..., Any]:
    """The local call of `op`, which raises on every rank if it raises on one."""
    if op not in REFUSED and isinstance(op, OpOverload):
        op = functional_twin(op)
    if op not in REFUSED:
        return call
    if op in DIVISIONS and any(x.dtype.is_floating_point or x.dtype.is_complex for x in inputs):
        return call
    grid, refused = inputs[0].grid, inputs[REFUSED[op]]
    axes = tuple(sorted({*differing_axes(refused), *emptying_axes(inputs)}))
    if not axes or not refused:
        return call  # all ranks see the same values
    on_host = op in ON_HOST

    def run(*operands: Any, **kwargs: Any) -> Any:
        tensor = next(x for x in _listed(operands) if isinstance(x, torch.Tensor))
        if not has_values(tensor) or tensor.device.type != grid.device_type:
            return call(*operands, **kwargs)
        if not (tensor.is_cpu or on_host):
            return call(*operands, **kwargs)
        if not _looks_at_values(op, operands, kwargs):
            return call(*operands, **kwargs)
        with because(op, implicit=False):
            return raise_together(grid, axes, lambda: call(*operands, **kwargs))

    return run


def _looks_at_values(op: Any, operands: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call may refuse values: it divides by a tensor, or does not skip its checks."""
    if op in DIVISIONS:
        return isinstance(operands[-1], torch.Tensor)
    arguments = op._schema.arguments if isinstance(op, OpOverload) else ()
    return all(a.name != "check_errors" for a in arguments) or bool(kwargs.get("check_errors"))


def _listed(operands: Sequence[Any]) -> list[Any]:
    return [x for o in operands for x in (o if isinstance(o, (list, tuple)) else (o,))]
