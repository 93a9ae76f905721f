"""Reading by index, gathering and scattering."""

from __future__ import annotations

import torch

from shardwise.testing.fuzz.hand import Hand, Row


def index_of(h: Hand, x: str) -> str:
    """What stands between the brackets: slices, numbers, None, an ellipsis."""
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
    shape = list(h[x].shape)
    shape[dim] = h.size(True)
    return f"torch.gather({x}, {dim}, {ids(h, size, tuple(shape))})"


def _index_select(h: Hand) -> str:
    x = h.any(1)
    dim, size = along(h, x)
    return f"torch.index_select({x}, {dim}, {ids(h, size, (h.size(),))})"


def scatter_args(h: Hand, x: str) -> tuple[int, str, str]:
    """A dim, an index with the shape of a source, and the source."""
    dim, size = along(h, x)
    shape = list(h[x].shape)
    shape[dim] = min(h.size(True), 3)
    return dim, ids(h, size, tuple(shape)), h.new(shape, h[x].dtype)


def _scatter(name: str) -> Row:
    def row(h: Hand) -> str:
        x = h.floats(1)
        dim, index, source = scatter_args(h, x)
        if name == "scatter":  # an index that occurs twice has no one result
            return f"torch.scatter({x}, {dim}, {index}, {h.number()})"
        if name == "scatter_reduce":
            reduce = h.pick(("sum", "amax", "amin", "mean", "prod"))
            return f"torch.scatter_reduce({x}, {dim}, {index}, {source}, {reduce!r})"
        return f"torch.{name}({x}, {dim}, {index}, {source})"

    return row


def index_add_args(h: Hand, x: str) -> str:
    dim, size = along(h, x)
    count = h.size(True)
    shape = list(h[x].shape)
    shape[dim] = count
    return f"{dim}, {ids(h, size, (count,))}, {h.new(shape, h[x].dtype)}"


def _index_copy(h: Hand) -> str:
    x = h.floats(1)
    dim, size = along(h, x)
    shape = list(h[x].shape)
    shape[dim] = 1
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
    lambda h: f"torch.masked_scatter({(x := h.floats())}, {x} > 0.3, {h.like(x, exact=True)})",
    lambda h: f"torch.select_scatter({(x := h.floats(1))}, {x}.select(0, 0) * 0.5, 0, 0)",
    lambda h: f"torch.slice_scatter({(x := h.floats(1))}, {x}[:1] * 0.5, 0, 0, 1)",
    lambda h: f"torch.diagonal_scatter({(x := h.floats(2, 2))}, {x}.diagonal() * 0.5)",
)
