"""RankBatch: one rank's batch as messages to the owners of rows, and what it gets of the others'.

Note [Messages]
A rank sends one message of integers to each other rank. It holds, for all legs to that rank (a leg
is one feature's ids to one shard), in the order of legs:

    the lengths of the bags | the ids | the weights, as bits, where there are any

Ids count from the first row of the receiver's stack. Where the rows of a table are split, each
owner gets only the ids of its rows, and lengths that count those. Unpooled lookups send no lengths:
one row comes back for each id. The integers are int32 unless a stack has 2³¹ rows or more. What a
rank asks of its own copies of replicated tables has the same form, and stays where it is.

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

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardwise.lookup.backends.backend import Query, Runs
from shardwise.lookup.bags import FeatureBags, PerFeature, Repeats, without_repeats
from shardwise.lookup.ids import distinct, places_of_runs, repeated, spread, stable_order
from shardwise.lookup.routing import LegBlock, OutputPiece, Route, RowGroup, rows_are_fewer

#: Ids per bag and owner, up to which a rank looks for those that repeat.
SHORT_BAGS = 2
#: Flags of a rank's note: it has weights of ids, they require grad, its backward needs all ranks,
#: it records no backward; above them all, a digest of the replicated tables that it freezes.
WEIGHTED, WEIGHTS_TRAIN, NEEDS_BACKWARD, NO_BACKWARD, FROZEN = 1, 2, 4, 8, 16


class SplitIds:
    """The ids of a row group's features, in the order of owners."""

    def __init__(self, route: Route, group: RowGroup, parts: PerFeature) -> None:
        values = torch.cat(group.of_features(parts.ids)).to(route.row_dtype)
        num_ids = parts.num_ids[group.features]
        num = values.shape[0]
        num_owners = len(group.owners)
        owners = group.owners_of(values, num_ids)
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

    @property
    def places(self) -> torch.Tensor:
        """For each id of the batch, its place among those that were sent for rows."""
        if self.once is not None:
            return places_of_runs(self.once.order, self.once.starts)
        return self.in_batch(torch.arange(self.order.shape[0], device=self.order.device))

    def in_batch(self, values: torch.Tensor) -> torch.Tensor:
        """What owners sent for each id, in the order of the batch."""
        return torch.empty_like(values).index_copy_(0, self.order, values)


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


def _per_owner(
    lengths: torch.Tensor, num_bags: np.ndarray, owners: torch.Tensor, num_owners: int, num_ids: int
) -> tuple[torch.Tensor, np.ndarray]:
    """Per owner, the length of each bag, and how many ids of each feature."""
    num = lengths.shape[0]
    small = torch.int32 if num_owners * num < 2**31 else torch.int64
    key = owners.to(small).mul_(num).add_(repeated(lengths, num_ids, small))
    found = torch.bincount(key, minlength=num_owners * num).view(num_owners, num)
    edges = np.zeros((num_owners, num + 1), dtype=np.int64)
    np.cumsum(found.cpu().numpy(), axis=1, out=edges[:, 1:])
    ends = np.cumsum([0, *num_bags])
    return found, np.diff(edges[:, ends], axis=1)


class Counts(NamedTuple):
    """How many numbers a rank sends, and how many it gets: of rows, or one for each id."""

    #: To each requesting rank, by stack.
    given: dict[int, list[int]]
    #: From each block.
    wanted: list[int]

    def by_requester(self, answers: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        """The parts of a message: the answers of all stacks to the first rank, then to the next."""
        split = [answers[k].reshape(-1).split(sizes) for k, sizes in self.given.items()]
        return [part for to_rank in zip(*split, strict=True) for part in to_rank]

    def by_stack(self, message: torch.Tensor) -> dict[int, torch.Tensor]:
        """The inverse, for gradients."""
        given = self.given
        if len(given) == 1:
            return dict.fromkeys(given, message)
        sizes = [num for to_rank in zip(*given.values(), strict=True) for num in to_rank]
        parts = message.split(sizes)
        return {k: torch.cat(parts[first :: len(given)]) for first, k in enumerate(given)}


#: Per feature, or per owner of a row group: lengths, ids and weights.
Kinds = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]


