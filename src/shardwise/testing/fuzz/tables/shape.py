"""Views, joins and splits, ops that index, gather and scatter, and writes of all kinds."""

from __future__ import annotations

import math

import torch

from shardwise.testing.fuzz.hand import FLOATS, INTS, WIDE, Draft, Hand, Row


def _factors(h: Hand, num: int) -> list[int]:
    """Sizes whose product is `num`."""
    sizes: list[int] = []
    while num > 1 and len(sizes) < 3:
        size = h.pick([n for n in range(1, num + 1) if num % n == 0])
        sizes.append(size)
        num //= size
    return [*sizes, num] if num != 1 or not sizes else sizes


def _reshape(h: Hand) -> str:
    x = h.any()
    name = h.pick(("reshape", "view", "reshape"))
    shape = list(h[x].shape)
    num = math.prod(shape)
    if not num:
        sizes = [*shape, 1]
    elif h.chance(0.4) and len(shape) > 1:  # two neighbours become one
        at = h.between(0, len(shape) - 2)
        sizes = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    elif h.chance(0.5) and shape:  # one becomes two
        at = h.between(0, len(shape) - 1)
        sizes = [*shape[:at], *_factors(h, shape[at]), *shape[at + 1 :]]
    else:
        sizes = _factors(h, num)
        if h.chance(0.3):
            sizes[h.between(0, len(sizes) - 1)] = -1
    return f"{x}.{name}({', '.join(map(str, sizes))})"


def _expand(h: Hand) -> str:
    x = h.any(0, 3)
    sizes = [h.size() if s == 1 else s for s in h[x].shape]
    kind = h.pick(("expand", "expand", "broadcast_to", "expand_as"))
    front = [h.between(1, 3)] if h.chance(0.4) else []
    if kind == "expand":
        kept = [s if not h.chance(0.2) or s != h[x].shape[d] else -1 for d, s in enumerate(sizes)]
        return f"{x}.expand({', '.join(map(str, front + kept))})"
    if kind == "expand_as":
        return f"{x}.expand_as({h.new(front + sizes, h[x].dtype)})"
    return f"torch.broadcast_to({x}, {tuple(front + sizes)})"


def _ones(h: Hand) -> str:
    """An expand of a tensor with a dim of size 1."""
    x = h.tensor(None, (1, 3), where=lambda t: 1 in t.shape)
    sizes = [h.between(2, 4) if s == 1 else s for s in h[x].shape]
    return f"{x}.expand({', '.join(map(str, sizes))})"


def _permute(h: Hand) -> str:
    x = h.any(1)
    dims = h.random.sample(range(h[x].dim()), h[x].dim())
    return f"{x}.permute({', '.join(map(str, dims))})"


def _narrow(h: Hand) -> str:
    x = h.any(1)
    dim = h.dim(x)
    start = h.between(0, h[x].shape[dim] - 1)
    return f"{x}.narrow({dim}, {start}, {h.between(0, h[x].shape[dim] - start)})"


def _join(h: Hand, name: str) -> str:
    x = h.any(1 if name == "cat" else 0, 3)
    others = [h.same(x) for _ in range(h.between(1, 2))]
    dim = h.dim(x, 0) if name == "cat" else h.between(0, h[x].dim())
    return f"torch.{name}([{', '.join([x, *others])}], {dim})"


def _uneven_cat(h: Hand) -> str:
    x = h.any(1, 3)
    dim = h.dim(x, 0)
    shape = h.resized(x, dim, h.size())
    return f"torch.cat([{x}, {h.new(shape, h[x].dtype)}], {dim})"


