"""Messages of ids: what a rank sends to each owner of rows, and what an owner makes of it.

Note [Messages]
A rank sends one message of integers to each other rank. It holds, for all legs to that rank (a leg
is a `FeatureRoute`: one feature's ids to one shard), in the order of legs:

    the lengths of the bags | the ids | the weights, as bits, where there are any

Ids count from the first row of the receiver's stack. Where the rows of a table are split, each
owner gets only the ids of its rows, and lengths that count those. Unpooled lookups send no lengths:
one row comes back for each id. The integers are int32 unless a stack has 2³¹ rows or more.

Note [Rows instead of sums]
Each owner of a table that is split by rows returns a partial sum for every bag, whether it has rows
of the bag or not. Where bags are short, that is more than one row for each id. Then owners get ids
without lengths and weights, return their rows, and the requesting rank sums them; it sends back the
gradient of each row. Ranks decide this for each group of tables alike, from the numbers of ids and
bags of all ranks, which travel with the counts.

Note [Repeated ids]
Where rows come back instead of sums, one is enough for all ids of a rank that ask for it: the rank
sends each of them once, uses the row wherever it occurs, and sends back the sum of its gradients.
Owners need not know. With sums, a rank looks for repeated ids only if its bags are short enough
that rows may be fewer (`SHORT_BAGS`); the number that is left takes part in the decision. Unpooled
lookups leave repeated ids out of the batch itself, where at least a tenth of them repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.lookup.backends.backend import Runs
from shardwise.lookup.exchange import FeatureBags
from shardwise.lookup.ids import (
    counted,
    distinct,
    divided,
    places_of_runs,
    repeated,
    spread,
    stable_order,
)
from shardwise.lookup.routing import LegBlock, Route, RowGroup, rows_are_fewer

#: Ids per bag and owner, up to which a rank looks for those that repeat.
SHORT_BAGS = 2
#: Flags of a rank's note: it has weights of ids, they require grad, its backward needs all ranks.
WEIGHTED, WEIGHTS_TRAIN, NEEDS_BACKWARD = 1, 2, 4


class SplitIds:
    """The ids of a row group's features, in the order of owners."""

    def __init__(self, route: Route, group: RowGroup, parts: _Parts) -> None:
        values = torch.cat(group.of_features(parts.ids)).to(route.row_dtype)
        num_ids = parts.num_ids[group.features]
        num = values.shape[0]
        num_owners = len(group.owners)
        small = torch.uint8 if num_owners <= 256 else torch.int16
        if group.intervals is not None:
            owners = group.intervals.owners(values, num_ids, small)
        elif (group.rows_per_shard == group.rows_per_shard[0]).all():
            owners = divided(values, int(group.rows_per_shard[0])).to(small)
        else:
            per_shard = spread(torch.from_numpy(group.rows_per_shard), num_ids, num, values.device)
            owners = torch.div(values, per_shard.to(values.dtype), rounding_mode="floor").to(small)
        #: The position of each id among those of the group, as the batch has them.
        self.order = stable_order(owners)
        bags = parts.num_bags[group.features]
        bag_lengths = torch.cat(group.of_features(parts.lengths))
        self.lengths, self.counts = _per_owner(bag_lengths, bags, owners, num_owners, num)
        shifts = spread(torch.from_numpy(group.shifts.reshape(-1)), self.counts.reshape(-1), num)
        found = values.index_select(0, self.order)
        self.ids = found.to(route.id_dtype).add_(shifts.to(route.id_dtype).to(found.device))
        #: Ids to each owner.
        self.num_ids: list[int] = self.counts.sum(1).tolist()
        #: What sums the rows of a bag, in the order of the batch.
        self.bag_lengths = bag_lengths
        self.bag_weights: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None
        if parts.weights is not None:
            self.bag_weights = torch.cat(group.of_features(parts.weights))
            self.weights = self.bag_weights.index_select(0, self.order)
        #: The ids without those that repeat; see Note [Repeated ids].
        self.once: OnceIds | None = None
        if route.pooled and num < SHORT_BAGS * num_owners * bag_lengths.shape[0]:
            self.once = OnceIds(self)

    def num_sent(self, by_id: bool) -> list[int]:
        """Ids to each owner, where rows or sums come back."""
        return self.once.num_ids if by_id and self.once is not None else self.num_ids


