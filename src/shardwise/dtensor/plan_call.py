"""A cache miss of the plan cache: the call is planned, the plan is kept, and the call is run.

`add_argument` builds the key; `Miss` plans and runs. A call that no rule covers is decomposed,
copied back from a new tensor, or gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.dispatch import OpOverload, is_composite, undispatched
from shardwise.comm.watch import watch
from shardwise.core.layout import Layout
from shardwise.core.sizes import recorded, settle_ones
from shardwise.dispatch.catalog import (
    Positional,
    changes_shape,
    find_rule,
    functional_twin,
    is_view,
    plain_op,
    written_inputs,
    written_twin,
)
from shardwise.dispatch.infer import (
    UNSAFE_VIEWS,
    ResizedError,
    as_on_one_device,
    check_whole_numbers,
    faked,
    infer_outputs,
)
from shardwise.dispatch.local_call import has_other_strides, is_memory_of, restrided, unaliased
from shardwise.dispatch.plan import (
    Entry,
    add_entry,
    add_write_back,
    check_written_once,
    is_write_back,
    known_entry,
)
from shardwise.dispatch.propagate import unsupported
from shardwise.dispatch.shapes import ASKED, same_stride
from shardwise.dispatch.variants import (
    FUSED_STEPS,
    TensorByKeyword,
    check_overlaps,
    compares_memory,
    entry_of_call,
    takes_lists,
    watch_overlaps,
)
from shardwise.dispatch.wrapped import Wrapped, as_layouts, note_write
from shardwise.dtensor.fallback import (
    decomposition_of,
    kernels_above,
    may_fall_back,
    run_gathered,
    unknown_shape_entry,
)
from shardwise.dtensor.foreach import foreach_entry, is_by_value
from shardwise.dtensor.operands import (
    as_list,
    check_plain,
    keep_gradient_plain,
    numbers_as_plain,
    wrap_gradients_of_skipped,
)
from shardwise.dtensor.snapshots import follow, may_write, take_over, write_through
from shardwise.errors import MixedTensorsError, ShardwiseError, UnsupportedError
from shardwise.simulation.local_tensor import resolved

aten = torch.ops.aten


class _Flag:
    """Stands for True or False in a key, where they would equal 1 and 0."""


TRUE, FALSE = _Flag(), _Flag()


def add_argument(
    op: Any, value: Any, key: list[Any], operands: list[Any] | None, position: int | None = None
) -> None:
    """Add an argument that is neither a DTensor nor an int to the key and the local operands.

    `position` is that of the list which holds it; by default it is the next argument.
    """
    kind = type(value)
    if kind is float or kind is torch.SymFloat:
        # A float never changes a layout: keyed by type, or every step would miss. Hashing a
        # SymFloat would make it a constant of the graph.
        key.append(float)
    elif kind is bool:
        key.append(TRUE if value else FALSE)
    elif kind is list or kind is tuple:
        part, value = _list_key(op, value, None if operands is None else len(operands))
        key.append(part)
    elif isinstance(value, Wrapped):
        if operands is None:
            raise TensorByKeyword
        key.append(value._layout)
        value = value._local
    elif isinstance(value, torch.Tensor):
        if position is None and operands is not None:
            position = len(operands)
        check_plain(op, value, position)
        if value._is_zerotensor():
            value = resolved(value)
        if value.requires_grad:
            keep_gradient_plain(value)
        key.append((torch.Tensor, value.dtype, value.shape, value.stride()))
    elif kind is torch.Generator:
        key.append(kind)  # its state changes values, never a layout
    else:
        key.append(value)
    if operands is not None:
        operands.append(value)


def _list_key(op: Any, items: Sequence[Any], position: int | None) -> tuple[Any, list[Any]]:
    """What a list adds to the key, and its items as local operands.

    `position` is that of the argument, or None for a keyword.
    """
    first = type(items[0]) if items else None
    if first is not None and issubclass(first, Wrapped) and position is not None:
        try:  # fast path for foreach ops: their lists are long and hold only tensors
            return tuple([x._layout for x in items]), [x._local for x in items]
        except AttributeError:
            pass
    elif first is float and set(map(type, items)) == {float}:
        return (float, len(items)), list(items)
    key: list[Any] = []
    operands: list[Any] = []
    for item in items:
        if type(item) is int:
            key.append(item)
            operands.append(item)
        elif isinstance(item, torch.Tensor) and not isinstance(item, Wrapped) and takes_lists(op):
            key.append(torch.Tensor)  # a foreach op never mixes the items of one list
            operands.append(item)
        else:
            add_argument(op, item, key, None if position is None else operands, position)
    return tuple(key), operands


#: By op, the sizes that torch's gradient formula uses as Python ints: it loops over a dim, or makes
#: a tensor of concrete sizes. A compiled graph is specialised to these sizes, as on one device.
_SIZES_OF_BACKWARD: dict[Any, Callable[[Sequence[Any]], Sequence[Any]]] = {
    aten.cumprod.default: lambda args: args[0].shape[args[1] :][:1],
    aten.fractional_max_pool2d.default: lambda args: args[0].shape,
    aten.linalg_householder_product.default: lambda args: (*args[0].shape[-2:], args[1].shape[-1]),
    aten.ormqr.default: lambda args: (*args[0].shape[-2:], args[1].shape[-1]),
    aten.sgn.default: lambda args: args[0].shape,
}


def fix_sizes(op: Any, args: Sequence[Any]) -> None:
    """Specialise the symbolic sizes that the gradient of this call needs as ints, if it has one.

    This runs before the op: torch loses the size of a forward output that is specialised only in
    backward. Backward calls some of these ops too, without a gradient (that of `abs` calls `sgn`).
    """
    if op not in _SIZES_OF_BACKWARD or not torch.is_grad_enabled():
        return
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        return
    for size in _SIZES_OF_BACKWARD[op](args):
        int(size)


@dataclass(slots=True)
class Miss:
    """A call without an entry, with the key and the local operands that the hot path made."""

    #: DTensor, which wraps the results.
    kind: Any
    op: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    key: list[Any]
    operands: list[Any]
    preferred: Layout | None

    def plan_and_run(self) -> Any:
        """Plan the call, keep the plan, and run it for the first time."""
        try:
            return self._plan_and_run()
        except UnsupportedError:
            if not may_fall_back(self.op):
                raise
        layouts = [as_layouts(a) for a in self.args]
        return run_gathered(
            self.op, self.args, self.kwargs, layouts, self.operands, self.kind._wrap
        )

    def _plan_and_run(self) -> Any:
        op, args, kwargs, key = self.op, self.args, self.kwargs, self.key
        fix_sizes(op, args)
        if _is_by_value(op):
            # float() specialises a SymFloat: the graph is for this value.
            values = [v for value in (*args, *kwargs.values()) for v in as_list(value)]
            key += [float(a) for a in values if isinstance(a, (float, torch.SymFloat))]
            if (known := known_entry(key)) is not None:
                known.hits += 1
                return self._run(known)
        if changes_shape(op):
            return _view_in_place(op, args, kwargs)
        if not takes_lists(op) and (on_one := numbers_as_plain(args)) is not None:
            return self.kind.__torch_dispatch__(op, None, tuple(on_one), kwargs, self.preferred)
        twin = written_twin(op)
        if twin is not None and (find_rule(op) is None or is_write_back(key)):
            return _write_back(op, twin, args, kwargs)
        layouts = [as_layouts(a) for a in args]
        entry = foreach_entry(op, layouts, kwargs) or unknown_shape_entry(op, layouts)
        if entry is None:
            if (decomposition := _decomposition(op)) is not None:
                return _run_decomposed(op, decomposition, args, kwargs)
            try:
                entry = entry_of_call(op, layouts, kwargs, self.preferred)
            except ResizedError:
                raise
            except UnsupportedError:
                to_source = _writes_to_source(op, args)
                if to_source and op is aten.copy_.default and isinstance(args[1], Wrapped):
                    check_overlaps(op, args)
                    write_through(*args[:2])
                    return args[0]
                if twin is None or not (to_source or _may_write_back(args[0])):
                    raise
                if not to_source:  # the key does not say whether a snapshot can be written
                    add_write_back(key)
                return _write_back(op, twin, args, kwargs)
        follow(self.kind, op, layouts, kwargs, entry)
        watch_overlaps(op, entry)
        wrap_gradients_of_skipped(self.kind, op, layouts, entry)
        add_entry(key, entry)
        return self._run(entry, first=True)

    def _run(self, entry: Entry, *, first: bool = False) -> Any:
        if watch.notes is not None:
            watch.notes.append(entry)
        if entry.move is not None:
            entry.move(self.operands, self.args)
        local = entry.call(*map(_recorded, self.operands), **self.kwargs)
        for layout in entry.plan.outputs:
            if layout.symbolic:
                settle_ones(layout.shape)
        if first and not _shares_memory(self.op) and not _is_outside(entry):
            if has_other_strides(local, entry.plan.outputs):
                entry.call = restrided(entry.call, entry.plan.outputs)
                local = restrided(lambda: local, entry.plan.outputs)()
            if is_memory_of(local, self.operands):
                entry.call = unaliased(entry.call)
                local = unaliased(lambda: local)()
        if entry.out is not None:
            return self.kind._wrap(local, entry.out)
        if entry.writes is not None:
            note_write(entry.writes, self.args[0])
            return self.args[0]
        assert entry.finish is not None, "an entry has one of `out`, `writes` and `finish`"
        return entry.finish(local, self.args, self.kind._wrap)


def _is_outside(entry: Entry) -> bool:
    return any(layout.grid.outside for layout in entry.plan.outputs[:1])


def _recorded(operand: Any) -> Any:
    """An argument that the graph being traced can record."""
    if type(operand) is torch.SymInt:
        return recorded((operand,))[0]
    if isinstance(operand, (list, tuple)) and torch.SymInt in map(type, operand):
        return recorded(operand)
    return operand


def _shares_memory(op: Any) -> bool:
    """Whether the op's results share, or may share, memory with its arguments."""
    return is_view(op) or bool(written_inputs(op)) or op in UNSAFE_VIEWS