def _split(h: Hand) -> str:
    x = h.any(1)
    dim = h.dim(x, 2)
    size = h[x].shape[dim]
    kind = h.pick(("split", "chunk", "sections", "unbind", "tensor_split"))
    if kind == "split":
        return f"torch.split({x}, {h.between(-(-size // 3), size)}, {dim})"
    if kind == "chunk":
        return f"torch.chunk({x}, {h.between(2, 3)}, {dim})"
    if kind == "unbind":
        return f"torch.unbind({x}, {dim})"
    if kind == "tensor_split":
        return f"torch.tensor_split({x}, {h.between(2, 3)}, {dim})"
    first = h.between(0, size)
    return f"torch.split({x}, [{first}, {size - first}], {dim})"


def _as_strided(h: Hand) -> str:
    x = h.tensor(None, (1, 2), where=lambda t: t.is_contiguous() and t.numel() > 1)
    return f"{x}.as_strided(({h[x].numel() // 2},), (2,))"


VIEWS: tuple[Row, ...] = (
    _reshape,
    _reshape,
    _reshape,
    _expand,
    _ones,
    _ones,
    _permute,
    _permute,
    _narrow,
    _narrow,
    lambda h: f"{h.any(2, 2)}.t()",
    lambda h: f"{(x := h.any(2))}.transpose({h.dim(x, 0)}, {h.dim(x, 0)})",
    lambda h: f"{(x := h.any())}.unsqueeze({h.between(0, h[x].dim())})",
    lambda h: f"{h.any()}.squeeze()",
    lambda h: f"{(x := h.any(1))}.squeeze({h.dim(x, 0)})",
    lambda h: f"{h.any()}.flatten()",
    lambda h: f"{(x := h.any(2))}.flatten({h.between(0, h[x].dim() - 2)})",
    lambda h: f"{(x := h.any(1))}.select({(d := h.dim(x))}, {h.between(0, h[x].shape[d] - 1)})",
    lambda h: f"torch.diagonal({h.any(2)}, {h.between(-1, 1)})",
    lambda h: f"torch.diag({h.inexact(1, 2)})",
    lambda h: f"torch.diag_embed({h.inexact(1, 2)})",
    lambda h: f"{(x := h.any(1))}.unfold({(d := h.dim(x))}, {h.between(1, h[x].shape[d])}, 1)",
    lambda h: f"torch.movedim({(x := h.any(2))}, {h.dim(x, 0)}, 0)",
    lambda h: f"{(x := h.any(1))}.unflatten({(d := h.dim(x))}, (1, {h[x].shape[d]}))",
    lambda h: f"{h.any()}.view_as({h.any()})",
    lambda h: f"torch.atleast_{h.between(1, 3)}d({h.any()})",
    lambda h: f"torch.swapaxes({(x := h.any(2))}, 0, {h.dim(x, 0)})",
    lambda h: f"torch.squeeze_copy({h.any()})",
    lambda h: (
        f"torch.broadcast_tensors({(x := h.any(1, 3))}.unsqueeze(-1), {h.new((2,), h[x].dtype)})"
    ),
    lambda h: (
        f"torch.meshgrid({(x := h.floats(1, 1))}, {h.new((h.size(),), h[x].dtype)}, indexing='ij')"
    ),
    lambda h: f"{h.any()}.mT" if h.chance(0.2) else f"{h.any(2)}.mT",
    _as_strided,
)

JOINS: tuple[Row, ...] = (
    lambda h: _join(h, "cat"),
    lambda h: _join(h, "stack"),
    _uneven_cat,
    _split,
    _split,
    _split,
    lambda h: f"{(x := h.any(1, 3))}.repeat({', '.join(['2'] * h[x].dim())})",
    lambda h: f"torch.tile({h.any(0, 2)}, (2, 1))",
    lambda h: f"torch.repeat_interleave({(x := h.any(1, 3))}, 2, {h.dim(x, 0)})",
    lambda h: f"torch.hstack([{(x := h.any())}, {h.same(x)}])",
    lambda h: f"torch.vstack([{(x := h.any(0, 2))}, {h.same(x)}])",
    lambda h: f"torch.block_diag({h.inexact(2, 2)}, {h.inexact(2, 2)})",
    lambda h: f"torch.cartesian_prod({(x := h.floats(1, 1))}, {h.new((2,), h[x].dtype)})",
)


