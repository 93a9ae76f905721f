"""What `DTensor` does before torch sees an index, and methods such as `t_`.

torch makes plain tensors of lists in an index (`x[[0, 2]]`); here they become replicated DTensors.
In a write (`x[2, 5] = 0`) an int becomes a slice of length 1: torch would select, and write to what
may be a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.autograd import swap_tensors
from shardwise.core.layout import Layout
from shardwise.dtensor.snapshots import take_over
from shardwise.errors import UnsupportedError
from shardwise.lookup.ids import has_values
from shardwise.simulation.parts import parts_of


def holds_list(index: Any) -> bool:
    """Whether an index is or contains a list."""
    return list in map(type, index) if type(index) is tuple else type(index) is list


def with_tensors(x: Any, index: Any) -> Any:
    """The index with a replicated tensor in place of each list of numbers.

    A list is the same on all ranks, which run one program. A list of lists as the whole index is
    left alone: torch is about to change its meaning.
    """
    if isinstance(index, tuple):
        return tuple(_tensor(x, item) if _is_numbers(item) else item for item in index)
    return _tensor(x, index) if all(type(i) in (int, bool) for i in index) else index


def for_number(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """The index and value of a write of one number, with ints as slices or as tensors."""
    items = index if type(index) is tuple else (index,)
    if not any(type(item) is int for item in items):
        return index, value
    if any(isinstance(item, torch.Tensor) for item in items):
        return tuple(_beside_tensors(x, item) for item in items), value
    if all(type(item) in (int, slice, type(...)) for item in items):
        items = _each_dim(x.dim(), items)
    if len(items) != x.dim() or not all(map(_fits, items, x.shape)):
        return index, value  # torch handles it, or raises
    if isinstance(value, torch.Tensor):
        value = value.to(x.dtype)  # index_put does not cast as copy does
    return tuple(_int_as_slice(x, dim, item) for dim, item in enumerate(items)), value


def _beside_tensors(x: Any, item: Any) -> Any:
    """An item of an index that holds tensors, on the device of `x`."""
    if type(item) is int:
        return _tensor(x, [item])
    return item.to(x.device) if isinstance(item, torch.Tensor) else item


def _each_dim(num_dims: int, items: tuple[Any, ...]) -> tuple[Any, ...]:
    """One item per dim: `...` and missing trailing items become full slices."""
    at = items.index(...) if ... in items else len(items)
    rest = items[at + 1 :]
    return (*items[:at], *(slice(None),) * (num_dims - at - len(rest)), *rest)


def _fits(item: Any, size: int) -> bool:
    return type(item) is slice or (type(item) is int and -size <= item < size)


def _int_as_slice(x: Any, dim: int, item: Any) -> Any:
    """An int as a slice, which is a view where `select` would copy.

    As a tensor where a slice would be a copy too: several axes shard the dim, or its size is
    symbolic.
    """
    if type(item) is slice:
        return item
    if type(x.shape[dim]) is not int or sum(p.is_shard(dim) for p in x.placements) > 1:
        return _tensor(x, [item])
    return slice(item, item + 1 or None)


def for_ints(x: Any, index: Any, value: Any) -> tuple[Any, Any]:
    """The index and value of a write such as `x[2] = v`, as `x[2:3] = v[None]`.

    Unchanged where the index holds several tensors, where torch will raise, and where a size is
    symbolic: there a slice may be a copy too.
    """
    items = index if isinstance(index, tuple) else (index,)
    steps = [reach for item in items if (reach := _reach(item)) is not None]
    if int not in map(type, items) or len(steps) < len(items):
        return index, value
    missing = x.dim() - sum(consumed for consumed, _ in steps)
    if missing < 0 or sum(isinstance(item, torch.Tensor) for item in items) > 1:
        return index, value
    slices: list[Any] = []
    #: For each dim of the target, whether it comes from an int.
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
    """Whether `value` is the memory that it is written to, as in `x[1, :2] += 1`.

    Its strides along dims of size 1 may differ, which torch takes for partial overlap.
    """
    if type(value) is not type(x):
        return False
    here, there = (parts_of(t._local) for t in (x, value))
    if type(here[0]) is not torch.Tensor or type(there[0]) is not torch.Tensor:
        return False  # traced tensors have no memory
    memory = {part.untyped_storage().data_ptr() for part in here if part.numel()}
    if memory.isdisjoint(part.untyped_storage().data_ptr() for part in there):
        return False
    target = x[index]._local
    pairs = zip(parts_of(target), there, strict=False)
    return all(a.data_ptr() == b.data_ptr() and a.shape == b.shape for a, b in pairs)


def _reach(item: Any) -> tuple[int, int] | None:
    """How many dims an item of an index consumes and produces; None if unknown."""
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


# -- methods that replace a tensor by a view of itself (`t_`, `unsqueeze_`) -------------------
#
# After a write, torch's autograd replays the views of a tensor with their arguments. On a plain
# tensor it uses strides; on a wrapper it calls `view(base, ...)`, which is a different view once
# the base has other dims. So the base must stay as it is: the caller's tensor becomes a view, and
# the base lives on under a name that only the views know. A tensor without views is changed in
# place: as a view it would save more of a later write for backward.
#
# These are methods, not kernels: only a Python name can come to mean another tensor. torch's C++
# (`quantile`, the rules of `vmap`) keeps using the tensor that it passed.


def in_place_view(name: str) -> Callable[..., Any]:
    """The method of this name, e.g. `t_`; the view op is the name without the underscore."""
    turn, view_of = getattr(torch.Tensor, name), getattr(torch.Tensor, name[:-1])

    def method(x: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not has_values(x._local):
            return turn(x, *args, **kwargs)
        if x.is_leaf and x.requires_grad:
            return _turned_leaf(turn, x, *args, **kwargs)
        if x._use_count() == 1 and not x._is_view():
            return turn(x, *args, **kwargs)  # there is no view of it
        if x.retains_grad:  # torch's hook knows the tensor that the name no longer means
            raise UnsupportedError(
                f"{name}() would change {x._layout}, which retains its gradient, while views of it "
                f"or results saved by autograd are in use. Call retain_grad() after it, or use "
                f"{name[:-1]}()."
            )
        # A no-op, for torch's checks and its version counter.
        torch.Tensor.transpose_(x, 0, 0)
        with torch.enable_grad():
            view = view_of(x, *args, **kwargs)
        if view._layout.snapshot and not x._layout.snapshot:
            return turn(x, *args, **kwargs)  # raises the right error
        _become(x, view)
        return x

    method.__name__ = name
    method.__doc__ = turn.__doc__
    return method


def _become(x: Any, view: Any) -> None:
    """Let `x` be a view of itself; what it was lives on as the base of that view and others."""
    swap_tensors(x, view)
    base = type(x)._wrap(view._local, view._layout)
    take_over(base, x)
    take_over(x, view)
    take_over(view, base)


def retain_grad(x: Any) -> None:
    """As for any tensor.

    A linear layer with a bias returns a view on one device. `retain_grad` alone shows it, after a
    write to another view, so only then does `x` become one.
    """
    operands = None if torch.compiler.is_compiling() else getattr(x.grad_fn, "biased", None)
    if operands is not None and not x._is_view() and _is_view_of_product(*operands):
        with torch.enable_grad():
            _become(x, x.view(x.shape))
    torch.Tensor.retain_grad(x)


def _is_view_of_product(layout: Layout, of_bias: Layout) -> bool:
    """Whether one device returns a view of a matrix product: torch itself tells."""
    x, bias = (torch.empty_strided(it.shape, it.stride, device="meta") for it in (layout, of_bias))
    weight = torch.empty(of_bias.shape[0], layout.shape[-1], device="meta", requires_grad=True)
    return torch.nn.functional.linear(x, weight, bias)._is_view()


def _turned_leaf(turn: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Change a leaf, which stays one and must have no views; its gradient hook is renewed."""
    if not torch.is_grad_enabled() and x._use_count() > 1:
        raise UnsupportedError(
            f"{turn.__name__}() would change a leaf that requires grad, {x._layout}, while views "
            "of it or results saved by autograd are still in use. Call it before they are made or "
            f"after they are gone, or use {turn.__name__[:-1]}()."
        )
    turn(x, *args, **kwargs)
    hook = x.__dict__.pop("_hooked", None)
    if hook is not None:
        hook.remove()
        x.requires_grad_()
    return x
