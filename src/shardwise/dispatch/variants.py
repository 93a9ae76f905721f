"""Variants of ops: in place, with out=, and foreach.

A write must not change the layout. An op that is linear in a Partial tensor is applied to the
terms. Any other op is applied to the reduced value, which is then stored as the only nonzero term.
Either way the reduction stays cached: clipping gradients and then stepping reduces them once.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.autograd import count_versions
from shardwise._torch.dispatch import OpOverload
from shardwise._torch.functions import tree_leaves
from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.dispatch.catalog import (
    in_order,
    positional,
    tensor_paths,
    with_arguments,
    written_inputs,
)
from shardwise.dispatch.infer import check_target_dtypes, faked
from shardwise.dispatch.plan import (
    Entry,
    check_written_once,
    make_entry,
    mover,
)
from shardwise.dispatch.wrapped import (
    SOURCE,
    Wrapped,
    as_layouts,
    count_on_lent,
    is_partial,
    note_write,
    recall,
    remember,
)
from shardwise.errors import LayoutError, UnsupportedError
from shardwise.redistribute.execute import prepare
from shardwise.redistribute.steps import find_steps
from shardwise.simulation.ranks import parts_of

aten = torch.ops.aten


def entry_of_call(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], preferred: Layout | None = None
) -> Entry:
    """`make_entry`, with writes to Partial tensors."""
    written = written_inputs(op)
    target = args[written[0]] if len(written) == 1 and written[0] < len(args) else None
    if not isinstance(target, Layout) or not is_partial(target):
        return make_entry(op, args, kwargs, preferred)
    try:
        entry = make_entry(op, args, kwargs, preferred)
    except UnsupportedError:
        if target.snapshot:  # a write to a copy is lost, however it is done
            raise
        return _through_reduction(op, args, kwargs, written[0])
    # A draw into the terms cannot be repeated for the cached reduction, which is dropped.
    draws = isinstance(op, OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
    if not kwargs and not draws:
        entry.writes, entry.finish = None, _reduction_follows(op, written[0])
    return entry


def _reduction_follows(op: Any, position: int) -> Callable[..., Any]:
    """A `finish` that applies the op to the cached reduction as well."""

    def finish(result: Any, args: Sequence[Any], wrap: Callable[..., Any]) -> Any:
        tensor = args[position]
        known = recall(tensor)
        note_write(tensor._layout.grid, tensor)
        if known is not None:
            reduced = wrap(known[0].clone(), known[1])
            op(*args[:position], reduced, *args[position + 1 :])
            remember(tensor, reduced._local, known[1], writing=True)
        return tensor

    return finish


def _through_reduction(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], position: int
) -> Entry:
    terms: Layout = args[position]
    check_written_once(op, terms)
    whole = terms.reduced()
    inner = make_entry(op, [*args[:position], whole, *args[position + 1 :]], kwargs)
    paths = list(tensor_paths(args))
    number = paths.index((position,))
    steps = list(inner.plan.steps or ((),) * len(paths))
    steps[number] = find_steps(terms, whole)
    plan = replace(inner.plan, steps=tuple(steps), outputs=(terms,))
    move, back = mover(paths, plan), prepare(find_steps(whole, terms))
    entry = Entry(plan)

    def reduce_and_copy(operands: list[Any], tensors: Sequence[Any]) -> None:
        move(operands, tensors)
        operands[position] = operands[position].clone()

    def finish(result: torch.Tensor, tensors: Sequence[Any], wrap: Any) -> Any:
        tensor = tensors[position]
        note_write(tensor._layout.grid, tensor)
        _distinct(tensor._local, terms).copy_(_distinct(back(result), terms))
        remember(tensor, result, whole, writing=True)
        return tensor

    entry.move, entry.call, entry.finish = reduce_and_copy, inner.call, finish
    return entry


def _distinct(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`local` without the repetitions of expanded dims: each entry is written once."""
    for dim in layout.expanded:
        local = aten.slice.Tensor(local, dim, 0, 1)
    return local


# -- overlapping memory ----------------------------------------------------------------------
#
# One device refuses to write to memory that the op reads in another order. Torch's kernels compare
# memory, which fails for an operand that was redistributed: it is a copy. So a call that writes and
# redistributes compares the tensors themselves.


def watch_overlaps(op: Any, entry: Entry) -> None:
    """Have a planned call that writes refuse the overlaps that one device refuses, and no others.

    One device does not look at tensors that leave gaps in memory. Their shards may have none.
    """
    if not compares_memory(op):
        return
    if entry.move is not None:
        entry.move = _checked_first(op, entry.move)
    if not all(map(is_dense, entry.plan.inputs)):
        entry.move = _apart(entry.move)


def compares_memory(op: Any) -> bool:
    """Whether one device refuses operands of this op that overlap the tensor it writes to."""
    if not isinstance(op, OpOverload) or list(written_inputs(op)) != [0]:
        return False
    return op is aten.copy_.default or torch.Tag.pointwise in op.tags