# -- indexing --------------------------------------------------------------------------------


def index_of(h: Hand, x: str) -> str:
    """An index as text: slices, numbers, None, an ellipsis."""
    words = []
    for size in h[x].shape[: h.between(1, max(h[x].dim(), 1))]:
        kind = h.between(0, 5)
        if kind == 0 and size:
            words.append(str(h.between(-size, size - 1)))
        elif kind == 1:
            words.append(f"{h.between(0, size)}:")
        elif kind == 2:
            words.append(f":{h.between(-size, size)}" if size else ":")
        elif kind == 3:
            words.append("::2")
        else:
            words.append(":")
    if h.chance(0.1):
        words.insert(h.between(0, len(words)), "None")
    elif h.chance(0.15):
        words.append("...")
    return ", ".join(words) if words else "..."


def ids(h: Hand, high: int, shape: tuple[int, ...], wrong: float = 0.03) -> str:
    """Ids below `high`; now and then one that is out of range."""
    if not high:
        shape = (0,) * max(len(shape), 1)
    name = h.new(shape, torch.int64, high=high)
    return f"{name} - 1" if h.chance(wrong) else name


def along(h: Hand, x: str) -> tuple[int, int]:
    """A dim of `x` and its size."""
    dim = h.dim(x)
    return dim, h[x].shape[dim]


def _by_tensor(h: Hand) -> str:
    x = h.any(1)
    index = ids(h, h[x].shape[0], h.shape(1, 2, nonempty=True), wrong=0.2)
    if h[x].dim() > 1 and h.chance(0.4):
        second = h.pick((":", "0:1", str(h[x].shape[1] - 1), "None"))
        return f"{x}[{index}, {second}]"
    if h[x].dim() > 1 and h.chance(0.4):
        return f"{x}[:, {ids(h, h[x].shape[1], (h.size(True),))}]"
    return f"{x}[{index}]"


def _gather(h: Hand) -> str:
    x = h.any(1)
    dim, size = along(h, x)
    shape = h.resized(x, dim, h.size(True))
    return f"torch.gather({x}, {dim}, {ids(h, size, tuple(shape))})"


def _index_select(h: Hand) -> str:
    x = h.any(1)
    dim, size = along(h, x)
    return f"torch.index_select({x}, {dim}, {ids(h, size, (h.size(),))})"


def scatter_args(h: Hand, x: str) -> tuple[int, str, str]:
    """A dim, an index with the shape of a source, and the source."""
    dim, size = along(h, x)
    shape = h.resized(x, dim, min(h.size(True), 3))
    return dim, ids(h, size, tuple(shape)), h.new(shape, h[x].dtype)


def _scatter(name: str) -> Row:
    def row(h: Hand) -> str:
        x = h.floats(1)
        dim, index, source = scatter_args(h, x)
        if name == "scatter":  # with a repeated index the result is undefined
            return f"torch.scatter({x}, {dim}, {index}, {h.number()})"
        if name == "scatter_reduce":
            reduce = h.pick(("sum", "amax", "amin", "mean", "prod"))
            return f"torch.scatter_reduce({x}, {dim}, {index}, {source}, {reduce!r})"
        return f"torch.{name}({x}, {dim}, {index}, {source})"

    return row


def index_add_args(h: Hand, x: str) -> str:
    dim, size = along(h, x)
    count = h.size(True)
    shape = h.resized(x, dim, count)
    return f"{dim}, {ids(h, size, (count,))}, {h.new(shape, h[x].dtype)}"


def _index_copy(h: Hand) -> str:
    x = h.floats(1)
    dim, size = along(h, x)
    shape = h.resized(x, dim, 1)
    return f"torch.index_copy({x}, {dim}, {ids(h, size, (1,))}, {h.new(shape, h[x].dtype)})"


