"""Indices out of lists and numbers, such as `x[[0, 2]]`: torch makes plain tensors of them.

Where one number is written, `x[2, 5] = 0`, a position is a slice of length 1: torch would select
it, and write to what may be a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.autograd import swap_tensors
from shardwise.dtensor.snapshots import take_over
from shardwise.errors import UnsupportedError
from shardwise.lookup.ids import has_values
from shardwise.simulation.parts import parts_of


def holds_list(index: Any) -> bool:
    """Whether a list of numbers stands in an index."""
    return list in map(type, index) if type(index) is tuple else type(index) is list


def with_tensors(x: Any, index: Any) -> Any:
    """The index with a replicated tensor in place of each list of numbers.

    Every rank runs the same program, so a list is the same on all of them. A list of lists that
    is the whole index is left alone: torch is about to change what it means.
    """
    if isinstance(index, tuple):
        return tuple(_tensor(x, item) if _is_numbers(item) else item for item in index)
    return _tensor(x, index) if all(type(i) in (int, bool) for i in index) else index


def for_number(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """The index and value of a write of one number, its positions as slices or as tensors."""
    items = index if type(index) is tuple else (index,)
    if not any(type(item) is int for item in items):
        return index, value
    if any(isinstance(item, torch.Tensor) for item in items):
        return tuple(_beside_tensors(x, item) for item in items), value
    if all(type(item) in (int, slice, type(...)) for item in items):
        items = _each_dim(x.dim(), items)
    if len(items) != x.dim() or not all(map(_fits, items, x.shape)):
        return index, value  # torch knows what it means, or what is wrong
    if isinstance(value, torch.Tensor):
        value = value.to(x.dtype)  # as a copy does, and a write by tensors does not
    return tuple(_span(x, dim, item) for dim, item in enumerate(items)), value


def _beside_tensors(x: Any, item: Any) -> Any:
    """An item of an index that holds tensors, on the device of `x`: they are compared there."""
    if type(item) is int:
        return _tensor(x, [item])
    return item.to(x.device) if isinstance(item, torch.Tensor) else item


def _each_dim(num_dims: int, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """One item per dim: what `...` stands for, or what is left out at the end, in full."""
    at = items.index(...) if ... in items else len(items)
    rest = items[at + 1 :]
    return (*items[:at], *(slice(None),) * (num_dims - at - len(rest)), *rest)


def _fits(item: Any, size: int) -> bool:
    return type(item) is slice or (type(item) is int and -size <= item < size)


def _span(x: Any, dim: int, item: Any) -> Any:
    """One position as a slice, which is a view where selecting would copy.

    It is none where several axes split the dim, or where its size is a symbol of torch.compile.
    """
    if type(item) is slice:
        return item
    if type(x.shape[dim]) is not int or sum(p.is_shard(dim) for p in x.placements) > 1:
        return _tensor(x, [item])
    return slice(item, item + 1 or None)


def for_ints(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """The index and value of a write such as `x[2] = v`, as `x[2:3] = v[None]`.

    Torch would select row 2 first, and write to what may be a copy; a slice is always a view.
    Left as they are where several tensors stand in the index, where torch will raise, and where
    a size is a symbol of torch.compile: there a slice may be a copy too.
    """
    items = index if isinstance(index, tuple) else (index,)
    steps = [reach for item in items if (reach := _reach(item)) is not None]
    if int not in map(type, items) or len(steps) < len(items):
        return index, value
    missing = x.dim() - sum(consumed for consumed, _ in steps)
    if missing < 0 or sum(isinstance(item, torch.Tensor) for item in items) > 1:
        return index, value
    slices: list[Any] = []
    #: For each dim of what is written to, whether an int stands there.
    from_int: list[bool] = []
    at = 0
    for item, (consumed, produced) in zip(items, steps, strict=True):
        if type(item) is int:
            if type(x.shape[at]) is not int or not -x.shape[at] <= item < x.shape[at]:
                return index, value
            item = slice(item, item + 1 or None)
            from_int.append(True)
        else:
            from_int += [False] * (missing if item is Ellipsis else produced)
        slices.append(item)
        at += missing if item is Ellipsis else consumed
    from_int += [False] * (x.dim() - at)
    if isinstance(value, torch.Tensor) and value.dim():
        for after, single in enumerate(reversed(from_int)):
            if single and value.dim() >= after:
                value = value.unsqueeze(value.dim() - after)
        if _same_memory(x, tuple(slices), value):
            value = value.clone()
    return tuple(slices), value


def _same_memory(x: Any, index: tuple[Any, ...], value: Any) -> bool:
    """Whether `value` is what it is to be written to, as in `x[1, :2] += 1`.

    Its strides along dims of size 1 may be others, which torch takes for memory that overlaps.
    """
    if type(value) is not type(x):
        return False
    here, there = (parts_of(t._local) for t in (x, value))
    if type(here[0]) is not torch.Tensor or type(there[0]) is not torch.Tensor:
        return False  # what is traced has no memory
    memory = {part.untyped_storage().data_ptr() for part in here if part.numel()}
    if memory.isdisjoint(part.untyped_storage().data_ptr() for part in there):
        return False
    target = x[index]._local
    pairs = zip(parts_of(target), there, strict=False)
    return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)


def _reach(item: Any) -> tuple[int, int] | None:
    """How many dims an item of an index stands for, and how many it leaves; None if not known."""
    if item is None:
        return 0, 1
    if item is Ellipsis:
        return 0, 0
    if isinstance(item, torch.Tensor):
        return (item.dim(), 1) if item.dtype in (torch.bool, torch.uint8) else (1, item.dim())
    return (1, 1) if type(item) in (int, slice) else None


def _is_numbers(item: Any) -> bool:
    return isinstance(item, list) and all(type(i) in (int, bool) or _is_numbers(i) for i in item)


def _tensor(x: Any, numbers: list[Any]) -> Any:
    plain = torch.tensor(numbers)
    return x.new_tensor(numbers, dtype=plain.dtype if plain.numel() else torch.long)


# Methods that turn a tensor into a view of itself (`t_`, `unsqueeze_`).
#
# Torch's autograd takes the views of a tensor again, with their numbers, when it was written to.
# On a plain tensor it does so by strides in memory; on a wrapper it calls `view(base, ...)`,
# which is another view once the base has other dims. So the base has to stay as it is: the tensor
# of the caller becomes a view of it, and the base goes on under a name that only the views know.
# A tensor without views is turned as it is: as a view, it would keep more of a later write for
# backward.
#
# These are methods and not kernels of the ops: only a name in Python can come to mean another
# tensor. Torch's own C++ (`quantile`, the rules of `vmap`) goes on with the tensor that it handed
# over.


def becoming(name: str) -> Callable[..., Any]:
    """The method of this name, whose view has the same name without the last underscore."""
    turn, view_of = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_values(x._local):
            return turn(x, *args, **kwargs)
        if x.is_leaf and x.requires_grad:
            return _turned_leaf(turn, x, *args, **kwargs)
        if x._use_count() == 1 and not x._is_view():
            return turn(x, *args, **kwargs)  # of which there is no view
        # Torch's checks, and its count of writes: this leaves all as it is.
        torch.Tensor.transpose_(x, 0, 0)
        with torch.enable_grad():
            view = view_of(x, *args, **kwargs)
        if view._layout.snapshot and not x._layout.snapshot:
            return turn(x, *args, **kwargs)  # which says why not
        swap_tensors(x, view)
        base = type(x)._wrap(view._local, view._layout)
        take_over(base, x)
        take_over(x, view)
        take_over(view, base)
        return x

    method.__name__ = name
    method.__doc__ = turn.__doc__
    return method


def _turned_leaf(turn: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A leaf stays one: nothing may know it but by its name. Its gradient lies as it does now."""
    if not torch.is_grad_enabled() and x._use_count() > 1:
        raise UnsupportedError(
            f"{turn.__name__}() would turn a leaf that requires grad, {x._layout}, of which views "
            "or results that autograd remembers are still in use. Turn it before they are made, "
            "after they are gone, or use a view of it."
        )
    turn(x, *args, **kwargs)
    hook = x.__dict__.pop("_hooked", None)
    if hook is not None:
        hook.remove()
        x.requires_grad_()
    return x
