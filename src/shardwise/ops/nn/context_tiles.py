"""Tiles of a sharded sequence: which rank computes which, what it costs, and one tile's attention.

Note [Balanced queries]
Each rank holds a range of positions. With a causal mask the last ranges have the most work: rank r
of n has r + 1/2 of the n * n / 2 blocks. So a rank with more work than the mean hands its first
queries, which need the fewest keys, to a rank with less, and gets their results back. The queries
that a rank computes are its `work` ranges. Keys and values then pass from rank to rank, and only
those that a rank's work needs.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from shardwise._torch.functions import fused_sdp_choice
from shardwise.comm.collectives import collective_s, exchange_s

#: The first position, and one past the last.
Range = tuple[int, int]


def length(positions: Range) -> int:
    return positions[1] - positions[0]


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries that attend to keys: to all of them, or causally, with as many keys as queries."""

    queries: Range
    keys: Range
    causal: bool


def tiles(queries: Range, keys: Range, causal: bool) -> Iterator[Tile]:
    """The tiles of the queries and keys in two ranges.

    >>> [(t.queries, t.keys, t.causal) for t in tiles((4, 8), (2, 6), True)]
    [((4, 8), (2, 4), False), ((4, 6), (4, 6), True), ((6, 8), (4, 6), False)]
    """
    (first, end), (low, high) = queries, keys
    if not causal:
        if end > first and high > low:
            yield Tile(queries, keys, False)
        return
    first, high = max(first, low), min(high, end)
    if end <= first or high <= low:
        return
    if low < first:  # before all of these queries
        yield Tile((first, end), (low, min(high, first)), False)
    low = max(low, first)
    if low < high:
        yield Tile((first, high), (low, high), True)
        if high < end:
            yield Tile((high, end), (low, high), False)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The positions that each rank holds, and the queries that it attends for."""

    queries: tuple[Range, ...]
    keys: tuple[Range, ...]
    work: tuple[tuple[Range, ...], ...]
    causal: bool

    @property
    def num_ranks(self) -> int:
        return len(self.queries)

    @property
    def is_moved(self) -> bool:
        """Whether a rank attends for queries of another."""
        return any(work != (held,) for work, held in zip(self.work, self.queries, strict=True))

    def num_pairs(self, rank: int) -> int:
        """The work of a rank: how many pairs of a query and a key."""
        return sum(_num_pairs(each, self.keys[-1][1], self.causal) for each in self.work[rank])

    def handed(self, owner: int, worker: int) -> tuple[Range, ...]:
        """The queries of `owner` that `worker` attends for."""
        low, high = self.queries[owner]
        return tuple(r for r in self.work[worker] if low <= r[0] and r[1] <= high and r[0] < r[1])

    def needed(self, worker: int, owner: int) -> Range:
        """The keys of `owner` that the work of `worker` needs: the first ones."""
        low, high = self.keys[owner]
        if not any(end > first for first, end in self.work[worker]):
            return low, low
        if self.causal:
            high = min(high, max(end for _, end in self.work[worker]))
        return low, max(low, high)

    def sent_rows(self, rank: int) -> tuple[int, int]:
        """How many queries and how many keys `rank` sends to others."""
        others = [other for other in range(self.num_ranks) if other != rank]
        queries = sum(length(r) for other in others for r in self.handed(rank, other))
        return queries, sum(length(self.needed(other, rank)) for other in others)


@functools.lru_cache(maxsize=1024)
def schedule(queries: tuple[Range, ...], keys: tuple[Range, ...], causal: bool) -> Schedule:
    """The schedule of these ranges; balanced if a causal mask makes their work unequal.

    >>> halves = ((0, 8), (8, 16))
    >>> found = schedule(halves, halves, True)
    >>> found.work, [found.num_pairs(rank) for rank in (0, 1)]
    ((((0, 8), (8, 11)), ((11, 16),)), [66, 70])
    """
    plain = Schedule(queries, keys, tuple((held,) for held in queries), causal)
    if not causal or len(queries) == 1:
        return plain
    last = keys[-1][1]
    loads = [_num_pairs(held, last, True) for held in queries]
    mean = sum(loads) / len(loads)
    kept = list(queries)
    given: list[list[Range]] = [[] for _ in queries]
    for rank in sorted(range(len(loads)), key=lambda r: -loads[r]):
        while True:
            taker = min(range(len(loads)), key=lambda r: loads[r])
            amount = min(loads[rank] - mean, mean - loads[taker])
            first, end = kept[rank]
            cut = _cut(first, end, last, amount)
            moved = _num_pairs((first, cut), last, True)
            if cut == first or taker == rank or moved < mean / 200:
                break
            kept[rank] = (cut, end)
            given[taker].append((first, cut))
            loads[rank] -= moved
            loads[taker] += moved
    work = tuple(
        (own, *sorted(others)) if others else (own,)
        for own, others in zip(kept, given, strict=True)
    )
    return Schedule(queries, keys, work, causal)


def _cut(first: int, end: int, num_keys: int, amount: float) -> int:
    """The position up to which the queries from `first` have about `amount` pairs."""

    def num_pairs(cut: int) -> int:
        return _num_pairs((first, cut), num_keys, True)

    return first + bisect.bisect_right(range(first + 1, end + 1), amount, key=num_pairs)


def _num_pairs(queries: Range, num_keys: int, causal: bool) -> int:
    first, end = queries
    if not causal:
        return max(end - first, 0) * num_keys
    rising = min(max(num_keys, first), end)  # queries before this position see all up to their own
    return (rising * (rising + 1) - first * (first + 1)) // 2 + (end - rising) * num_keys


@dataclass(frozen=True, slots=True)
class RowBytes:
    """Bytes of one position: of a query, of its result, and of a key with its value."""

    query: int
    result: int
    pair: int


def ring_s(found: Schedule, row: RowBytes) -> float:
    """Seconds for the exchanges of a schedule in forward."""
    sent = [found.sent_rows(rank) for rank in range(found.num_ranks)]
    rounds = (found.num_ranks - 1) * exchange_s(0)
    handed = max(queries for queries, _ in sent) * (row.query + row.result)
    moving = 2 * exchange_s(0) if found.is_moved else 0.0
    pairs = max(keys for _, keys in sent) * row.pair
    return rounds + moving + exchange_s(handed + pairs) - exchange_s(0)


def heads_s(found: Schedule, row: RowBytes, repeats: float) -> float:
    """Seconds for the all-to-alls over heads; `repeats` is how often each key is sent."""
    num = found.num_ranks
    queries, keys = (max(map(length, held)) for held in (found.queries, found.keys))
    there = queries * row.query + keys * row.pair * repeats
    back = queries * row.result
    return collective_s("all_to_all", num, there) + collective_s("all_to_all", num, back)


def spans(sizes: Sequence[int]) -> tuple[Range, ...]:
    """Consecutive ranges of these sizes."""
    return tuple(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


# -- attention tiles -----------------------------------------------------------------------------
# Attention of one tile of queries and keys on one rank, with its log-sum-exp.
#
# The results of several tiles with the same queries are added in proportion to their sums. Given
# the final result and log-sum, backward of a tile gives the tile's terms of the gradients.


aten = torch.ops.aten

_FLASH, _EFFICIENT = (
    int(SDPBackend.FLASH_ATTENTION.value),
    int(SDPBackend.EFFICIENT_ATTENTION.value),
)
#: The efficient kernel pads the log-sums of its queries to a multiple of this.
_PADDED_TO = 32


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """One of torch's kernels that return log-sum-exps, or "math"; and the scale of the scores."""

    name: str
    scale: float

    def forward(
        self, q: Any, k: Any, v: Any, mask: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and its log-sum-exps; minus infinity for a query that may attend to no key."""
        mask, causal = _one_mask(mask, causal)
        q, k, v = map(_dense_rows, (q, k, v))
        if self.name == "cpu":
            run = aten._scaled_dot_product_flash_attention_for_cpu.default
            out, log_sum = run(q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale)
            if mask is not None:  # the kernel says 0 there
                log_sum = log_sum.masked_fill((mask == -torch.inf).all(-1), -torch.inf)
            return out, log_sum
        if self.name == "flash":
            flash = aten._scaled_dot_product_flash_attention.default
            return flash(q, k, v, 0.0, causal, scale=self.scale)[:2]
        if self.name == "efficient":
            efficient = aten._scaled_dot_product_efficient_attention.default
            out, log_sum = efficient(q, k, v, None, True, 0.0, causal, scale=self.scale)[:2]
            return out, log_sum[..., : q.shape[2]]
        scores = self._scores(q, k, mask, causal)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.unsqueeze(-1)).exp()
        return (weights.nan_to_num(0.0) @ v.to(weights.dtype)).to(v.dtype), log_sum

    def backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, log_sum: Any, mask: Any, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tile's terms of the gradients of `q`, `k` and `v`."""
        mask, causal = _one_mask(mask, causal)
        q, k, v = map(_dense_rows, (q, k, v))
        if self.name == "cpu":
            run = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            return run(grad, q, k, v, out, log_sum, 0.0, causal, attn_mask=mask, scale=self.scale)
        if self.name == "flash":
            nothing = torch.empty(0, dtype=torch.int64, device=q.device)
            sizes = (None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing)
            flash = aten._scaled_dot_product_flash_attention_backward.default
            return flash(grad, q, k, v, out, log_sum.contiguous(), *sizes, scale=self.scale)
        if self.name == "efficient":
            missing = -q.shape[2] % _PADDED_TO
            padded = torch.nn.functional.pad(log_sum, (0, missing), value=torch.inf)
            seed = torch.zeros((), dtype=torch.int64, device=q.device)
            given = (grad, q, k, v, None, out, padded, seed, seed, 0.0, [True] * 3 + [False])
            efficient = aten._scaled_dot_product_efficient_attention_backward.default
            return efficient(*given, causal, scale=self.scale)[:3]
        wide = log_sum.dtype
        weights = (self._scores(q, k, mask, causal) - log_sum.unsqueeze(-1)).exp()
        grad, out, v, q, k = (t.to(wide) for t in (grad, out, v, q, k))
        through = (grad * out).sum(-1, keepdim=True)
        scores = weights * (grad @ v.mT - through) * self.scale
        return scores @ k, scores.mT @ q, weights.mT @ grad

    def _scores(self, q: Any, k: Any, mask: Any, causal: bool) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).mT) * self.scale
        if causal:
            scores = scores.masked_fill(_later_keys(scores), -torch.inf)
        return scores if mask is None else scores + mask


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Fused kernels read the last dim as dense, and torch gives them no other operands."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _one_mask(mask: torch.Tensor | None, causal: bool) -> tuple[torch.Tensor | None, bool]:
    """The mask combined with the causal one, which shows which queries attend to nothing."""
    if mask is None or not causal:
        return mask, causal
    return mask.masked_fill(_later_keys(mask), -torch.inf), False