INDEXING: tuple[Row, ...] = (
    lambda h: f"{(x := h.any(1))}[{index_of(h, x)}]",
    lambda h: f"{(x := h.any(1))}[{index_of(h, x)}]",
    lambda h: f"{(x := h.any(1))}[{index_of(h, x)}]",
    lambda h: f"{(x := h.any(1))}[{x} == {x}]",
    lambda h: f"{(x := h.floats(1))}[{x} > 0.25]",
    _by_tensor,
    _by_tensor,
    _gather,
    _gather,
    _index_select,
    _index_select,
    *map(_scatter, ("scatter", "scatter_add", "scatter_reduce")),
    lambda h: f"torch.index_add({(x := h.floats(1))}, {index_add_args(h, x)})",
    _index_copy,
    lambda h: f"torch.take({(x := h.any(nonempty=True))}, {ids(h, h[x].numel(), (3,), 0.3)})",
    lambda h: f"torch.take_along_dim({(x := h.floats(1))}, torch.argsort({x}, 0), 0)",
    lambda h: (
        f"torch.index_fill({(x := h.floats(1))}, {(d := h.dim(x))}, "
        f"{ids(h, h[x].shape[d], (2,))}, {h.number()})"
    ),
    lambda h: f"torch.masked_select({(x := h.floats())}, {h.like(x, torch.bool)})",
    lambda h: f"torch.masked_fill({(x := h.any())}, {h.like(x, torch.bool)}, 1)",
    lambda h: f"torch.masked_scatter({(x := h.floats())}, {x} > 0.3, {h.same(x)})",
    lambda h: f"torch.select_scatter({(x := h.floats(1))}, {x}.select(0, 0) * 0.5, 0, 0)",
    lambda h: f"torch.slice_scatter({(x := h.floats(1))}, {x}[:1] * 0.5, 0, 0, 1)",
    lambda h: f"torch.diagonal_scatter({(x := h.floats(2, 2))}, {x}.diagonal() * 0.5)",
)


# -- writes --------------------------------------------------------------------------------------


_UNARY = "sin_ cos_ tanh_ sigmoid_ neg_ abs_ relu_ zero_ square_ floor_"


def _float(t: torch.Tensor) -> bool:
    return t.is_floating_point()


def has_floats(t: torch.Tensor) -> bool:
    return t.is_floating_point() and t.dim() > 0


def _call(make: Row) -> Row:
    """A method call on something writable: `make` gives what follows its name."""

    def row(h: Hand) -> Draft:
        x = h.writable(_float)
        h.chosen = x
        return h.write(x, f"{x}.{make(h)}")

    return row


def _indexed(make: Row) -> Row:
    """An assignment to `x[...]`."""

    def row(h: Hand) -> Draft:
        x = h.writable(lambda t: t.dim() > 0 and (_float(t) or t.dtype in INTS))
        h.chosen = x
        return h.write(x, f"{x}[{index_of(h, x)}]{make(h)}")

    return row


def _value_at_index(h: Hand) -> Draft:
    """A tensor into `x[...]`: of its shape, or one that broadcasts to it."""
    x = h.writable(has_floats)
    index = index_of(h, x)
    taken = eval(f"x[{index}]", {"x": h[x]})
    value = h.new(taken.shape if h.flag() else (), h.dtype(WIDE))
    return h.write(x, f"{x}[{index}] = {value}")


def _ids_at_index(h: Hand) -> Draft:
    x = h.writable(has_floats)
    index = ids(h, h[x].shape[0], (h.size(True),))
    return h.write(x, f"{x}[{index}] {h.pick(('=', '*='))} {h.number()}")


def _along(name: str, *more: str) -> Row:
    def row(h: Hand) -> Draft:
        x = h.writable(has_floats)
        dim = h.dim(x)
        shape = list(h[x].shape)
        shape[dim] = 2
        words = [str(dim), ids(h, h[x].shape[dim], tuple(shape) if "scatter" in name else (2,))]
        words += [str(h.number())]
        return h.write(x, f"{x}.{name}({', '.join((*words, *more))})")

    return row