def check_overlaps(op: Any, args: Sequence[Any]) -> None:
    """Raise if an operand is part of the first one's memory, or all of it in another order.

    Two views of different parts of one tensor are not compared: their offsets are not known.
    """
    target = args[0]
    if not isinstance(target, Wrapped):  # many at once, under vmap
        return
    for other in args[1:]:
        if isinstance(other, Wrapped) and other is not target and _overlap(target, other):
            raise UnsupportedError(
                f"{op} would write to memory that it reads in another order: both operands are "
                f"views of one tensor, {target._layout!r} and {other._layout!r}. Clone one first."
            )


def _checked_first(
    op: Any, move: Callable[[list[Any], Sequence[Any]], None]
) -> Callable[[list[Any], Sequence[Any]], None]:
    def moved(operands: list[Any], args: Sequence[Any]) -> None:
        check_overlaps(op, args)
        move(operands, args)

    return moved


def _apart(
    move: Callable[[list[Any], Sequence[Any]], None] | None,
) -> Callable[[list[Any], Sequence[Any]], None]:
    """Gives operands memory of their own where they have gaps, or the tensor written to has."""

    def moved(operands: list[Any], args: Sequence[Any]) -> None:
        if move is not None:
            move(operands, args)
        if not isinstance(args[0], Wrapped):  # many at once, under vmap
            return
        target, all_of_them = operands[0], not is_dense(args[0]._layout)
        for number, (arg, other) in enumerate(zip(args, operands, strict=True)):
            if other is target or not isinstance(arg, Wrapped):
                continue
            with_gaps = all_of_them or not is_dense(arg._layout)
            if with_gaps and any(map(_share_memory, parts_of(target), parts_of(other))):
                operands[number] = other.clone()

    return moved


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor or type(other) is not torch.Tensor or not one.numel():
        return False
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _overlap(one: Any, other: Any) -> bool:
    if one._layout.symbolic or other._layout.symbolic:
        return False
    if not (is_dense(one._layout) and is_dense(other._layout)):
        return False
    if not (one.numel() and other.numel()):
        return False
    if one.numel() == other.numel() and one.stride() == other.stride():
        return False
    whole = one if one._base is None else one._base
    if whole is not (other if other._base is None else other._base):
        # To torch, what detach() returns is not a view, but its shards are, or were before a copy.
        starts = any(map(start_alike, parts_of(one._local), parts_of(other._local)))
        return starts or _is_copy_from(one, other) or _is_copy_from(other, one)
    if not is_dense(whole._layout):
        return False
    return whole.numel() in (one.numel(), other.numel())


def _is_copy_from(one: Any, other: Any) -> bool:
    """Whether `one` is a snapshot of a part of `other`."""
    known = one.__dict__.get(SOURCE)
    return known is not None and known[0].is_part_of(other)


def start_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return _share_memory(one, other) and one.storage_offset() == other.storage_offset()