class RankBatch:
    """One rank's batch: what it asks of the others and, as messages arrive, they of it.

    First it says how much it sends (`notes`, `told`), then it knows how much arrives (`expect`) and
    makes its `messages`, and finally gets those of the others (`receive`).
    """

    #: Per stack: what any rank requests, and this rank's own requests to replicated tables.
    requests: dict[int, StackRequest]
    own_requests: dict[int, StackRequest]
    #: The numbers of rows that are exchanged.
    of_rows: Counts

    def __init__(self, route: Route, rank: int, given: FeatureBags) -> None:
        self.route, self.rank, self.given = route, rank, given
        #: The batch that is sent, and what was left out of it; see Note [Repeated ids].
        self.bags: FeatureBags = given
        self.repeats: Repeats | None = None
        if not route.pooled and route.travels:
            self.bags, self.repeats = without_repeats(given, route.features.num_rows)
        parts = PerFeature(self.bags)
        self.num_ids, self.num_bags = parts.num_ids, parts.num_bags
        #: The rows of each feature: of the output, and of what is sent for it.
        self.num_rows = given.num_bags if route.pooled else given.ids_to - given.ids_from
        self.num_sent = self.num_bags if route.pooled else self.num_ids
        self.split = [SplitIds(route, group, parts) for group in route.groups]
        #: Which groups get ids and return rows; see Note [Rows instead of sums]. The last item is
        #: for tables that are in no group.
        self.by_id = (False,) * (len(self.split) + 1)
        #: The ids and bags of each group, and whether weights require grad; all ranks get them.
        self.told = [int(self.bags.weights_train)] if self.split else []
        for group, ids in zip(route.groups, self.split, strict=True):
            self.told += [sum(ids.num_sent(True)), int(self.num_bags[group.features].sum())]
        self._whole: Kinds | None = self._pack_whole(parts) if route.has_whole else None
        #: What it asks of replicated tables, as a message.
        self._own = self._to_blocks(route.local_blocks[rank], [])
        #: A note to each rank, see `_note_to`; then one of each rank.
        self.notes = np.stack([self._note_to(blocks) for blocks in route.blocks])

    @functools.cached_property
    def factors(self) -> Sequence[torch.Tensor]:
        """Per feature, a column of what its bags' sums are multiplied by: in a mean, 1 / length."""
        per_feature, lengths = PerFeature(self.bags), self.bags.lengths.clamp(min=1).unsqueeze(1)
        factors = lengths.to(torch.float64).reciprocal_().to(self.route.dtype)
        found = list(per_feature.of_bags(torch.ones_like(factors)))
        means = per_feature.of_bags(factors)
        for feature in self.route.means:
            found[feature] = means[feature]
        return found

    def _note_to(self, blocks: Sequence[LegBlock]) -> np.ndarray:
        """The bags of each feature, the ids to each block, and flags.

        Where batches decide between sums and rows, there are ids for both.
        """
        route, bags = self.route, self.bags
        note = np.zeros(route.note_width, dtype=np.int64)
        note[: route.num_features] = self.num_bags
        for number, by_id in enumerate((False, True) if route.chooses else (False,)):
            first = route.num_features + number * route.max_blocks
            note[first : first + len(blocks)] = [self._ids_of(block, by_id) for block in blocks]
        note[-1] = (
            WEIGHTED * (bags.weights is not None)
            + WEIGHTS_TRAIN * bags.weights_train
            + NEEDS_BACKWARD * bags.needs_backward
            + NO_BACKWARD * bags.no_backward
            + FROZEN * bags.frozen
        )
        return note

    def _ids_of(self, block: LegBlock, by_id: bool) -> int:
        """How many ids go to a block."""
        if block.group < 0:
            return int(self.num_ids[block.features].sum())
        return self.split[block.group].num_sent(by_id)[block.owner]

    # -- what it sends ---------------------------------------------------------------------------

    def _pack_whole(self, parts: PerFeature) -> Kinds:
        """Of the features whose tables are not split by rows."""
        route, bags = self.route, self.bags
        values = bags.values.to(route.id_dtype, copy=True)
        if route.shifts.any():
            values += parts.spread(route.shifts, values)
        lengths = parts.of_bags(bags.lengths.to(route.id_dtype)) if route.pooled else ()
        weights: Sequence[torch.Tensor] = ()
        if bags.weights is not None:
            weights = parts.of_ids(self._bits(bags.weights), route.weight_ints)
        return lengths, parts.of_ids(values), weights

    def _of_group(self, split: SplitIds, by_id: bool) -> Kinds:
        if by_id:
            ids = split.ids if split.once is None else split.once.ids
            return (), ids.split(split.num_sent(True)), ()
        lengths = split.lengths.to(self.route.id_dtype).unbind(0) if self.route.pooled else ()
        weights: Sequence[torch.Tensor] = ()
        if split.weights is not None:
            sizes = [num * self.route.weight_ints for num in split.num_ids]
            weights = self._bits(split.weights).split(sizes)
        return lengths, split.ids.split(split.num_ids), weights

    def _bits(self, weights: torch.Tensor) -> torch.Tensor:
        bits = weights.to(self.route.weight_dtype).contiguous().view(torch.int32)
        return bits.to(self.route.id_dtype)

    def messages(self) -> tuple[torch.Tensor, list[int]]:
        """The messages to all ranks, one after another, and their lengths. They are made once."""
        made: dict[int, torch.Tensor] = {}
        of_groups = list(map(self._of_group, self.split, self.by_id))
        for rank, like in enumerate(self.route.like):
            if like not in made:
                made[like] = self._to_blocks(self.route.blocks[rank], of_groups)
        self._whole = None
        pieces = [made[like] for like in self.route.like]
        return torch.cat(pieces), [piece.shape[0] for piece in pieces]

    def _to_blocks(self, blocks: Sequence[LegBlock], of_groups: Sequence[Kinds]) -> torch.Tensor:
        found: list[list[torch.Tensor]] = [[], [], []]
        for block in blocks:
            if block.group >= 0:
                for kind, per_owner in zip(found, of_groups[block.group], strict=True):
                    kind += per_owner[block.owner : block.owner + 1]
                continue
            assert self._whole is not None, "a batch is sent once"
            lengths, ids, weights = (each and block.of_features(each) for each in self._whole)
            found[0] += lengths
            found[1] += self._shifted(block, ids)
            found[2] += weights
        pieces = [*found[0], *found[1], *found[2]]
        if pieces:
            return torch.cat(pieces)
        return torch.empty(0, dtype=self.route.id_dtype, device=self.bags.values.device)

    def _shifted(self, block: LegBlock, ids: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        more = block.shifts - self.route.shifts[block.features]
        if not more.any():
            return ids
        counts = self.num_ids[block.features]
        both = torch.cat(list(ids))
        return [both + spread(torch.from_numpy(more), counts, both.shape[0], both.device).to(both)]

    # -- what it gets ----------------------------------------------------------------------------

    def expect(self, notes: np.ndarray, by_id: tuple[bool, ...]) -> list[int]:
        """Take a note of each rank; returns how many integers arrive from each."""
        self.notes, self.by_id = notes, by_id
        self._incoming = Incoming(self.route, self.route.blocks[self.rank], notes, by_id)
        return self._incoming.sizes()

    def receive(self, message: torch.Tensor) -> None:
        """Take the messages of all ranks, one after another."""
        route, own_blocks = self.route, self.route.local_blocks[self.rank]
        own = Incoming(route, own_blocks, self._note_to(own_blocks)[None], self.by_id)
        self.requests, self.own_requests = self._incoming.requests(message), own.requests(self._own)
        widths = [stack.width for stack in route.tiling.stacks[self.rank]]
        given = {k: [n * widths[k] for n in each.num_rows] for k, each in self.requests.items()}
        wanted = [self._rows_of(block) * block.width for block in route.all_blocks]
        self.of_rows = Counts(given, wanted)

    def of_ids(self) -> Counts:
        """The numbers of an exchange of one for each id."""
        given = {k: each.num_ids for k, each in self.requests.items()}
        blocks = self.route.all_blocks
        return Counts(given, [self._ids_of(block, self.by_id[block.group]) for block in blocks])

    def _rows_of(self, block: LegBlock) -> int:
        """How many rows come back from a block."""
        if self.sums(block):
            return int(self.num_bags[block.features].sum())
        return self._ids_of(block, self.by_id[block.group])

    def sums(self, piece: OutputPiece) -> bool:
        """Whether each owner returns a row for each bag, not one for each id."""
        return self.route.pooled and not self.by_id[piece.group]

    def query(self, stack: int) -> Query:
        found = self.requests if stack in self.requests else self.own_requests
        return found[stack].query

    def by_piece(
        self, from_blocks: Sequence[torch.Tensor], own: dict[int, torch.Tensor]
    ) -> Iterator[tuple[OutputPiece, list[torch.Tensor]]]:
        """Each piece of the output, and what comes from its blocks; `own`: from own copies."""
        for piece in self.route.pieces:
            yield piece, [from_blocks[number] for number in piece.blocks]
        for block in self.route.local_blocks[self.rank]:
            yield block, [own[block.stack]]


def any_rank(batches: Sequence[RankBatch], flag: int) -> bool:
    """Whether a flag is in any rank's note; the answer is the same on every rank."""
    return any((batch.notes[:, -1] & flag).any() for batch in batches)


def groups_by_id(route: Route, told: np.ndarray) -> tuple[bool, ...]:
    """Which groups exchange rows instead of sums, from what all ranks told; see `RankBatch`."""
    trained, *counts = told.sum(0).tolist() if route.groups else [0]
    pairs = zip(route.groups, counts[::2], counts[1::2], strict=True)
    found = (
        route.pooled and not trained and rows_are_fewer(num_ids, num_bags, len(group.owners))
        for group, num_ids, num_bags in pairs
    )
    return (*found, False)


@dataclass(slots=True)
class StackRequest:
    """What one stack has to look up, for several ranks."""

    query: Query
    #: Rows that each requesting rank gets.
    num_rows: list[int]
    #: Ids of each requesting rank.
    num_ids: list[int]


class Incoming:
    """The messages of all ranks to some blocks of one rank, as their notes announce them."""

    def __init__(
        self,
        route: Route,
        blocks: Sequence[LegBlock],
        notes: np.ndarray,
        by_id: Sequence[bool],
    ) -> None:
        self._route, self._blocks, self._notes = route, blocks, notes
        #: Per block, whether rows are returned instead of sums.
        self._alone = [by_id[block.group] for block in blocks]
        num, first, more = len(blocks), route.num_features, route.max_blocks
        #: Per requesting rank, kind and block: integers of lengths, ids and weights.
        self._counts = np.zeros((len(notes), 3, num), dtype=np.int64)
        lengths, ids, weights = self._counts.swapaxes(0, 1)
        is_weighted = (notes[:, -1] & WEIGHTED) // WEIGHTED
        for place, block in enumerate(blocks):
            if self._alone[place]:
                ids[:, place] = notes[:, first + more + place]
                continue
            ids[:, place] = notes[:, first + place]
            weights[:, place] = ids[:, place] * is_weighted * route.weight_ints
            if route.pooled:
                lengths[:, place] = notes[:, block.features].sum(1)

    def sizes(self) -> list[int]:
        """How many integers arrive from each rank."""
        return self._counts.sum((1, 2)).tolist()

    def requests(self, message: torch.Tensor) -> dict[int, StackRequest]:
        """The requests to each stack."""
        if not self._blocks:
            return {}
        pieces = message.split(self._counts.reshape(-1).tolist())
        stacks: dict[int, list[int]] = {}
        for place, block in enumerate(self._blocks):
            stacks.setdefault(block.stack, []).append(place)
        return {k: self._request(mine, pieces) for k, mine in stacks.items()}

    def _request(self, mine: Sequence[int], pieces: Sequence[torch.Tensor]) -> StackRequest:
        """The request to the stack of some blocks."""
        route, counts, num = self._route, self._counts, len(self._blocks)
        firsts = range(0, len(pieces), 3 * num)
        each = [(first + place, self._alone[place]) for first in firsts for place in mine]
        ids = [pieces[at + num] for at, _ in each]
        lengths, weights, runs = None, None, None
        num_ids = num_rows = counts[:, 1, mine].sum(1).tolist()
        if route.pooled:
            lengths = torch.cat(
                [
                    of_ids.new_ones(()).expand(of_ids.shape) if alone else pieces[at]
                    for (at, alone), of_ids in zip(each, ids, strict=True)
                ]
            )
            kinds = [int(self._alone[place]) for place in mine]
            num_rows = counts[:, kinds, mine].sum(1).tolist()
            num_bags, *rows = zip(*map(self._run, mine), strict=True)
            runs = Runs(np.concatenate(num_bags, 1), *map(np.concatenate, rows))
        if (self._notes[:, -1] & WEIGHTED).any():
            bits = [pieces[at + 2 * num] for at, _ in each]
            weights = torch.cat(list(map(self._weights, bits, ids)))
        return StackRequest(Query(torch.cat(ids), lengths, weights, runs), num_rows, num_ids)

    def _run(self, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of a block, as in `Runs`. Where each id is a bag, its tables count as one."""
        block = self._blocks[place]
        if not self._alone[place]:
            return self._notes[:, block.features], block.first_row, block.num_rows
        first, end = block.first_row[:1], block.first_row[-1:] + block.num_rows[-1:]
        return self._counts[:, 1, place, None], first, end - first

    def _weights(self, bits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The weights of ids; ones where none are given."""
        dtype, size = self._route.weight_dtype, self._route.weight_ints
        if bits.shape[0] != ids.shape[0] * size:
            return torch.ones(ids.shape[0], dtype=dtype, device=ids.device)
        # Wider numbers are only read where their memory is aligned.
        return bits.to(torch.int32, copy=size > 1).view(dtype)