def _reshaped(h: Hand) -> Draft:
    """The in-place views, which change a tensor's own shape."""
    x = h.writable(lambda t: t.dim() > 1)
    how = h.pick(("t_()", "transpose_(0, 1)", "unsqueeze_(0)", "squeeze_()", "swapaxes_(0, -1)"))
    return h.write(x, f"{x}.{how}")


def _out(h: Hand) -> Draft:
    """An op that writes to `out=` of the right shape."""
    x = h.tensor(WIDE, (1, 2))
    code = h.pick(
        (
            f"torch.sin({x}.detach(), out=",
            f"torch.add({x}.detach(), 0.5, out=",
            f"torch.cumsum({x}.detach(), 0, out=",
            f"torch.mul({x}.detach(), {h.same(x)}.detach(), out=",
        )
    )
    shape, dtype = h[x].shape, h[x].dtype

    def fits(t: torch.Tensor) -> bool:
        return t.shape == shape and t.dtype == dtype and not t.requires_grad

    out = h.writable(fits) if h.names(fits) else h.new(shape, dtype, grad=False)
    return h.write(out, f"{code}{out})")


def _deepcopy(h: Hand) -> str:
    x = h.tensor(None, (1, 3), where=lambda t: t.is_leaf and not t.requires_grad)
    views = h.names(lambda t: t._is_view() and t.is_leaf and not t.requires_grad)
    return f"copy.deepcopy(({x}, {h.pick(views)}))" if views else f"copy.deepcopy({x})"


WRITES: tuple[Row, ...] = (
    *(_call(lambda h, name=name: f"{name}()") for name in _UNARY.split()),  # type: ignore[misc]
    _call(lambda h: f"add_({h.number()})"),
    _call(lambda h: f"mul_({h.number()})"),
    _call(lambda h: f"div_({h.pick((2.0, 0.5))})"),
    _call(lambda h: f"fill_({h.number()})"),
    _call(lambda h: "clamp_(-0.5, 0.75)"),
    _call(lambda h: f"add_({h.same(h.chosen)}, alpha={h.number()})"),
    _call(lambda h: f"add_({h.like(h.chosen)})"),
    _call(lambda h: f"mul_({h.like(h.chosen)})"),
    _call(lambda h: f"copy_({h.like(h.chosen)})"),
    _call(lambda h: f"copy_({h.like(h.chosen, h.dtype(FLOATS))})"),
    _call(lambda h: f"masked_fill_({h.like(h.chosen, torch.bool)}, {h.number()})"),
    _call(lambda h: f"lerp_({h.same(h.chosen)}, 0.25)"),
    _indexed(lambda h: f" = {h.number()}"),
    _indexed(lambda h: f" = {h.number()}"),
    _indexed(lambda h: f" += {h.pick((1, 2))}"),
    _indexed(lambda h: f" *= {h.pick((2, -1))}"),
    _indexed(lambda h: f".fill_({h.pick((1, 2))})"),
    _indexed(lambda h: ".zero_()"),
    _value_at_index,
    _value_at_index,
    _ids_at_index,
    lambda h: h.write((x := h.writable(has_floats)), f"{x}[{x} > 0.3] = {h.number()}"),
    lambda h: h.write((x := h.writable(has_floats)), f"{x}.index_add_({index_add_args(h, x)})"),
    _along("index_fill_"),
    _along("scatter_"),
    lambda h: h.write((x := h.writable(lambda t: t.dim() > 1)), f"{x}.t().mul_(2)"),
    lambda h: h.write((x := h.writable(has_floats)), f"{x}.view(-1)[0:2].mul_({h.number()})"),
    lambda h: h.write((x := h.writable(lambda t: t.dtype in INTS)), f"{x}.add_(1)"),
    _reshaped,
    _out,
    _deepcopy,
)
