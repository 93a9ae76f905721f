"""Routing: which ids go to which rank, and the format of a message of ids.

Note [Messages]
A rank sends one message of integers to each other rank. It holds, for all legs to that rank (a leg
is a `FeatureRoute`: one feature's ids to one shard), ordered by stack and then by feature:

    the lengths of the bags | the ids | the weights, as bits, where there are any

Ids count from the first row of the receiver's stack. Where the rows of a table are split, each
owner gets only the ids of its rows, and lengths that count those. Unpooled lookups send no lengths:
one row comes back for each id. The integers are int32 unless a stack has 2³¹ rows or more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.core.sizes import chunk_length
from shardwise.embedding.backends.backend import Run
from shardwise.embedding.batch import FeatureBags
from shardwise.embedding.tiling import TableShard, TableTiling
from shardwise.lookup.order import counted, divided, repeated, stable_order


@dataclass(frozen=True, slots=True)
class FeatureRoute:
    """A leg: one feature, and one shard of its table that gets its ids."""

    feature: int
    table: int
    shard: TableShard
    #: Whether other shards have other rows of the table.
    split: bool


class Route:
    """What is the same for every batch: the legs to each rank, and those to replicated tables."""

    def __init__(self, tiling: TableTiling, *, pooled: bool) -> None:
        self.tiling, self.pooled = tiling, pooled
        self.num_ranks = tiling.num_ranks
        feature_tables = [t for t, table in enumerate(tiling.tables) for _ in table.features]
        self.num_features = len(feature_tables)
        split = [
            not how.by_columns and not how.replicated and len(shards) > 1
            for how, shards in zip(tiling.splits, tiling.shards, strict=True)
        ]
        legs: list[list[FeatureRoute]] = [[] for _ in range(self.num_ranks)]
        local: list[list[FeatureRoute]] = [[] for _ in range(self.num_ranks)]
        for feature, table in enumerate(feature_tables):
            for shard in tiling.shards[table]:
                target = local if tiling.splits[table].replicated else legs
                target[shard.rank].append(FeatureRoute(feature, table, shard, split[table]))
        order = [sorted(each, key=lambda leg: leg.shard.stack) for each in legs]
        #: Per rank, the legs that lead there from every rank, by stack and feature.
        self.legs: tuple[tuple[FeatureRoute, ...], ...] = tuple(map(tuple, order))
        #: Per rank, the first rank that gets the same message: it has other columns of the tables.
        self.like: tuple[int, ...] = tuple(
            next(i for i, other in enumerate(order) if i == rank or _same_message(other, mine))
            for rank, mine in enumerate(order)
        )
        #: Per rank, the legs to replicated tables, which need no exchange.
        self.local: tuple[tuple[FeatureRoute, ...], ...] = tuple(map(tuple, local))
        self.split_features = [f for f, t in enumerate(feature_tables) if split[t]]
        self.feature_tables = feature_tables
        self.max_stacks = max(map(len, tiling.stacks))
        longest = max((s.num_rows for each in tiling.stacks for s in each), default=0)
        self.id_dtype = torch.int32 if longest < 2**31 else torch.int64
        rows = max((table.num_embeddings for table in tiling.tables), default=0)
        #: The dtype of ids that count the rows of whole tables.
        self.row_dtype = torch.int32 if rows < 2**31 else torch.int64
        #: Columns of the note that a rank gives each other rank; see `_note`.
        self.note_width = self.num_features + self.max_stacks + 1
        #: Whether any id or row ever leaves a rank.
        self.travels = any(self.legs) and self.num_ranks > 1

    def splits_of(self, feature: int) -> tuple[int, list[int]]:
        """Rows per shard, and the shards' ranks, of a table that is split by rows."""
        table = self.feature_tables[feature]
        shards = self.tiling.shards[table]
        rows = self.tiling.tables[table].num_embeddings
        num_holders = sum(1 for size in self.tiling.splits[table].sizes if size)
        block = max(chunk_length(rows, num_holders), shards[0].num_rows)
        return block, [shard.rank for shard in shards]


