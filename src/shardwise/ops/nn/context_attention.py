"""Attention over a sequence that is sharded along a mesh axis.

There are two methods with the same result; the one that sends less is chosen:

- *ring*: every rank keeps its queries, except those that balance the work (Note [Balanced
  queries]), and gets the keys and values of the others round by round. The next round is sent while
  one is computed. Backward sends keys and values again, and their gradients back.
- *heads*: an all-to-all gives each rank the whole sequence for some of the heads, another brings
  the results back. Backward sends gradients through the same two.

Everything here works on local tensors, (batch, heads, positions, width).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.untraced import UntracedFunction, differentiated_once, without_autocast
from shardwise.errors import LayoutError
from shardwise.ops.nn.context_tiles import (
    AttentionKernel,
    Range,
    RowBytes,
    Schedule,
    add_tile,
    heads_s,
    length,
    repeated,
    ring_s,
    summed,
    tiles,
)
from shardwise.simulation.ranks import each_rank, numbers_per_rank, part_per_rank, present, sized

Parts = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """The ranks along one axis of a mesh, which share a sequence."""

    grid: Grid
    axis: int

    @property
    def size(self) -> int:
        return self.grid.shape[self.axis]

    @property
    def name(self) -> str:
        return self.grid.axis_name(self.axis)

    def map(self, fn: Callable[..., Any], *tensors: torch.Tensor, shared: bool = True) -> Any:
        """`fn(coordinate along the axis, *tensors)` on every rank present.

        Results that are written to later must not be `shared` by the ranks of other axes, which
        would all write to the same memory.
        """

        def here(coordinate: Coordinate, *parts: torch.Tensor) -> Any:
            return fn(coordinate[self.axis], *parts)

        return each_rank(self.grid, here, *tensors, axes=(self.axis,) if shared else None)

    def start(
        self,
        outgoing: Callable[..., Sequence[Parts]],
        expected: Callable[..., Sequence[int]],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Start sending `outgoing(me, *tensors)[i]` to coordinate i, flattened to one tensor.

        `expected(me, *tensors)[i]` is the number of elements that come from coordinate i.
        """

        def pack(me: int, *parts: torch.Tensor) -> torch.Tensor:
            flat = [x.reshape(-1) for each in outgoing(me, *parts) for x in each]
            return torch.cat(flat) if flat else parts[0].new_empty(0)

        held = zip(*(part_per_rank(self.grid, x) for x in tensors), strict=True)
        sent, received = [], []
        for rank, parts in zip(present(self.grid), held, strict=True):
            me = self.grid.coordinates[rank][self.axis]
            sent.append([sum(x.numel() for x in each) for each in outgoing(me, *parts)])
            received.append(list(expected(me, *parts)))
        num_sent, num_received = (numbers_per_rank(self.grid, rows) for rows in (sent, received))
        flat = self.map(pack, *tensors)
        return collectives.start_all_to_all_uneven(
            flat, num_sent, num_received, self.grid, self.axis
        )


