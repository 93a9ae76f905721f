"""Diagonals, windows, complex numbers as pairs, other dtypes: views that change the last dims."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.core.layout import shard_with
from shardwise.core.placements import Shard
from shardwise.core.sizes import lengths
from shardwise.dispatch.rule import Call, Choice, EmptySafe, LocalCall, Rule, Table, table
from shardwise.ops.shape.views import (
    DimSlice,
    Link,
    link_choices,
    reordered_choices,
    unchanged,
    view,
)

aten = torch.ops.aten


def _diagonal_dims(call: Call, ndim: int) -> tuple[int, int]:
    return call.argument("dim1") % ndim, call.argument("dim2") % ndim


def _around_diagonal(call: Call, ndim: int) -> list[int]:
    """The dims that are neither rows nor columns, in the order of the result."""
    whole = _diagonal_dims(call, ndim)
    return [d for d in range(ndim) if d not in whole]


@dataclass(frozen=True, slots=True)
class OwnedDiagonal:
    """The entries of a diagonal in this rank's rows (sign 1) or columns (sign -1)."""

    offset: int
    rows: int
    columns: int
    cut: int
    sign: int

    def __call__(self, coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, *_: Any) -> Any:
        start = layouts[0].box(coordinate)[0][self.cut]
        return aten.diagonal.default(x, self.offset + self.sign * start, self.rows, self.columns)


def _diagonal_choices(call: Call) -> Iterator[Choice]:
    """Each rank keeps the entries in its rows or columns, so a diagonal never communicates."""
    ndim = call.inputs[0].ndim
    around = _around_diagonal(call, ndim)
    yield from reordered_choices(call, [Link(d, i) for i, d in enumerate(around)])
    rows, columns = _diagonal_dims(call, ndim)
    offset, count = call.argument("offset"), call.outputs[0].shape[-1]
    for cut, first, sign in ((rows, max(0, -offset), 1), (columns, max(0, offset), -1)):
        size = call.inputs[0].shape[cut]
        if type(size) is not int or type(count) is not int:
            return
        local = LocalCall(OwnedDiagonal(offset, rows, columns, cut, sign), per_rank=True)
        for sizes in call.splits([(0, cut)]):
            kept = DimSlice(cut, first, 1, count).lengths(lengths(size, call.axis_size, sizes))
            target = shard_with(ndim - 2, kept, count, call.axis_size)
            alone = ((0, rows), (0, columns))
            yield Choice((Shard(cut, sizes),), (target,), local, alone=alone)


def _embedded(call: Call) -> list[Link]:
    return [Link(i, d) for i, d in enumerate(_around_diagonal(call, call.outputs[0].ndim))]


def _windows(call: Call) -> list[Link]:
    ndim = call.inputs[0].ndim
    at = call.argument("dimension") % ndim if ndim else 0
    return [Link(d, d) for d in range(ndim) if d != at]


def _windows_back(call: Call) -> list[Link]:
    """A dim of size 1 is repeated where the output is longer, and stays whole."""
    grad, out = call.inputs[0].shape, call.outputs[0].shape
    at = call.argument("dim") % len(out) if out else 0
    return [Link(d, d) for d in range(len(out)) if d != at and grad[d] == out[d]]


def _but_last(call: Call) -> list[Link]:
    return [Link(d, d) for d in range(call.inputs[0].ndim - 1)]


def _conjugate_choices(call: Call) -> Iterator[Choice]:
    """The conjugate is computed: collectives ignore the lazy conjugate bit."""
    local = LocalCall(torch.conj_physical, copies=True)
    for choice in link_choices(call, unchanged(call)):
        yield replace(choice, local=local)


def _negative_choices(call: Call) -> Iterator[Choice]:
    local = LocalCall(torch.neg, copies=True)
    for choice in link_choices(call, unchanged(call)):
        yield replace(choice, local=local)


def _safe_choices(call: Call, choices: Iterator[Choice]) -> Iterator[Choice]:
    """With no memory of an empty shard, which may begin at an odd place of another tensor's."""
    local = LocalCall(EmptySafe(call.op), per_rank=True)
    for choice in choices:
        yield replace(choice, local=local)


def _pair_choices(call: Call, links: Sequence[Link]) -> Iterator[Choice]:
    yield from _safe_choices(call, link_choices(call, links))


def _bits_choices(call: Call) -> Iterator[Choice]:
    """The same bits as another dtype: a shard of the last dim must hold whole entries."""
    before, after = call.inputs[0], call.outputs[0]
    yield call.replicated()
    for dim in range(before.ndim):
        for sizes in call.splits([(0, dim)]):
            target: Shard | None = Shard(dim, sizes)
            alone: tuple[tuple[int, int], ...] = ()
            if dim == before.ndim - 1 and before.dtype.itemsize != after.dtype.itemsize:
                target, alone = _same_bytes(call, dim, sizes), ((0, dim),)
            if target is not None:
                yield Choice((Shard(dim, sizes),), (target,), alone=alone)


def _same_bytes(call: Call, dim: int, sizes: tuple[int, ...] | None) -> Shard | None:
    """The shard of the output with the same bytes; None where an entry would be split."""
    before, after = call.inputs[0], call.outputs[0]
    if type(before.shape[dim]) is not int:
        return None
    counts = lengths(before.shape[dim], call.axis_size, sizes)
    shard_bytes = [n * before.dtype.itemsize for n in counts]
    if any(n % after.dtype.itemsize for n in shard_bytes):
        return None
    kept = tuple(n // after.dtype.itemsize for n in shard_bytes)
    return shard_with(dim, kept, after.shape[dim], call.axis_size)


RULES: Table = table(
    ((aten.view.dtype,), Rule(lambda call: _safe_choices(call, _bits_choices(call)), "... -> ...")),
    ((aten.diagonal.default,), Rule(_diagonal_choices, "m n ... -> ... k")),
    view(
        aten.diagonal_backward.default,
        links=_embedded,
        text="... [k] -> [m] [n] ...",
        shape="input_sizes",
        choices=link_choices,
    ),
    view(
        aten.diag_embed.default,
        links=_embedded,
        text="... [k] -> [m] [n] ...",
        choices=link_choices,
    ),
    view(aten.unfold.default, links=_windows, text="... [n] -> ... [w] [k]"),
    view(
        aten.unfold_backward.default,
        links=_windows_back,
        text="... [w] [k] -> ... [n]",
        shape="input_sizes",
        choices=link_choices,
    ),
    view(aten.view_as_real.default, links=unchanged, text="... -> ... [2]", choices=link_choices),
    view(
        aten.view_as_complex.default, links=_but_last, text="... [2] -> ...", choices=_pair_choices
    ),
    ((aten._conj.default,), Rule(_conjugate_choices, "... -> ...")),
    ((aten._neg_view.default,), Rule(_negative_choices, "... -> ...")),
)