def _same_message(first: Sequence[FeatureRoute], second: Sequence[FeatureRoute]) -> bool:
    return len(first) == len(second) and not any(
        one.split
        or one.feature != two.feature
        or one.shard.base != two.shard.base
        or one.shard.rows != two.shard.rows
        for one, two in zip(first, second, strict=True)
    )


@dataclass(slots=True)
class Packed:
    """One rank's messages, one after another, and what it needs when rows come back."""

    message: torch.Tensor
    #: Integers to each rank.
    sent: list[int]
    #: Ids to each leg, by rank.
    ids_per_leg: list[list[int]]
    #: For tables split by rows: the position in the feature of each id sent to a rank; filled
    #: where one number or row per id comes back.
    positions: dict[tuple[int, int], torch.Tensor]
    note: torch.Tensor


@dataclass(slots=True)
class _Split:
    """The ids of row-split features, in the order of owners."""

    ids: torch.Tensor
    weights: torch.Tensor | None
    positions: torch.Tensor
    #: (owner, feature) -> its slice of `ids`.
    spans: dict[tuple[int, int], slice]
    #: Per owner, the length of each bag there; None for unpooled lookups.
    lengths: torch.Tensor | None
    #: feature -> its first bag among those of the split features.
    bags_from: dict[int, int]


class _Outgoing:
    """What one rank sends on each leg, whether its table is split by rows or not."""

    def __init__(self, route: Route, bags: FeatureBags) -> None:
        self.bags = bags
        self._split = _split_by_owner(route, bags) if route.split_features else None

    def split_of(self, leg: FeatureRoute) -> _Split | None:
        if not leg.split:
            return None
        assert self._split is not None, "a leg to some of the rows without split features"
        return self._split

    def num_ids(self, leg: FeatureRoute) -> int:
        split = self.split_of(leg)
        if split is None:
            return self.bags.num_ids(leg.feature)
        span = split.spans[leg.shard.rank, leg.feature]
        return span.stop - span.start

    def write_lengths(self, leg: FeatureRoute, target: torch.Tensor) -> int:
        """Write to the start of `target`; returns how much was written."""
        num, split = self.bags.num_bags[leg.feature], self.split_of(leg)
        if split is None:
            target[:num] = self.bags.lengths_of(leg.feature)
        else:
            assert split.lengths is not None, "pooled bags have lengths"
            start = split.bags_from[leg.feature]
            target[:num] = split.lengths[leg.shard.rank, start : start + num]
        return num

    def write_ids(self, leg: FeatureRoute, target: torch.Tensor) -> int:
        num, split = self.num_ids(leg), self.split_of(leg)
        if split is None:
            ids = self.bags.ids_of(leg.feature)
        else:
            ids = split.ids[split.spans[leg.shard.rank, leg.feature]]
        torch.add(ids, leg.shard.base - leg.shard.rows[0], out=target[:num])
        return num

    def write_weights(self, leg: FeatureRoute, target: torch.Tensor) -> int:
        """As the bits of float32."""
        num, split = self.num_ids(leg), self.split_of(leg)
        if split is None:
            weights = self.bags.weights_of(leg.feature)
        else:
            assert split.weights is not None, "weights went missing"
            weights = split.weights[split.spans[leg.shard.rank, leg.feature]]
        target[:num] = weights.to(torch.float32).contiguous().view(torch.int32)
        return num

    def positions(self) -> dict[tuple[int, int], torch.Tensor]:
        if self._split is None:
            return {}
        return {key: self._split.positions[span] for key, span in self._split.spans.items()}


def pack(route: Route, bags: FeatureBags) -> Packed:
    """The messages of one rank; see Note [Messages]."""
    outgoing = _Outgoing(route, bags)
    writers = [outgoing.write_lengths] if route.pooled else []
    writers.append(outgoing.write_ids)
    if bags.weights is not None:
        writers.append(outgoing.write_weights)
    ids_per_leg, sent = [], []
    for legs in route.legs:
        counts = [outgoing.num_ids(leg) for leg in legs]
        ids_per_leg.append(counts)
        num = sum(counts) * (1 if bags.weights is None else 2)
        sent.append(num + (sum(bags.num_bags[leg.feature] for leg in legs) if route.pooled else 0))
    message = torch.empty(sum(sent), dtype=route.id_dtype, device=bags.values.device)
    parts = message.split(sent)
    for rank, legs in enumerate(route.legs):
        if route.like[rank] < rank:
            parts[rank].copy_(parts[route.like[rank]])
            continue
        at = 0
        for write, leg in itertools.product(writers, legs):
            at += write(leg, parts[rank][at:])
    one_per_id = not route.pooled or bags.weights_train
    positions = outgoing.positions() if one_per_id else {}
    return Packed(message, sent, ids_per_leg, positions, _note(route, bags, ids_per_leg))