def is_dense(layout: Layout) -> bool:
    """Whether the entries fill their memory, in any order of dims; not known of symbolic sizes."""
    if layout.symbolic:
        return False
    expected = 1
    places = zip(layout.stride, layout.shape, strict=True)
    for stride, size in sorted((stride, size) for stride, size in places if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


# -- out args ------------------------------------------------------------------------------------
# DTensors as keyword arguments: out= targets, and inputs.
#
# Note [Results to write to]
# `op(..., out=y)` is the op that returns a new tensor, and a copy into `y`, which keeps its layout.
# What torch refuses (a wrong dtype or number of results), the op refuses on fake tensors. If a
# target has another dtype than the result, the kernel is asked as well, since many refuse what
# their shape functions accept (Note [Kernels are asked]).


Writer = Callable[[Any, Sequence[Any], Any], Any]


def _uniform(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.uniform_(generator=generator)


def _normal(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.normal_(*args[:-1], generator=generator)


def _integers(out: Any, args: Sequence[Any], generator: Any) -> Any:
    low, high = (0, args[0]) if len(args) == 2 else args[:2]
    return out.random_(low, high, generator=generator)


def _identity(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.fill_(1).tril_().triu_()


#: Factories with out=, such as `torch.rand(3, 2, out=y)`: each is an in-place op on `y`.
_WRITERS: dict[Any, Writer] = {
    aten.rand.out: _uniform,
    aten.rand.generator_out: _uniform,
    aten.randn.out: _normal,
    aten.randn.generator_out: _normal,
    aten.normal.float_float_out: _normal,
    aten.randint.out: _integers,
    aten.randint.generator_out: _integers,
    aten.randint.low_out: _integers,
    aten.randint.low_generator_out: _integers,
    aten.eye.out: _identity,
    aten.eye.m_out: _identity,
    aten.zeros.out: lambda out, args, _: out.zero_(),
    aten.ones.out: lambda out, args, _: out.fill_(1),
    aten.full.out: lambda out, args, _: out.fill_(args[1]),
}


class TensorByKeyword(Exception):
    """Raised while a key is built: the call has a DTensor among its keywords."""


def run_by_keyword(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[..., Any]
) -> Any:
    """Run a call with DTensors in `kwargs`; `run` runs an op whose tensors are positional."""
    names = written_keywords(op)
    if not names:
        return run(positional(op), None, tuple(in_order(op, args, kwargs)))
    functional = without_out(op)
    write = _WRITERS.get(op)
    if functional is None and write is None:
        raise UnsupportedError(
            f"{op} does not have a sharding strategy registered: no op does the same and returns a "
            "new tensor. Call it without out=... where torch has such a form."
        )
    targets = [(name, t) for name in names for t in _listed(kwargs[name])]
    fake = _call_fake(op, args, kwargs)
    rest = {name: value for name, value in kwargs.items() if name not in names}
    if functional is None:
        assert write is not None, "refused above"
        _check_shapes(op, args, targets, [fake[name] for name in names])
        return write(targets[0][1], args, rest.get("generator"))
    if torch.Tag.pointwise in functional.tags:
        for _, target in targets:
            check_overlaps(op, (target, *args))
    result = functional(*args, **rest)
    results = _listed(result)
    _check_shapes(op, args, targets, results)
    if any(t.dtype is not r.dtype for (_, t), r in zip(targets, results, strict=True)):
        check_target_dtypes(op, args, kwargs, names, [r.dtype for r in results])
    for (_, target), value in zip(targets, results, strict=True):
        torch.ops.aten.copy_.default(target, value)
    if not op._schema.returns:
        return None
    return targets[0][1] if isinstance(result, torch.Tensor) else tuple(t for _, t in targets)


@functools.lru_cache(maxsize=1024)
def written_keywords(op: Any) -> tuple[str, ...]:
    """The names of the keywords that the op writes its results to."""
    return tuple(
        a.name
        for a in op._schema.arguments
        if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write
    )


@functools.lru_cache(maxsize=1024)
def without_out(op: OpOverload) -> OpOverload | None:
    """The op with the same arguments that returns new tensors.

    >>> without_out(torch.ops.aten.add.out)
    <OpOverload(op='aten.add', overload='Tensor')>
    """
    names = written_keywords(op)
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in names]
    return with_arguments(op.overloadpacket, wanted)


def _call_fake(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Raise what torch raises on fake tensors; the keywords, with targets of the needed shapes."""
    fake_args, fake_kwargs = faked(args, kwargs)
    if torch.Tag.dynamic_output_shape in op.tags:
        return fake_kwargs  # data-dependent
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a resized target, which is refused
        # Some ops have a shape function only where they return new tensors.
        with contextlib.suppress(NotImplementedError):
            op(*fake_args, **fake_kwargs)
    return fake_kwargs


def _check_shapes(
    op: Any,
    args: Sequence[Any],
    targets: Sequence[tuple[str, Any]],
    results: Sequence[torch.Tensor],
) -> None:
    """Refuse a target of another shape than the result: it cannot be resized."""
    for (name, given), needed in zip(targets, results, strict=True):
        if given.shape != needed.shape:
            if any(given is leaf for leaf in tree_leaves(list(args))):
                raise RuntimeError(
                    f"{op} reads the tensor that was given as {name}=, and cannot give it "
                    f"the shape {tuple(needed.shape)}. Use the result of the call."
                )
            raise LayoutError(
                f"{op} was given {name}= of shape {tuple(given.shape)} for a result of shape "
                f"{tuple(needed.shape)}: {as_layouts(given)!r} cannot be resized. Make one of "
                "that shape, or use the result of the call."
            )


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else (value,)


# -- foreach ops ---------------------------------------------------------------------------------


#: Optimizer steps on whole lists of parameters, gradients and states; see dtensor.fallback.
FUSED_STEPS = frozenset(
    getattr(packet, overload)
    for packet in (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)
    for overload in packet.overloads()
)
#: The op of a GradScaler: what is found in one rank's shards counts for all ranks.
UNSCALE = aten._amp_foreach_non_finite_check_and_unscale_.default


def is_foreach(op: Any) -> bool:
    """Whether the op applies a single-tensor op to each of a list."""
    return isinstance(op, OpOverload) and op._schema.name.startswith("aten::_foreach_")


def takes_lists(op: Any) -> bool:
    """Whether the op takes lists whose tensors meet only those at the same index."""
    return is_foreach(op) or op in FUSED_STEPS or op is UNSCALE


def count_writes(tensors: Sequence[torch.Tensor]) -> None:
    """Count a write to each: torch does so only for the plain tensors that a foreach op reaches."""
    for tensor in tensors:
        if isinstance(tensor, Wrapped):
            note_write(tensor._layout.grid, tensor)
    if not torch.is_inference_mode_enabled():
        count_versions(tensors)


def count_writes_by_grid(num: Mapping[Grid, int], tensors: Sequence[torch.Tensor]) -> None:
    """`count_writes` of tensors of which there are so many on each mesh."""
    lends = False
    for grid, writes in num.items():
        grid.num_writes += writes
        lends |= grid.lends
    if lends:
        for tensor in tensors:
            count_on_lent(tensor)
    if not torch.is_inference_mode_enabled():
        count_versions(tensors)