def _later_keys(like: torch.Tensor) -> torch.Tensor:
    return torch.ones(like.shape[-2:], dtype=torch.bool, device=like.device).triu(1)


def choose_kernel(
    q: torch.Tensor, v: torch.Tensor, num_heads: int, masked: bool, scale: float | None
) -> AttentionKernel:
    """The kernel that torch would take for tensors like these on one device."""
    chosen = 1 / q.shape[-1] ** 0.5 if scale is None else scale
    like = [
        torch.empty((1, num_heads, 64, x.shape[-1]), dtype=x.dtype, device=x.device)
        for x in (q, q, v)
    ]
    # Not asked for a causal mask: whether there is one differs from tile to tile.
    number = fused_sdp_choice(*like, None, 0.0, False, scale=None, enable_gqa=False)
    names: dict[int, str] = {}
    if not masked and not any(x.shape[-1] % 8 for x in (q, v)):  # torch pads other widths
        names = {_FLASH: "flash", _EFFICIENT: "efficient"}
    if q.device.type == "cpu":
        names = {_FLASH: "cpu"}
    return AttentionKernel(names.get(number, "math"), chosen)


def repeated(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Keys or values with as many heads as the queries."""
    if x.shape[1] == num_heads:  # or none, on a rank without heads
        return x
    return x.repeat_interleave(num_heads // x.shape[1], 1)


def summed(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The gradient of `repeated`: the sum over the query heads of each key head."""
    if x.shape[1] == num_heads:
        return x
    return x.unflatten(1, (num_heads, -1)).sum(2)


def add_tile(
    out: torch.Tensor, log_sum: torch.Tensor, tile: torch.Tensor, tile_log_sum: torch.Tensor
) -> None:
    """Add a tile's result to what its queries have so far, in place."""
    total = torch.logaddexp(log_sum, tile_log_sum)
    finite = total.clamp_min(torch.finfo(total.dtype).min)  # so that nothing plus nothing is 0
    before, here = ((part - finite).exp_().unsqueeze(-1) for part in (log_sum, tile_log_sum))
    out.mul_(before).add_(tile * here)
    log_sum.copy_(total)