@dataclass(frozen=True, slots=True)
class _Attend:
    """What one rank computes: the tiles of its work and a range of keys."""

    work: tuple[Range, ...]
    causal: bool
    kernel: AttentionKernel

    def _tiles(self, keys: Range, mask: Any, q: Any) -> Any:
        """Slices of the local queries, of the present keys and of the mask; and whether causal."""
        if not q.shape[0] or not q.shape[1]:  # torch's kernels divide by the number of heads
            return
        row = 0
        for held in self.work:
            for tile in tiles(held, keys, self.causal):
                first = row - held[0]
                yield (
                    slice(first + tile.queries[0], first + tile.queries[1]),
                    slice(tile.keys[0] - keys[0], tile.keys[1] - keys[0]),
                    None if mask is None else _cut_mask(mask, tile.queries, tile.keys),
                    tile.causal,
                )
            row += length(held)

    def forward(
        self, keys: Range, q: Any, k: Any, v: Any, mask: Any, out: Any, log_sum: Any
    ) -> None:
        """Add what the queries get from these keys to `out` and `log_sum`."""
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        for rows, columns, hidden, causal in self._tiles(keys, mask, q):
            found = self.kernel.forward(
                q[:, :, rows], k[:, :, columns], v[:, :, columns], hidden, causal
            )
            add_tile(out[:, :, rows], log_sum[:, :, rows], *found)

    def backward(
        self, keys: Range, grad: Any, q: Any, k: Any, v: Any, mask: Any, found: Any, grad_q: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add to `grad_q`; returns the terms of the gradients of these keys and values."""
        out, log_sum = found
        num_heads = k.shape[1]
        k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
        grads = [torch.zeros_like(x, dtype=log_sum.dtype) for x in (k, v)]
        for rows, columns, hidden, causal in self._tiles(keys, mask, q):
            for_q, for_k, for_v = self.kernel.backward(
                grad[:, :, rows],
                q[:, :, rows],
                k[:, :, columns],
                v[:, :, columns],
                out[:, :, rows],
                log_sum[:, :, rows],
                hidden,
                causal,
            )
            grad_q[:, :, rows].add_(for_q)
            grads[0][:, :, columns].add_(for_k)
            grads[1][:, :, columns].add_(for_v)
        return summed(grads[0], num_heads), summed(grads[1], num_heads)


def _cut_mask(mask: torch.Tensor, queries: Range, keys: Range) -> torch.Tensor:
    """A tile's part of a mask; a size of 1 is broadcast."""
    for dim, (first, end) in ((-2, queries), (-1, keys)):
        if mask.shape[dim] != 1:
            mask = mask.narrow(dim, first, end - first)
    return mask.expand(*mask.shape[:-2], length(queries), length(keys))


def _start_values(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=wide)


def _final(out: torch.Tensor, log_sum: torch.Tensor, dtype: torch.dtype) -> Parts:
    """A query that attends to nothing has the result 0; its log-sum must not be infinite."""
    return out.to(dtype), log_sum.masked_fill(log_sum == -torch.inf, 0.0)


@dataclass(frozen=True, slots=True)
class Ring:
    """Keys and values travel; see the top of this file."""

    group: AxisGroup
    schedule: Schedule
    kernel: AttentionKernel

    def _attend(self, me: int) -> _Attend:
        return _Attend(self.schedule.work[me], self.schedule.causal, self.kernel)

    # -- queries to workers and back ---------------------------------------------------------

    def to_workers(self, x: torch.Tensor) -> torch.Tensor:
        """Rows of queries, sent from their owners to their workers."""
        held = [(own,) for own in self.schedule.queries]
        return self._exchanged(x, self.schedule.handed, held, self.schedule.work)

    def to_owners(self, x: torch.Tensor) -> torch.Tensor:
        """The inverse of `to_workers`."""
        handed, ranks = self.schedule.handed, range(self.group.size)
        owned = [sorted(r for worker in ranks for r in handed(me, worker)) for me in ranks]
        return self._exchanged(x, lambda me, other: handed(other, me), self.schedule.work, owned)

    def _exchanged(
        self,
        x: torch.Tensor,
        sent: Callable[[int, int], Sequence[Range]],
        held: Sequence[Sequence[Range]],
        wanted: Sequence[Sequence[Range]],
    ) -> torch.Tensor:
        """The rows of `x` that each rank wants, from those that it held or gets from others.

        `sent(me, other)` are the ranges that rank `me` sends to `other`.
        """
        if not self.schedule.is_moved:
            return x
        num = self.group.size

        def outgoing(me: int, x: torch.Tensor) -> Sequence[Parts]:
            return [
                [] if other == me else [_rows(x, held[me], r) for r in sent(me, other)]
                for other in range(num)
            ]

        def expected(me: int, x: torch.Tensor) -> list[int]:
            return [
                0 if other == me else _row_size(x) * sum(map(length, sent(other, me)))
                for other in range(num)
            ]

        def assemble(me: int, x: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
            found: dict[Range, torch.Tensor] = {}
            at = 0
            for other in range(num):
                for r in () if other == me else sent(other, me):
                    found[r], at = _unpacked(flat, at, x, length(r))
            rows = [found[r] if r in found else _rows(x, held[me], r) for r in wanted[me]]
            return torch.cat(rows, 2) if rows else x[:, :, :0]

        flat = collectives.finished(self.group.start(outgoing, expected, x))
        return self.group.map(assemble, x, flat)

    # -- rounds of keys and values -----------------------------------------------------------

    def _arriving(self, me: int, number: int) -> Range:
        """The keys that arrive in a round."""
        return self.schedule.needed(me, (me - number) % self.group.size)

    def _leaving(self, me: int, number: int) -> Range:
        """The keys of this rank that leave in a round, and whose gradients come back."""
        return self.schedule.needed((me + number) % self.group.size, me)

    def _send_pairs(self, number: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def sent(me: int, k: torch.Tensor, v: torch.Tensor) -> Parts:
            return [x[:, :, : length(self._leaving(me, number))] for x in (k, v)]

        def num_received(me: int, k: torch.Tensor, v: torch.Tensor) -> int:
            return length(self._arriving(me, number)) * (_row_size(k) + _row_size(v))

        return self._shift(number, sent, num_received, k, v)

    def _send_grads(self, number: int, flat: torch.Tensor, k: Any, v: Any) -> torch.Tensor:
        def num_received(me: int, _: Any, k: torch.Tensor, v: torch.Tensor) -> int:
            return length(self._leaving(me, number)) * (_row_size(k) + _row_size(v))

        return self._shift(-number, lambda _, flat, *__: [flat], num_received, flat, k, v)

    def _shift(
        self,
        by: int,
        sent: Callable[..., Parts],
        num_received: Callable[..., int],
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        """Start sending `sent(me, *tensors)` to the rank that is `by` places further on."""
        num = self.group.size

        def outgoing(me: int, *parts: torch.Tensor) -> Sequence[Parts]:
            lists: list[Parts] = [[] for _ in range(num)]
            lists[(me + by) % num] = sent(me, *parts)
            return lists

        def expected(me: int, *parts: torch.Tensor) -> list[int]:
            sizes = [0] * num
            sizes[(me - by) % num] = num_received(me, *parts)
            return sizes

        return self.group.start(outgoing, expected, *tensors)

    def _arrived(self, me: int, number: int, flat: Any, k: Any, v: Any) -> tuple[Range, Any, Any]:
        """The keys and values of a round; in round 0 this rank's own."""
        keys = self._arriving(me, number)
        size = length(keys)
        if not number:
            return keys, k[:, :, :size], v[:, :, :size]
        there, at = _unpacked(flat, 0, k, size)
        return keys, there, _unpacked(flat, at, v, size)[0]

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any]:
        """The result, and what backward needs besides the operands."""
        masks = [] if mask is None else [mask]
        work = self.to_workers(q)
        found = self.group.map(lambda _, q, v: _start_values(q, v), work, v, shared=False)
        arrived = k
        for number in range(self.group.size):
            last = number + 1 == self.group.size
            ahead = None if last else self._send_pairs(number + 1, k, v)

            def attend(me: int, q: Any, k: Any, v: Any, flat: Any, *rest: Any) -> Any:
                keys, here_k, here_v = self._arrived(me, number, flat, k, v)  # noqa: B023
                out, log_sum, *hidden = rest
                mask = hidden[0] if hidden else None
                self._attend(me).forward(keys, q, here_k, here_v, mask, out, log_sum)
                return out, log_sum

            found = self.group.map(attend, work, k, v, arrived, *found, *masks)
            arrived = k if ahead is None else collectives.finished(ahead)
        out, log_sum = self.group.map(
            lambda _, q, out, log_sum: tuple(_final(out, log_sum, q.dtype)), work, *found
        )
        return self.to_owners(out), (work, out, log_sum)

    def backward(self, grad: Any, k: Any, v: Any, mask: Any, kept: Any) -> tuple[Any, Any, Any]:
        masks = [] if mask is None else [mask]
        grad = self.to_workers(grad)
        grad_q = self.group.map(
            lambda _, q, s: torch.zeros_like(q, dtype=s.dtype), kept[0], kept[2], shared=False
        )
        grads: Any = ()
        arrived, returning = k, None
        for number in range(self.group.size):
            last = number + 1 == self.group.size
            ahead = None if last else self._send_pairs(number + 1, k, v)

            def attend(me: int, grad: Any, k: Any, v: Any, flat: Any, *rest: Any) -> Any:
                keys, here_k, here_v = self._arrived(me, number, flat, k, v)  # noqa: B023
                q, out, log_sum, grad_q, *hidden = rest
                mask = hidden[0] if hidden else None
                found = (out, log_sum)
                terms = self._attend(me).backward(
                    keys, grad, q, here_k, here_v, mask, found, grad_q
                )
                if not number:  # noqa: B023
                    return grad_q, *(_padded(t, x) for t, x in zip(terms, (k, v), strict=True))
                return grad_q, torch.cat([t.to(k.dtype).reshape(-1) for t in terms])

            grad_q, *terms = self.group.map(attend, grad, k, v, arrived, *kept, grad_q, *masks)
            if returning is not None:
                grads = self._added(grads, number - 1, collectives.finished(returning))
            if number:
                returning = self._send_grads(number, terms[0], k, v)
            else:
                grads = terms
            arrived = k if ahead is None else collectives.finished(ahead)
        if returning is not None:
            grads = self._added(grads, self.group.size - 1, collectives.finished(returning))
        grad_q = self.to_owners(self.group.map(lambda _, x, q: x.to(q.dtype), grad_q, kept[0]))
        return grad_q, *(self.group.map(lambda _, x, y: x.to(y.dtype), g, k) for g in grads)

    def _added(self, grads: Any, number: int, flat: torch.Tensor) -> Any:
        """The gradients of this rank's keys and values, with those of a round that came back."""

        def add(me: int, grad_k: Any, grad_v: Any, flat: torch.Tensor) -> Any:
            size, at = length(self._leaving(me, number)), 0
            for grad in (grad_k, grad_v):
                terms, at = _unpacked(flat, at, grad, size)
                grad[:, :, :size].add_(terms)
            return grad_k, grad_v

        return self.group.map(add, *grads, flat)


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads travel; see the top of this file.

    In the methods below, `rows` are the positions of each rank: those of the queries or keys.
    """

    group: AxisGroup
    schedule: Schedule
    kernel: AttentionKernel

    def _heads(self, rank: int, count: int) -> Range:
        """The heads of a rank out of `count`; ranks share a head where there are too few."""
        first = rank * count // self.group.size
        return first, max(first + 1, (rank + 1) * count // self.group.size)

    def _some_heads(self, rows: Sequence[tuple[Range, ...]], *tensors: torch.Tensor) -> Any:
        """From all heads of this rank's positions to this rank's heads of all positions."""
        others = range(self.group.size)

        def outgoing(me: int, *parts: torch.Tensor) -> Sequence[Parts]:
            return [
                [x[:, slice(*self._heads(other, x.shape[1]))] for x in parts] for other in others
            ]

        def shapes(me: int, other: int, parts: Parts) -> list[tuple[int, ...]]:
            return [
                (x.shape[0], length(self._heads(me, x.shape[1])), length(held[other]), x.shape[3])
                for x, held in zip(parts, rows, strict=True)
            ]

        def expected(me: int, *parts: torch.Tensor) -> list[int]:
            return [sum(map(math.prod, shapes(me, other, parts))) for other in others]

        def assemble(me: int, flat: torch.Tensor, *parts: torch.Tensor) -> Any:
            sizes = [math.prod(s) for other in others for s in shapes(me, other, parts)]
            wanted = [s for other in others for s in shapes(me, other, parts)]
            pieces = [x.view(s) for x, s in zip(flat.split(sizes), wanted, strict=True)]
            return tuple(torch.cat(pieces[i :: len(parts)], 2) for i in range(len(parts)))

        flat = collectives.finished(self.group.start(outgoing, expected, *tensors))
        return self.group.map(assemble, flat, *tensors)

    def _some_positions(
        self, rows: Sequence[tuple[Range, ...]], like: Parts, *tensors: torch.Tensor
    ) -> Any:
        """The inverse; if several ranks return results for a head, they are added.

        `like` are tensors with as many heads as the results.
        """
        others, num = range(self.group.size), len(tensors)

        def outgoing(me: int, *parts: torch.Tensor) -> Sequence[Parts]:
            given = list(zip(parts[:num], rows, strict=True))
            return [[x[:, :, slice(*held[other])] for x, held in given] for other in others]

        def shapes(me: int, other: int, parts: Parts) -> list[tuple[int, ...]]:
            return [
                (x.shape[0], length(self._heads(other, y.shape[1])), length(held[me]), x.shape[3])
                for x, y, held in zip(parts[:num], parts[num:], rows, strict=True)
            ]

        def expected(me: int, *parts: torch.Tensor) -> list[int]:
            return [sum(map(math.prod, shapes(me, other, parts))) for other in others]

        def assemble(me: int, flat: torch.Tensor, *parts: torch.Tensor) -> Any:
            made = [
                flat.new_zeros((x.shape[0], y.shape[1], length(held[me]), x.shape[3]))
                for x, y, held in zip(parts[:num], parts[num:], rows, strict=True)
            ]
            wanted = [(other, s) for other in others for s in shapes(me, other, parts)]
            pieces = flat.split([math.prod(s) for _, s in wanted])
            for number, ((other, shape), piece) in enumerate(zip(wanted, pieces, strict=True)):
                whole = made[number % num]
                whole[:, slice(*self._heads(other, whole.shape[1]))].add_(piece.view(shape))
            return tuple(made)

        flat = collectives.finished(self.group.start(outgoing, expected, *tensors, *like))
        return self.group.map(assemble, flat, *tensors, *like)

    @property
    def _whole(self) -> tuple[_Attend, Range]:
        ends = self.schedule.queries[-1][1], self.schedule.keys[-1][1]
        return _Attend(((0, ends[0]),), self.schedule.causal, self.kernel), (0, ends[1])

    def forward(self, q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any]:
        """The result, and what backward needs."""
        masks = [] if mask is None else [mask]
        rows = self.schedule.queries, self.schedule.keys
        all_rows = self._some_heads((rows[0], rows[1], rows[1]), q, k, v)
        attend, keys = self._whole

        def here(me: int, q: Any, k: Any, v: Any, *hidden: Any) -> Any:
            mask = _mask_of_heads(hidden[0], self._heads, me) if hidden else None
            out, log_sum = _start_values(q, v)
            attend.forward(keys, q, k, v, mask, out, log_sum)
            return tuple(_final(out, log_sum, q.dtype))

        out, log_sum = self.group.map(here, *all_rows, *masks)
        (result,) = self._some_positions((rows[0],), (q,), out)
        # Without rows: they tell backward the numbers of heads.
        counts = [self.group.map(lambda _, x: x[:, :, :0].clone(), x) for x in (q, k)]
        return result, (*all_rows, out, log_sum, *counts)

    def backward(self, grad: Any, k: Any, v: Any, mask: Any, kept: Any) -> tuple[Any, Any, Any]:
        masks = [] if mask is None else [mask]
        rows = self.schedule.queries, self.schedule.keys
        all_q, all_k, all_v, out, log_sum, like_q, like_k = kept
        (grad,) = self._some_heads((rows[0],), grad)
        attend, keys = self._whole

        def here(me: int, *parts: Any) -> Any:
            grad, q, k, v, out, log_sum, *hidden = parts
            mask = _mask_of_heads(hidden[0], self._heads, me) if hidden else None
            grad_q = torch.zeros_like(q, dtype=log_sum.dtype)
            found = attend.backward(keys, grad, q, k, v, mask, (out, log_sum), grad_q)
            return tuple(x.to(q.dtype) for x in (grad_q, *found))

        grads = self.group.map(here, grad, all_q, all_k, all_v, out, log_sum, *masks)
        return self._some_positions((rows[0], rows[1], rows[1]), (like_q, like_k, like_k), *grads)


def _mask_of_heads(mask: torch.Tensor, heads: Callable[[int, int], Range], me: int) -> torch.Tensor:
    if mask.dim() < 4 or mask.shape[1] == 1:
        return mask
    return mask[:, slice(*heads(me, mask.shape[1]))]


def _rows(x: torch.Tensor, held: Sequence[Range], wanted: Range) -> torch.Tensor:
    """The rows of `x` at some positions; `x` has those of the ranges `held`, one by one."""
    at = 0
    for first, end in held:
        if first <= wanted[0] and wanted[1] <= end:
            return x[:, :, at + wanted[0] - first : at + wanted[1] - first]
        at += end - first
    raise AssertionError(f"{wanted} is in none of the ranges {held}")


def _row_size(x: torch.Tensor) -> int:
    """The number of elements of one position."""
    return x.shape[0] * x.shape[1] * x.shape[3]


def _unpacked(
    flat: torch.Tensor, at: int, like: torch.Tensor, num_rows: int
) -> tuple[torch.Tensor, int]:
    """`num_rows` positions of a tensor like `like`, and where the next begin."""
    end = at + num_rows * _row_size(like)
    return flat[at:end].view(*like.shape[:2], num_rows, like.shape[3]), end


def _padded(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`x`, the first positions of a tensor like `like`, with zeros for the others."""
    missing = like.shape[2] - x.shape[2]
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def choose(
    group: AxisGroup,
    schedule: Schedule,
    kernel: AttentionKernel,
    q: Any,
    k: Any,
    v: Any,
    method: str | None,
) -> Ring | Heads:
    """The method that sends less; `method` forces one."""
    held = list(zip(*(part_per_rank(group.grid, x) for x in (q, k, v)), strict=True))
    fits = all(_heads_fit(a.shape[1], b.shape[1], group.size) for a, b, _ in held)
    if method == "heads" and not fits:
        a, b, _ = held[0]
        raise LayoutError(
            f"Attention by heads over axis {group.name!r} needs a number of "
            f"query heads that its {group.size} ranks divide, and of key heads that divides or is "
            f"divided by it; each rank has {a.shape[1]} and {b.shape[1]}. Use method='ring', or "
            "None to choose."
        )
    if method == "ring" or not fits:
        return Ring(group, schedule, kernel)
    a, b, c = held[0]
    itemsize = a.element_size()
    row = RowBytes(
        _row_size(a) * itemsize,
        a.shape[0] * a.shape[1] * c.shape[3] * itemsize,
        (_row_size(b) + _row_size(c)) * itemsize,
    )
    repeats = max(1.0, group.size / max(1, b.shape[1]))
    if method == "heads" or heads_s(schedule, row, repeats) <= ring_s(schedule, row):
        return Heads(group, schedule, kernel)
    return Ring(group, schedule, kernel)


def _heads_fit(num_queries: int, num_keys: int, num_ranks: int) -> bool:
    return num_queries % num_ranks == 0 and (num_keys % num_ranks == 0 or num_ranks % num_keys == 0)


class ContextAttention(UntracedFunction):
    """Attention of local queries, keys and values of one sequence.

    The second result is empty: saved for backward, it tells a gradient with which nothing else is
    saved that it depends on the operands.
    """

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, mask: Any, way: Ring | Heads) -> Any:
        out, kept = without_autocast(way.forward)(q, k, v, mask)
        ctx.way = way
        pairs = (k, v) if isinstance(way, Ring) else (None, None)
        history = torch.empty(0, dtype=q.dtype, device=q.device)
        ctx.save_for_backward(*pairs, mask, *kept, history)
        return sized(out), history

    @staticmethod
    @differentiated_once("attention of a split sequence")
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        k, v, mask, *kept, _ = ctx.saved_tensors
        with because("scaled_dot_product_attention", implicit=False):
            grads = without_autocast(ctx.way.backward)(grad, k, v, mask, kept)
        return *map(sized, grads), None, None