def _note(route: Route, bags: FeatureBags, ids_per_leg: Sequence[Sequence[int]]) -> torch.Tensor:
    """Per rank: the bags of each feature, the ids to each of its stacks, and a weights flag.

    The flag is 0 without weights, 1 with them, 2 if they require grad.
    """
    weights = 0 if bags.weights is None else 1 + bags.weights_train
    rows = []
    for legs, counts in zip(route.legs, ids_per_leg, strict=True):
        per_stack = [0] * route.max_stacks
        for leg, count in zip(legs, counts, strict=True):
            per_stack[leg.shard.stack] += count
        rows.append([*bags.num_bags, *per_stack, weights])
    return torch.tensor(rows, dtype=torch.int64)


def _split_by_owner(route: Route, bags: FeatureBags) -> _Split:
    """Sort the ids of all row-split features by owner; each bag stays in order."""
    features = route.split_features
    num_ids = sum(bags.num_ids(f) for f in features)
    device = bags.values.device
    small = torch.uint8 if route.num_ranks <= 256 else torch.int16
    owners = torch.empty(num_ids, dtype=small, device=device)
    ids = torch.empty(num_ids, dtype=route.row_dtype, device=device)
    starts = list(itertools.accumulate((bags.num_ids(f) for f in features), initial=0))
    for feature, start, end in zip(features, starts, starts[1:], strict=False):
        block, ranks = route.splits_of(feature)
        ids[start:end] = bags.ids_of(feature)
        place = divided(ids[start:end], block)
        if ranks == list(range(len(ranks))):
            owners[start:end] = place
        else:
            numbers = torch.tensor(ranks, dtype=small, device=device)
            torch.index_select(numbers, 0, place, out=owners[start:end])
    order = stable_order(owners)
    bag_starts = itertools.accumulate((bags.num_bags[f] for f in features), initial=0)
    bags_from = dict(zip(features, bag_starts, strict=False))
    weights = None
    if bags.weights is not None:
        weights = torch.cat([bags.weights_of(f) for f in features]).index_select(0, order)
    lengths, counts = _lengths_per_owner(route, bags, owners, num_ids)
    firsts = itertools.accumulate(itertools.chain.from_iterable(counts), initial=0)
    spans, start = {}, next(firsts)
    for rank, feature in itertools.product(range(route.num_ranks), features):
        end = next(firsts)
        spans[rank, feature] = slice(start, end)
        start = end
    positions = order
    if not route.pooled or bags.weights_train:
        first_of = torch.tensor(starts[:-1], device=device)
        nums = torch.tensor([bags.num_ids(f) for f in features], device=device)
        positions = order - first_of.index_select(0, repeated(nums, num_ids)).index_select(0, order)
    return _Split(ids.index_select(0, order), weights, positions, spans, lengths, bags_from)


def _lengths_per_owner(
    route: Route, bags: FeatureBags, owners: torch.Tensor, num_ids: int
) -> tuple[torch.Tensor | None, list[list[int]]]:
    """Per owner the length of each bag (None unpooled), and how many ids of each feature."""
    features = route.split_features
    if route.pooled:
        sizes = [bags.num_bags[f] for f in features]
        counts_per_bag = torch.cat([bags.lengths_of(f) for f in features])
    else:
        sizes = [1] * len(features)
        counts_per_bag = torch.tensor([bags.num_ids(f) for f in features], device=owners.device)
    num = sum(sizes)
    small = torch.int32 if route.num_ranks * num < 2**31 else torch.int64
    key = owners.to(small).mul_(num).add_(repeated(counts_per_bag, num_ids, small))
    lengths = counted(key, route.num_ranks * num).view(route.num_ranks, num)
    if not route.pooled:
        return None, lengths.tolist()
    counts = [part.sum(1) for part in lengths.split(sizes, dim=1)]
    return lengths, torch.stack(counts, 1).tolist()


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
    runs: tuple[Run, ...] | None

    @property
    def total_rows(self) -> int:
        return sum(self.num_rows)