class OnceIds:
    """The ids to each owner, each once and in order."""

    def __init__(self, split: SplitIds) -> None:
        num_owners, num = len(split.num_ids), split.ids.shape[0]
        height = int(split.ids.max()) + 1 if num else 1
        dtype = torch.int32 if num_owners * height < 2**31 else torch.int64
        first = torch.arange(num_owners, dtype=dtype) * height
        keys = spread(first, np.array(split.num_ids), num, split.ids.device)
        found, order, self.starts = distinct(keys.add_(split.ids.to(dtype)))
        edges = torch.searchsorted(found, first.to(found.device)).tolist()
        self.ids = (found % height).to(split.ids.dtype)
        self.num_ids = np.diff([*edges, found.shape[0]]).tolist()
        #: The places of equal ids in the batch, one id after another.
        self.order = split.order.index_select(0, order)

    @property
    def places(self) -> torch.Tensor:
        """For each id of the batch, its place among those that were sent."""
        return places_of_runs(self.order, self.starts)


def _per_owner(
    lengths: torch.Tensor, num_bags: np.ndarray, owners: torch.Tensor, num_owners: int, num_ids: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Per owner, the length of each bag, and how many ids of each feature."""
    num = lengths.shape[0]
    small = torch.int32 if num_owners * num < 2**31 else torch.int64
    key = owners.to(small).mul_(num).add_(repeated(lengths, num_ids, small))
    found = counted(key, num_owners * num).view(num_owners, num)
    edges = np.zeros((num_owners, num + 1), dtype=np.int64)
    np.cumsum(found.cpu().numpy(), axis=1, out=edges[:, 1:])
    ends = np.cumsum([0, *num_bags])
    return found, np.diff(edges[:, ends], axis=1)


class _Parts:
    """The ids, lengths and weights of each feature, as views."""

    def __init__(self, bags: FeatureBags) -> None:
        self.num_ids = bags.ids_to - bags.ids_from
        self.num_bags = bags.num_bags
        self._id_order = _order(bags.ids_from, self.num_ids)
        self.ids = self.of_ids(bags.values)
        order = _order(bags.bags_from, self.num_bags)
        self.lengths = _views(bags.lengths, self.num_bags, order)
        self.weights = None if bags.weights is None else self.of_ids(bags.weights)

    def of_ids(self, values: torch.Tensor, per_id: int = 1) -> Sequence[torch.Tensor]:
        """Per feature, its share of what is given for each id of the batch."""
        return _views(values, self.num_ids * per_id, self._id_order)

    def in_batch(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Numbers and counts of ids of all features, in the order of the batch."""
        order = self._id_order
        return (numbers, self.num_ids) if order is None else (numbers[order], self.num_ids[order])


def _order(starts: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
    """The features in the order of a batch; None if that is the declared one."""
    order = np.lexsort((counts, starts))
    return None if (order == np.arange(len(order))).all() else order


def _views(
    values: torch.Tensor, counts: np.ndarray, order: np.ndarray | None
) -> Sequence[torch.Tensor]:
    if order is None:
        return values.split(counts.tolist())
    parts = values.split(counts[order].tolist())
    return [parts[place] for place in np.argsort(order).tolist()]


@dataclass(slots=True)
class Packed:
    """What one rank sends, and what it needs when rows come back."""

    outgoing: _Outgoing | None
    num_bags: np.ndarray
    num_ids: np.ndarray
    split: list[SplitIds]
    note: torch.Tensor
    #: The ids and bags of each group, and whether weights require grad; all ranks get them.
    told: list[int]
    #: Which groups get ids and return rows; see Note [Rows instead of sums].
    by_id: tuple[bool, ...]

    def messages(self, route: Route) -> tuple[torch.Tensor, list[int]]:
        """The messages to all ranks, one after another, and their lengths. They are made once."""
        outgoing, self.outgoing = self.outgoing, None
        assert outgoing is not None, "a batch is sent once"
        made: dict[int, torch.Tensor] = {}
        per_group = outgoing.groups(self.by_id)
        for rank, like in enumerate(route.like):
            if like not in made:
                made[like] = outgoing.to_rank(rank, per_group)
        pieces = [made[like] for like in route.like]
        return torch.cat(pieces), [piece.shape[0] for piece in pieces]

    def ids_of(self, route: Route, block: LegBlock) -> int:
        """How many ids go to a block."""
        if block.group < 0:
            return int(self.num_ids[block.features].sum())
        num_sent = self.split[block.group].num_sent(self.by_id[block.group])
        return num_sent[route.groups[block.group].owner_at[block.rank]]

    def rows_of(self, route: Route, block: LegBlock) -> int:
        """How many rows come back from a block."""
        if route.pooled and not _is_by_id(block, self.by_id):
            return int(self.num_bags[block.features].sum())
        return self.ids_of(route, block)


def _is_by_id(block: LegBlock, by_id: Sequence[bool]) -> bool:
    return block.group >= 0 and by_id[block.group]


def pack(route: Route, bags: FeatureBags) -> Packed:
    """What one rank sends; see Note [Messages]."""
    parts = _Parts(bags)
    split = [SplitIds(route, group, parts) for group in route.groups]
    told = [int(bags.weights_train)] if split else []
    for group, ids in zip(route.groups, split, strict=True):
        told += [sum(ids.num_sent(True)), int(parts.num_bags[group.features].sum())]
    outgoing = _Outgoing(route, bags, parts, split)
    by_id = (False,) * len(split)
    packed = Packed(outgoing, parts.num_bags, parts.num_ids, split, bags.values, told, by_id)
    packed.note = _notes(route, bags, packed)
    return packed


def groups_by_id(route: Route, told: np.ndarray) -> tuple[bool, ...]:
    """Which groups exchange rows instead of sums, from what all ranks told."""
    if not route.groups:
        return ()
    trained, *counts = told.sum(0).tolist()
    pairs = zip(route.groups, counts[::2], counts[1::2], strict=True)
    return tuple(
        route.pooled and not trained and rows_are_fewer(num_ids, num_bags, len(group.owners))
        for group, num_ids, num_bags in pairs
    )


class _Outgoing:
    """What one rank sends, in the dtype of messages."""

    def __init__(
        self, route: Route, bags: FeatureBags, parts: _Parts, split: Sequence[SplitIds]
    ) -> None:
        self.route, self.parts, self.split = route, parts, split
        self._device, self._dtype = bags.values.device, route.id_dtype
        self._ids: Sequence[torch.Tensor] = ()
        self._lengths: Sequence[torch.Tensor] = ()
        self._weights: Sequence[torch.Tensor] | None = None
        if route.has_whole:
            values = bags.values.to(route.id_dtype, copy=True)
            if route.shifts.any():
                shifts, counts = parts.in_batch(route.shifts)
                added = spread(torch.from_numpy(shifts), counts, values.shape[0], values.device)
                values += added.to(values.dtype)
            self._ids = parts.of_ids(values)
            if route.pooled:
                order = _order(bags.bags_from, parts.num_bags)
                self._lengths = _views(bags.lengths.to(self._dtype), parts.num_bags, order)
            if bags.weights is not None:
                self._weights = parts.of_ids(self._bits(bags.weights), route.weight_ints)

    def _bits(self, weights: torch.Tensor) -> torch.Tensor:
        bits = weights.to(self.route.weight_dtype).contiguous().view(torch.int32)
        return bits.to(self._dtype)

    def _of_group(self, split: SplitIds, by_id: bool) -> list[Sequence[torch.Tensor]]:
        """Per owner: lengths, ids, weights."""
        if by_id:
            ids = split.ids if split.once is None else split.once.ids
            return [(), ids.split(split.num_sent(True)), ()]
        lengths = split.lengths.to(self._dtype).unbind(0)
        weights: Sequence[torch.Tensor] = ()
        if split.weights is not None:
            sizes = [num * self.route.weight_ints for num in split.num_ids]
            weights = self._bits(split.weights).split(sizes)
        return [lengths, split.ids.split(split.num_ids), weights]

    def groups(self, by_id: Sequence[bool]) -> list[list[Sequence[torch.Tensor]]]:
        """What owners get of each group."""
        return [self._of_group(*each) for each in zip(self.split, by_id, strict=True)]

    def to_rank(
        self, rank: int, per_group: Sequence[Sequence[Sequence[torch.Tensor]]]
    ) -> torch.Tensor:
        """The message to a rank."""
        found: list[list[torch.Tensor]] = [[], [], []]
        for block in self.route.blocks[rank]:
            if block.group >= 0:
                at = self.route.groups[block.group].owner_at[rank]
                for kind, per_owner in enumerate(per_group[block.group]):
                    found[kind] += per_owner[at : at + 1]
                continue
            found[0] += block.of_features(self._lengths) if self._lengths else ()
            found[1] += self._shifted(block)
            found[2] += () if self._weights is None else block.of_features(self._weights)
        lengths, ids, weights = found
        pieces = [*(lengths if self.route.pooled else ()), *ids, *weights]
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        return torch.cat(pieces) if pieces else nothing

    def _shifted(self, block: LegBlock) -> Sequence[torch.Tensor]:
        ids = block.of_features(self._ids)
        more = block.shifts - self.route.shifts[block.features]
        if not more.any():
            return ids
        counts = self.parts.num_ids[block.features]
        both = torch.cat(ids)
        return [both + spread(torch.from_numpy(more), counts, both.shape[0], both.device).to(both)]


def _notes(route: Route, bags: FeatureBags, packed: Packed) -> torch.Tensor:
    """Per rank: the bags of each feature, the ids to each of its blocks, and flags.

    Where batches decide between sums and rows, there are ids for both.
    """
    notes = np.zeros((route.num_ranks, route.note_width), dtype=np.int64)
    notes[:, : route.num_features] = packed.num_bags
    for number, rows in enumerate((False, True) if route.chooses else (False,)):
        packed.by_id = (rows,) * len(packed.by_id)
        first = route.num_features + number * route.max_blocks
        for rank, blocks in enumerate(route.blocks):
            counts = [packed.ids_of(route, block) for block in blocks]
            notes[rank, first : first + len(counts)] = counts
    packed.by_id = (False,) * len(packed.by_id)
    notes[:, -1] = (
        WEIGHTED * (bags.weights is not None)
        + WEIGHTS_TRAIN * bags.weights_train
        + NEEDS_BACKWARD * bags.needs_backward
    )
    return torch.from_numpy(notes)


@dataclass(slots=True)
class StackRequest:
    """What one stack has to look up: ids, and the lengths of bags (None for unpooled lookups)."""

    ids: torch.Tensor
    lengths: torch.Tensor | None
    weights: torch.Tensor | None
    #: Rows that each requesting rank gets.
    num_rows: list[int]
    #: Ids of each requesting rank.
    num_ids: list[int]
    #: Which bags look up which table; None for unpooled lookups.
    runs: Runs | None

    @property
    def total_rows(self) -> int:
        return sum(self.num_rows)


def _incoming(
    route: Route, rank: int, notes: torch.Tensor, by_id: Sequence[bool]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per requesting rank and block, integers of lengths, ids and weights, from all notes."""
    numbers, blocks = notes.numpy(), route.blocks[rank]
    ids = numbers[:, route.num_features : route.num_features + len(blocks)].copy()
    lengths = np.zeros_like(ids)
    weights = ids * (numbers[:, -1:] & WEIGHTED) * route.weight_ints
    for place, block in enumerate(blocks):
        if _is_by_id(block, by_id):
            ids[:, place] = numbers[:, route.num_features + route.max_blocks + place]
            weights[:, place] = 0
        elif route.pooled:
            lengths[:, place] = numbers[:, block.features].sum(1)
    return lengths, ids, weights


def message_sizes(route: Route, rank: int, notes: torch.Tensor, by_id: Sequence[bool]) -> list[int]:
    """How many integers arrive from each rank, from the notes of all ranks."""
    return sum(_incoming(route, rank, notes, by_id)).sum(1).tolist()  # type: ignore[union-attr]


def unpack(
    route: Route, rank: int, message: torch.Tensor, notes: torch.Tensor, by_id: Sequence[bool]
) -> dict[int, StackRequest]:
    """The requests to the stacks of a rank, from the messages of all ranks."""
    blocks, num_ranks = route.blocks[rank], notes.shape[0]
    counts = _incoming(route, rank, notes, by_id)
    sizes = np.stack(counts, 1)  # rank, kind, block
    pieces = message.split(sizes.reshape(-1).tolist())
    lengths, ids, weights = (
        [pieces[(r * 3 + kind) * len(blocks) :][: len(blocks)] for r in range(num_ranks)]
        for kind in range(3)
    )
    stacks: dict[int, list[int]] = {}
    for number, block in enumerate(blocks):
        stacks.setdefault(block.stack, []).append(number)
    found = {}
    for k, mine in stacks.items():
        each = [(r, b) for r in range(num_ranks) for b in mine]
        ones = [ids[r][b].new_ones(()).expand(ids[r][b].shape) for r, b in each]
        of_bags = [
            one if _is_by_id(blocks[b], by_id) else lengths[r][b]
            for (r, b), one in zip(each, ones, strict=True)
        ]
        num_ids = counts[1][:, mine].sum(1)
        alone = [_is_by_id(blocks[b], by_id) for b in mine]
        rows = np.where(alone, counts[1][:, mine], counts[0][:, mine]).sum(1)
        found[k] = StackRequest(
            ids=torch.cat([ids[r][b] for r, b in each]),
            lengths=torch.cat(of_bags) if route.pooled else None,
            weights=_weights(route, [(weights[r][b], ids[r][b]) for r, b in each])
            if (notes[:, -1] & WEIGHTED).any()
            else None,
            num_rows=(rows if route.pooled else num_ids).tolist(),
            num_ids=num_ids.tolist(),
            runs=_runs([(blocks[b], alone[i], counts[1][:, b]) for i, b in enumerate(mine)], notes)
            if route.pooled
            else None,
        )
    return found


def _weights(
    route: Route, bits_and_ids: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """The weights of ids; ones where none are given."""
    dtype, size = route.weight_dtype, route.weight_ints
    return torch.cat(
        [
            torch.ones(ids.shape[0], dtype=dtype, device=ids.device)
            if bits.shape[0] != ids.shape[0] * size
            # Wider numbers are only read where their memory is aligned.
            else bits.to(torch.int32, copy=size > 1).view(dtype)
            for bits, ids in bits_and_ids
        ]
    )


def _runs(blocks: Sequence[tuple[LegBlock, bool, np.ndarray]], notes: torch.Tensor) -> Runs:
    """Of blocks, whether each id is a bag there, and how many ids each rank sends.

    Where it is, the tables of the block count as one.
    """
    numbers, num_bags, first_row, num_rows = notes.numpy(), [], [], []
    for block, alone, num_ids in blocks:
        if alone:
            num_bags.append(num_ids[:, None])
            first_row.append(block.first_row[:1])
            num_rows.append(block.first_row[-1:] + block.num_rows[-1:] - block.first_row[:1])
        else:
            num_bags.append(numbers[:, block.features])
            first_row.append(block.first_row)
            num_rows.append(block.num_rows)
    return Runs(np.concatenate(num_bags, 1), np.concatenate(first_row), np.concatenate(num_rows))


def local_requests(route: Route, rank: int, bags: FeatureBags) -> dict[int, StackRequest]:
    """A rank's own requests to replicated tables."""
    if not route.local[rank]:
        return {}
    parts = _Parts(bags)
    found = {}
    for block in route.local_blocks[rank]:
        ids = torch.cat(block.of_features(parts.ids)).to(route.id_dtype)
        counts = parts.num_ids[block.features]
        shifts = spread(torch.from_numpy(block.shifts), counts, ids.shape[0], ids.device)
        lengths = torch.cat(block.of_features(parts.lengths)).to(route.id_dtype)
        weights = None
        if parts.weights is not None:
            weights = torch.cat(block.of_features(parts.weights)).to(route.weight_dtype)
        found[block.stack] = StackRequest(
            ids + shifts.to(ids.dtype),
            lengths if route.pooled else None,
            weights,
            [lengths.shape[0] if route.pooled else ids.shape[0]],
            [ids.shape[0]],
            Runs(parts.num_bags[None, block.features], block.first_row, block.num_rows)
            if route.pooled
            else None,
        )
    return found
