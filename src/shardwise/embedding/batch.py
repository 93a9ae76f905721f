"""One rank's batch, checked: where the ids and bags of each feature begin.

An invalid batch does not raise here, as other ranks wait for this one: the fault is sent with the
counts and raised on every rank; see Note [Agreement].
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.comm.agreement import Fault
from shardwise.core.mesh import Grid
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ArgumentError, BatchError, IdRangeError, ShardwiseError
from shardwise.lookup.bags import FeatureBags
from shardwise.lookup.exchange import ranks_present
from shardwise.lookup.prefetch import OutsideBatch, PrefetchedBatch
from shardwise.lookup.routing import Route
from shardwise.lookup.table import Table
from shardwise.simulation.parts import is_per_rank, parts_of
from shardwise.simulation.ranks import part_per_rank

if TYPE_CHECKING:
    from shardwise.embedding.alone import OneRank


def unfit(text: str) -> Fault:
    """What is wrong with a batch."""
    return Fault(f"{text}.", BatchError)


def bags_of(
    tables: Sequence[Table], batch: Jagged, *, weights_train: bool, side_by_side: bool
) -> FeatureBags | Fault:
    """The bags of one rank, in the order in which the tables declare their features.

    With `side_by_side`, all features need the same number of bags.
    """
    features, lengths = batch.features, batch.lengths
    owners = owner_per_feature(tables)
    sizes = bags_per_feature(tables, batch, side_by_side=side_by_side)
    if isinstance(sizes, Fault):
        return sizes
    bag_starts = list(itertools.accumulate(sizes, initial=0))
    counts = _counts_if_valid(batch, owners, sizes, bag_starts)
    is_valid = counts is not None
    if counts is None:
        fault = _lengths_fault(batch, owners, sizes)
        if fault is not None:
            return fault
        counts = _ids_per_feature(lengths, sizes, bag_starts).tolist()
    id_starts = list(itertools.accumulate(counts, initial=0))
    place_of = {feature: place for place, feature in enumerate(features)}
    places = [place_of[feature] for feature in owners]
    bags = FeatureBags(
        values=batch.values[: id_starts[-1]],
        lengths=lengths,
        weights=None if batch.weights is None else batch.weights[: id_starts[-1]],
        ids_from=tuple(id_starts[place] for place in places),
        ids_to=tuple(id_starts[place + 1] for place in places),
        bags_from=tuple(bag_starts[place] for place in places),
        num_bags=tuple(sizes[place] for place in places),
        weights_train=weights_train,
        num_given=batch.values.shape[0],
    )
    if is_valid:
        return bags
    return _ids_fault(bags, list(owners), owners) or bags


def owner_per_feature(tables: Sequence[Table]) -> dict[str, Table]:
    """The table of each feature, in the declared order."""
    return {feature: table for table in tables for feature in table.features}


def bags_per_feature(
    tables: Sequence[Table], batch: Jagged, *, side_by_side: bool
) -> list[int] | Fault:
    """How many bags each feature of the batch has; reads no value on the device."""
    owners = owner_per_feature(tables)
    fault = _names_fault(tables, owners, batch.features)
    if fault is not None:
        return fault
    sizes = _sizes(owners, batch)
    if isinstance(sizes, Fault) or not side_by_side:
        return sizes
    return _uneven_fault(batch.features, owners, sizes) or sizes


def _names_fault(
    tables: Sequence[Table], owners: dict[str, Table], given: Sequence[str]
) -> Fault | None:
    counts = Counter(given)
    unknown = [name for name in counts if name not in owners]
    if unknown:
        known = "; ".join(f"{t.name!r} has {', '.join(t.features)}" for t in tables)
        return unfit(f"feature {unknown[0]!r} belongs to no table; of the tables, {known}")
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        return unfit(f"{_called(twice[0], owners)} is there more than once")
    missing = [name for name in owners if name not in counts]
    return unfit(f"{_called(missing[0], owners)} is missing") if missing else None


def _called(feature: str, owners: dict[str, Table]) -> str:
    return f"feature {feature!r} of table {owners[feature].name!r}"


def _sizes(owners: dict[str, Table], batch: Jagged) -> list[int] | Fault:
    """How many bags each feature has."""
    if batch.problem is not None:
        return unfit(f"{batch.problem} ({_all_called(batch, owners)})")
    num, total = len(batch.features), batch.num_bags
    if batch.batch_sizes is None:
        if total % num:
            return unfit(
                f"{total} bags do not divide among {num} features ({_all_called(batch, owners)}); "
                "batch_sizes= says how many each has"
            )
        return [total // num] * num
    sizes = batch.batch_sizes.tolist()
    if len(sizes) != num or min(sizes) < 0 or sum(sizes) != total:
        return unfit(
            f"batch_sizes {sizes} do not fit {num} features with {total} bags "
            f"({_all_called(batch, owners)})"
        )
    return sizes


def _all_called(batch: Jagged, owners: dict[str, Table]) -> str:
    return ", ".join(_called(feature, owners) for feature in batch.features)


def _uneven_fault(
    features: Sequence[str], owners: dict[str, Table], sizes: Sequence[int]
) -> Fault | None:
    for feature, size in zip(features, sizes, strict=True):
        if size != sizes[0]:
            return unfit(
                f"{_called(features[0], owners)} has {sizes[0]} bags, {_called(feature, owners)} "
                f"{size}; output='tensor' needs equally many, output='dict' does not"
            )
    return None


def _lengths_fault(batch: Jagged, owners: dict[str, Table], sizes: Sequence[int]) -> Fault | None:
    features, values, lengths = batch.features, batch.values, batch.lengths
    weights, first = batch.weights, batch.first
    if first is not None and (first.numel() == 0 or int(first) != 0):
        who = _called(features[0], owners)
        return unfit(f"{who}: offsets must begin with 0; found {first.tolist()}")
    if lengths.numel() and int(lengths.min()) < 0:
        bag = int(lengths.argmin())
        starts = list(itertools.accumulate(sizes, initial=0))
        place = next(i for i in range(len(features)) if bag < starts[i + 1])
        return unfit(
            f"{_called(features[place], owners)}: offsets decrease, bag {bag - starts[place]} has "
            f"length {int(lengths[bag])}"
        )
    total, last = int(lengths.sum()), _called(features[-1], owners)
    if total > values.shape[0] or (total < values.shape[0] and not batch.padded):
        return unfit(
            f"the lengths of all bags sum to {total}, up to {last}, but there are "
            f"{values.shape[0]} ids"
        )
    if weights is not None and weights.shape != values.shape:
        return unfit(
            f"weights have shape {tuple(weights.shape)}, the ids {tuple(values.shape)}, up to "
            f"{last}; each id has one weight"
        )
    return None


def _ids_per_feature(
    lengths: torch.Tensor, sizes: Sequence[int], bag_starts: Sequence[int]
) -> torch.Tensor:
    if sizes and min(sizes) == max(sizes) and sizes[0]:
        return lengths.view(len(sizes), -1).sum(1)
    ends = lengths.new_zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=ends[1:])
    return ends[torch.tensor(bag_starts, device=ends.device)].diff()


def _counts_if_valid(
    batch: Jagged, owners: dict[str, Table], sizes: Sequence[int], bag_starts: Sequence[int]
) -> list[int] | None:
    """The ids of each feature, if all is valid; None where `bags_of` has to look closer.

    On a GPU every read of a value waits for the device: this reads once.
    """
    values, lengths = batch.values, batch.lengths
    if values.device.type == "cpu" or not lengths.numel() or not values.numel():
        return None
    if batch.weights is not None and batch.weights.shape != values.shape:
        return None
    device = values.device
    counts = _ids_per_feature(lengths, sizes, bag_starts)
    limits = torch.tensor([owners[feature].num_embeddings for feature in batch.features])
    # By search: the counts may be wrong.
    numbers = torch.searchsorted(
        counts.cumsum(0), torch.arange(values.shape[0], device=device), right=True
    ).clamp_(max=len(sizes) - 1)
    wrong = ((values < 0) | (values >= limits.to(device)[numbers])).any()
    first = lengths.new_zeros(1) if batch.first is None else batch.first
    read = torch.cat([first.view(-1), lengths.min().view(1), wrong.view(1), counts]).tolist()
    start, shortest, is_wrong, *found = map(int, read)
    total, num_ids = sum(found), values.shape[0]
    fits = total <= num_ids if batch.padded else total == num_ids
    return found if start == 0 and shortest >= 0 and not is_wrong and fits else None


def _ids_fault(
    bags: FeatureBags, features: Sequence[str], owners: dict[str, Table]
) -> Fault | None:
    if not bags.values.numel():
        return None
    low, high = torch.stack(torch.aminmax(bags.values)).tolist()
    if low >= 0 and high < min(table.num_embeddings for table in owners.values()):
        return None  # without a look at each feature
    numbers = [n for n in range(len(features)) if bags.num_ids(n)]
    # Read all at once: on a GPU each read of a value synchronizes.
    extremes = torch.stack([bound for n in numbers for bound in torch.aminmax(bags.ids_of(n))])
    for number, (low, high) in zip(numbers, extremes.view(-1, 2).tolist(), strict=True):
        table = owners[features[number]]
        if low < 0 or high >= table.num_embeddings:
            wrong = low if low < 0 else high
            where = int((bags.ids_of(number) == wrong).nonzero()[0])
            return Fault(
                f"{_called(features[number], owners)}: id {wrong} (number {where} of the feature) "
                f"is out of range, the table has rows 0 to {table.num_embeddings - 1}.",
                IdRangeError,
            )
    return None


# -- prefetching ---------------------------------------------------------------------------------


def prefetch_batch(
    route: Route,
    grid: Grid | None,
    alone: OneRank | None,
    batch: Any,
    trouble: str | None,
    *,
    side_by_side: bool,
) -> PrefetchedBatch:
    """Check a batch on every rank, and start the exchange of counts.

    `trouble` is what is wrong with the collection itself on this rank; all ranks will raise it.
    """
    try:
        jagged = Jagged.of(batch)
    except ArgumentError as error:
        return _invalid_batch(route, grid, unfit(str(error).rstrip(".")))
    if trouble is not None:
        return _invalid_batch(route, grid, Fault(f"{trouble}.", ShardwiseError))
    if grid is None and _differs_between_ranks(jagged):
        return _invalid_batch(route, grid, unfit(_ONE_BATCH))
    weights = jagged._weights
    train = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    if alone is not None:
        checked = alone.prefetch(jagged, joined=side_by_side, train=train)
        if isinstance(checked, Fault):
            return _invalid_batch(route, grid, checked)
        if checked is not None:
            return checked
    if grid is not None and grid.outside:
        tables = route.tiling.tables
        one = jagged.with_weights(None if weights is None else weights.detach())
        return OutsideBatch(
            route, bags_of(tables, one, weights_train=train, side_by_side=side_by_side)
        )
    found = [
        bags_of(route.tiling.tables, each, weights_train=train, side_by_side=side_by_side)
        for each in _jagged_per_rank(grid, jagged)
    ]
    return PrefetchedBatch(route, grid, found, weights)


_ONE_BATCH = (
    "the batch differs between the ranks of a simulated world, but the collection is not sharded "
    "and takes one batch. Call shard(mesh, plan) first; the plan 'data_parallel' gives every rank "
    "all tables"
)


def _differs_between_ranks(batch: Jagged) -> bool:
    given = (batch.values, batch._lengths, batch._offsets, batch._weights)
    return any(is_per_rank(each) and len(parts_of(each)) > 1 for each in given)


def _invalid_batch(route: Route, grid: Grid | None, fault: Fault) -> PrefetchedBatch:
    if grid is not None and grid.outside:
        return OutsideBatch(route, fault)
    present = [0] if grid is None else ranks_present(grid)
    return PrefetchedBatch(route, grid, [fault] * len(present), None)


def _jagged_per_rank(grid: Grid | None, batch: Jagged) -> list[Jagged]:
    weights = None if batch._weights is None else batch._weights.detach()
    batch = batch.with_weights(weights)
    names = ("values", "lengths", "weights", "batch_sizes", "first")
    alike = not any(is_per_rank(getattr(batch, name)) for name in names)
    if grid is None or batch.problem is not None or alike:
        return [batch] * (1 if grid is None else len(ranks_present(grid)))
    columns: dict[str, Any] = {}
    for name in names:
        tensor = getattr(batch, name)
        parts = part_per_rank(grid, tensor) if tensor is not None else [None] * len(grid.ranks)
        columns[name] = parts
    found = []
    for place in range(len(grid.ranks)):
        one = Jagged(
            batch.features,
            columns["values"][place],
            lengths=columns["lengths"][place],
            padded=batch.padded,
        )
        one.weights = columns["weights"][place]
        one.batch_sizes = columns["batch_sizes"][place]
        one.first = columns["first"][place]
        found.append(one)
    return found