def _is_by_value(op: Any) -> bool:
    """Whether plans depend on the values of floats, which the key of a hit leaves out."""
    rule = find_rule(plain_op(op))
    return (rule is not None and rule.by_value) or is_by_value(op)


def _view_in_place(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an op that replaces a tensor by a view of itself, such as `t_`."""
    x, twin = args[0], functional_twin(op)
    if twin is None:
        raise UnsupportedError(unsupported(op, [x._layout], [0]))
    view = twin(*args, **kwargs)
    if view._layout.snapshot and not x._layout.snapshot:
        raise UnsupportedError(unsupported(op, [x._layout], [0]))
    with undispatched():
        op(*args, **kwargs)  # the wrapper's own shape
    take_over(x, view)
    return x


def _may_write_back(target: Any) -> bool:
    """Whether computing a new tensor and copying it to `target` can replace an in-place call."""
    if not isinstance(target, Wrapped):
        return False
    return not target._layout.snapshot and not target._layout.expanded


def _writes_to_source(op: Any, args: Sequence[Any]) -> bool:
    """Whether the op writes to a snapshot, and may write to the tensor that it is a view of."""
    if not isinstance(args[0], Wrapped) or not args[0]._layout.snapshot:
        return False
    # A draw fills entries in the order of the tensor, which a copy would not keep.
    drawn = torch.Tag.nondeterministic_seeded in plain_op(op).tags
    return list(written_inputs(plain_op(op))) == [0] and not drawn and may_write(args[0])


def _write_back(op: Any, twin: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an in-place op that its tensor's layout does not allow: as a new tensor, copied back."""
    if compares_memory(op):
        check_overlaps(op, args)
    if isinstance(args[0], Wrapped):
        check_written_once(op, args[0]._layout)
    aten.copy_.default(args[0], twin(*args, **kwargs))
    return args[0]


def _decomposition(op: Any) -> Callable[..., Any] | None:
    """The decomposition of an op without a rule; None if it has a rule, or no decomposition."""
    if find_rule(plain_op(op)) is not None:
        return None
    found = decomposition_of(plain_op(op))
    if found is None or not isinstance(op, Positional):
        return found
    return functools.partial(op.call, found)


def _run_decomposed(
    op: Any, decomposition: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run an op without a rule through other ops; the error for one of those names `op`."""
    cause: Exception | None = None
    if isinstance(op, OpOverload):
        check_whole_numbers(op, args, kwargs)
    try:
        result = decomposition(*args, **kwargs)
        if result is not NotImplemented:
            result = result if _may_return_views(plain_op(op)) else _with_views_copied(result, args)
            return _in_kernel_order(op, args, kwargs, result) if op in ASKED else result
    except NotImplementedError as error:
        mixed = isinstance(error, MixedTensorsError) and plain_op(op) in kernels_above
        if op in FUSED_STEPS or mixed or not isinstance(error, ShardwiseError):
            raise  # the caller mixed plain tensors and DTensors, or the backend has no kernel
        cause = error
    except Exception as error:
        fake = faked([as_layouts(a) for a in args], kwargs)
        found = as_on_one_device(op, *fake, error)
        if found is error:
            raise
        raise found from error
    layouts = [x._layout for a in args for x in as_list(a) if isinstance(x, Wrapped)]
    raise UnsupportedError(unsupported(op, layouts)) from cause


def _in_kernel_order(op: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> Any:
    """The result of a decomposition, copied if the kernel has another memory order."""
    if not isinstance(result, Wrapped) or result._layout.symbolic or not result.numel():
        return result
    (meta,), _ = infer_outputs(op, [as_layouts(a) for a in args], kwargs, symbolic=False)
    wanted: Any = meta.stride
    if same_stride(result.shape, result.stride(), wanted):
        return result
    order = sorted(range(result.dim()), key=lambda d: -wanted[d])
    inverse = sorted(range(result.dim()), key=lambda i: order[i])
    return result.permute(order).contiguous().permute(inverse)


def _may_return_views(op: Any) -> bool:
    """Whether the op may return views on one device; composite ops may, whatever the schema."""
    if _shares_memory(op) or not isinstance(op, OpOverload):
        return True
    return is_composite(op)


def _with_views_copied(result: Any, args: Sequence[Any]) -> Any:
    """Copies of results that are views of arguments, of an op that returns no views.

    A decomposition may return views, on some ranks or on all.
    """
    if isinstance(result, (list, tuple)):
        found = [_with_views_copied(each, args) for each in result]
        return found if isinstance(result, list) else tuple(found)
    if isinstance(result, Wrapped) and not any(result is arg for arg in args):
        operands = [x._local for a in args for x in as_list(a) if isinstance(x, Wrapped)]
        if result._layout.snapshot or is_memory_of(result._local, operands):
            return result.clone()
    return result