def message_sizes(route: Route, rank: int, notes: torch.Tensor) -> list[int]:
    """How many integers arrive from each rank, from the notes of all ranks."""
    sizes = []
    for row in notes.tolist():
        ids = sum(row[route.num_features : route.num_features + route.max_stacks])
        bags = sum(row[leg.feature] for leg in route.legs[rank]) if route.pooled else 0
        sizes.append(ids * (2 if row[-1] else 1) + bags)
    return sizes


def unpack(
    route: Route, rank: int, message: torch.Tensor, notes: torch.Tensor
) -> dict[int, StackRequest]:
    """The requests to the stacks of a rank, from the messages of all ranks."""
    stacks = sorted({leg.shard.stack for leg in route.legs[rank]})
    legs_of = {k: [leg for leg in route.legs[rank] if leg.shard.stack == k] for k in stacks}
    parts: dict[int, list[list[torch.Tensor]]] = {k: [[], [], []] for k in stacks}
    num_rows: dict[int, list[int]] = {k: [] for k in stacks}
    num_ids: dict[int, list[int]] = {k: [] for k in stacks}
    runs: dict[int, list[Run]] = {k: [] for k in stacks}
    at = 0
    weighted = False
    for row in notes.tolist():
        nums = {k: row[route.num_features + k] for k in stacks}
        for k in stacks:
            num_ids[k].append(nums[k])
        weighted = weighted or bool(row[-1])
        if route.pooled:
            for k in stacks:
                num = sum(row[leg.feature] for leg in legs_of[k])
                num_rows[k].append(num)
                runs[k] += [_run(leg, row[leg.feature]) for leg in legs_of[k]]
                parts[k][0].append(message[at : at + num])
                at += num
        else:
            for k in stacks:
                num_rows[k].append(nums[k])
        for part in (1, 2) if row[-1] else (1,):
            for k in stacks:
                parts[k][part].append(message[at : at + nums[k]])
                at += nums[k]
        if not row[-1]:
            for k in stacks:
                one = torch.ones((), dtype=torch.float32, device=message.device)
                parts[k][2].append(one.view(torch.int32).to(message.dtype).expand(nums[k]))
    return {
        k: StackRequest(
            ids=torch.cat(parts[k][1]),
            lengths=torch.cat(parts[k][0]) if route.pooled else None,
            weights=torch.cat(parts[k][2]).to(torch.int32).view(torch.float32)
            if weighted
            else None,
            num_rows=num_rows[k],
            num_ids=num_ids[k],
            runs=tuple(runs[k]) if route.pooled else None,
        )
        for k in stacks
    }


def _run(leg: FeatureRoute, num_bags: int) -> Run:
    return Run(num_bags, leg.shard.base, leg.shard.num_rows)


def local_requests(route: Route, rank: int, bags: FeatureBags) -> dict[int, StackRequest]:
    """A rank's own requests to replicated tables."""
    found = {}
    for k in sorted({leg.shard.stack for leg in route.local[rank]}):
        legs = [leg for leg in route.local[rank] if leg.shard.stack == k]
        ids = torch.cat([bags.ids_of(leg.feature) + leg.shard.base for leg in legs])
        lengths = torch.cat([bags.lengths_of(leg.feature) for leg in legs])
        weights = None
        if bags.weights is not None:
            weights = torch.cat([bags.weights_of(leg.feature) for leg in legs]).float()
        num = sum(bags.num_bags[leg.feature] for leg in legs) if route.pooled else ids.shape[0]
        runs = tuple(_run(leg, bags.num_bags[leg.feature]) for leg in legs)
        found[k] = StackRequest(
            ids.to(route.id_dtype),
            lengths.to(route.id_dtype) if route.pooled else None,
            weights,
            [num],
            [ids.shape[0]],
            runs if route.pooled else None,
        )
    return found
