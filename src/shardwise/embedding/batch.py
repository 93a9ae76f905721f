"""One rank's batch, checked: where the ids and bags of each feature begin.

An invalid batch does not raise here, as other ranks wait for this one: the fault is sent with the
counts and raised on every rank; see Note [Agreement].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from shardwise.comm.agreement import Fault
from shardwise.core.mesh import Grid
from shardwise.embedding.jagged import Jagged
from shardwise.errors import (
    ArgumentError,
    BatchError,
    IdRangeError,
    ShardwiseError,
    some_of,
)
from shardwise.lookup.bags import FeatureBags
from shardwise.lookup.exchange import ranks_present
from shardwise.lookup.ids import edges_of
from shardwise.lookup.prefetch import PrefetchedBatch, unreadable
from shardwise.lookup.routing import Route
from shardwise.lookup.tiling import Features
from shardwise.simulation.ranks import is_per_rank, part_per_rank, parts_of

if TYPE_CHECKING:
    from shardwise.embedding.alone import OneRank


def unfit(text: str) -> Fault:
    """A fault of a batch."""
    return Fault(f"{text}.", BatchError)


def bags_of(
    features: Features,
    batch: Jagged,
    *,
    weights_train: bool,
    side_by_side: bool,
    needs_backward: bool = False,
    no_backward: bool = False,
    frozen: int = 0,
) -> FeatureBags | Fault:
    """The bags of one rank, in the order in which the tables declare their features.

    With `side_by_side`, all features need the same number of bags.
    """
    sizes = bags_per_feature(features, batch, side_by_side=side_by_side)
    if isinstance(sizes, Fault):
        return sizes
    places, lengths = features.places(batch.features), batch.lengths
    assert isinstance(places, np.ndarray), "the names fit"
    bag_edges = _edges(sizes)
    counts = _counts_if_valid(batch, features, places, bag_edges)
    is_valid = counts is not None
    if counts is None:
        fault = _lengths_fault(batch, features, bag_edges)
        if fault is not None:
            return fault
        counts = _ids_per_feature(lengths, bag_edges).tolist()
    id_edges = _edges(counts)
    num_ids = int(id_edges[-1])
    bags = FeatureBags(
        values=batch.values[:num_ids],
        lengths=lengths,
        weights=None if batch.weights is None else batch.weights[:num_ids],
        ids_from=id_edges[places],
        ids_to=id_edges[places + 1],
        bags_from=bag_edges[places],
        num_bags=bag_edges[places + 1] - bag_edges[places],
        weights_train=weights_train,
        num_given=batch.values.shape[0],
        needs_backward=needs_backward,
        no_backward=no_backward,
        frozen=frozen,
    )
    return bags if is_valid else _ids_fault(bags, features) or bags


def _edges(counts: Sequence[int]) -> np.ndarray:
    """The start of each counted item, and the end of the last one."""
    return np.cumsum([0, *counts])


def bags_per_feature(features: Features, batch: Jagged, *, side_by_side: bool) -> list[int] | Fault:
    """How many bags each feature of the batch has; reads no value on the device."""
    places = features.places(batch.features)
    if isinstance(places, str):
        return unfit(places)
    sizes = _sizes(features, batch)
    if isinstance(sizes, Fault) or not side_by_side or min(sizes) == max(sizes):
        return sizes
    first = batch.features[0]
    other, size = next(e for e in zip(batch.features, sizes, strict=True) if e[1] != sizes[0])
    return unfit(
        f"{features.called(first)} has {sizes[0]} bags, {features.called(other)} {size}; "
        "output='tensor' needs equally many, output='dict' does not"
    )


def _sizes(features: Features, batch: Jagged) -> list[int] | Fault:
    """How many bags each feature has."""
    names = functools.partial(_names, features, batch)
    if batch.problem is not None:
        return unfit(f"{batch.problem} ({names()})")
    num, total = len(batch.features), batch.num_bags
    if batch.batch_sizes is None:
        if total % num:
            return unfit(
                f"{total} bags do not divide among {num} features ({names()}); "
                "batch_sizes= says how many each has"
            )
        return [total // num] * num
    sizes = batch.batch_sizes.tolist()
    if len(sizes) != num or min(sizes) < 0 or sum(sizes) != total:
        given = some_of([str(size) for size in sizes])
        return unfit(
            f"batch_sizes [{given}] do not fit {num} features with {total} bags ({names()})"
        )
    return sizes


def _names(features: Features, batch: Jagged) -> str:
    return some_of([features.called(feature) for feature in batch.features])


def _lengths_fault(batch: Jagged, features: Features, bag_edges: np.ndarray) -> Fault | None:
    values, lengths, weights, first = batch.values, batch.lengths, batch.weights, batch.first
    if first is not None and (first.numel() == 0 or int(first) != 0):
        who = features.called(batch.features[0])
        return unfit(f"{who}: offsets must begin with 0; found {first.tolist()}")
    shortest, longest = torch.stack(torch.aminmax(lengths)).tolist() if lengths.numel() else (0, 0)
    if shortest < 0:
        bag = int(lengths.argmin())
        place = int(np.searchsorted(bag_edges, bag, side="right")) - 1
        return unfit(
            f"{features.called(batch.features[place])}: offsets decrease, bag "
            f"{bag - bag_edges[place]} has length {int(lengths[bag])}"
        )
    # Lengths that are too large may have a sum that does not fit an int64.
    total = int(lengths.sum()) if longest <= values.shape[0] else sum(lengths.tolist())
    last = features.called(batch.features[-1])
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


def _ids_per_feature(lengths: torch.Tensor, bag_edges: np.ndarray) -> torch.Tensor:
    num = np.diff(bag_edges)
    if num[0] and (num == num[0]).all():
        return lengths.view(len(num), -1).sum(1)
    return edges_of(lengths)[torch.from_numpy(bag_edges).to(lengths.device)].diff()


def _counts_if_valid(
    batch: Jagged, features: Features, places: np.ndarray, bag_edges: np.ndarray
) -> list[int] | None:
    """The ids of each feature, counted; None unless the batch is valid (`bags_of` says why).

    On a GPU every read of a value waits for the device: this reads once.
    """
    values, lengths = batch.values, batch.lengths
    if values.device.type == "cpu" or not lengths.numel() or not values.numel():
        return None
    if batch.weights is not None and batch.weights.shape != values.shape:
        return None
    device = values.device
    counts = _ids_per_feature(lengths, bag_edges)
    limits = torch.from_numpy(features.num_rows[np.argsort(places)])
    # By search: the counts may be wrong.
    numbers = torch.searchsorted(
        counts.cumsum(0), torch.arange(values.shape[0], device=device), right=True
    ).clamp_(max=len(places) - 1)
    wrong = ((values < 0) | (values >= limits.to(device)[numbers])).any()
    first = lengths.new_zeros(1) if batch.first is None else batch.first
    ends = torch.stack(torch.aminmax(lengths))
    read = torch.cat([first.view(-1), ends, wrong.view(1), counts]).tolist()
    start, shortest, longest, is_wrong, *found = map(int, read)
    total, num_ids = sum(found), values.shape[0]
    fits = longest <= num_ids and (total <= num_ids if batch.padded else total == num_ids)
    return found if start == 0 and shortest >= 0 and not is_wrong and fits else None


def _ids_fault(bags: FeatureBags, features: Features) -> Fault | None:
    if not bags.values.numel():
        return None
    low, high = torch.stack(torch.aminmax(bags.values)).tolist()
    if low >= 0 and high < features.fewest_rows:
        return None  # without a look at each feature
    ids = bags.values.cpu().numpy()
    # The features that have ids, in the order of the batch: each ends where the next begins.
    numbers = np.argsort(bags.ids_from, kind="stable")
    numbers = numbers[bags.ids_to[numbers] > bags.ids_from[numbers]]
    lows, highs = (f.reduceat(ids, bags.ids_from[numbers]) for f in (np.minimum, np.maximum))
    wrong = numbers[(lows < 0) | (highs >= features.num_rows[numbers])]
    if not wrong.size:
        return None
    number = wrong.min()
    mine, num_rows = ids[bags.ids_from[number] : bags.ids_to[number]], features.num_rows[number]
    value = mine.min() if mine.min() < 0 else mine.max()
    return Fault(
        f"{features.called(list(features.owners)[number])}: id {value} (number "
        f"{int((mine == value).argmax())} of the feature) is out of range, the table has rows 0 to "
        f"{num_rows - 1}.",
        IdRangeError,
    )


# -- prefetching ---------------------------------------------------------------------------------


def prefetch_batch(
    route: Route,
    grid: Grid | None,
    alone: OneRank | None,
    batch: Any,
    trouble: str | None,
    *,
    side_by_side: bool,
    may_train: bool,
    tables_train: bool,
    frozen: int,
) -> PrefetchedBatch:
    """Check a batch on every rank, and start the exchange of counts.

    `trouble` is a fault of the collection itself on this rank; all ranks will raise it.
    `tables_train`: whether backward may need the gradient of a table on this rank; `frozen`: a
    digest of the replicated ones that it does not train.
    """
    num_here = 1 if grid is None or grid.outside else len(ranks_present(grid))

    def refused(fault: Fault) -> PrefetchedBatch:
        return PrefetchedBatch(route, grid, [fault] * num_here, None)

    jagged = _read(batch)
    if isinstance(jagged, Fault):
        return refused(jagged)
    if trouble is not None:
        return refused(Fault(f"{trouble}.", ShardwiseError))
    if grid is None and _differs_between_ranks(jagged):
        return refused(unfit(_ONE_BATCH))
    weights = jagged._weights
    train = weights is not None and weights.requires_grad and may_train
    if alone is not None:
        checked = alone.prefetch(jagged, joined=side_by_side, train=train)
        if checked is not None:
            return refused(checked) if isinstance(checked, Fault) else checked

    def bags(mine: Jagged) -> FeatureBags | Fault:
        try:
            return bags_of(
                route.features,
                mine,
                side_by_side=side_by_side,
                weights_train=train,
                needs_backward=train or tables_train,
                no_backward=not may_train,
                frozen=frozen,
            )
        except Exception as error:
            return unreadable(error)

    found = map(bags, _jagged_per_rank(grid, jagged, num_here))
    return PrefetchedBatch(route, grid, list(found), weights)


def _read(batch: Any) -> Jagged | Fault:
    try:
        return Jagged.of(batch)
    except ArgumentError as error:
        return unfit(str(error).rstrip("."))
    except Exception as error:
        return unreadable(error)


_ONE_BATCH = (
    "the batch differs between the ranks of a simulated world, but the collection is not sharded "
    "and takes one batch. Call shard(mesh, plan) first; the plan 'data_parallel' gives every rank "
    "all tables"
)


def _differs_between_ranks(batch: Jagged) -> bool:
    given = (batch.values, batch._lengths, batch._offsets, batch._weights)
    return any(is_per_rank(each) and len(parts_of(each)) > 1 for each in given)


def _jagged_per_rank(grid: Grid | None, batch: Jagged, num_here: int) -> list[Jagged]:
    weights = None if batch._weights is None else batch._weights.detach()
    tensors = (batch.values, batch.lengths, weights, batch.batch_sizes, batch.first)
    if grid is None or batch.problem is not None or not any(map(is_per_rank, tensors)):
        return [batch.with_weights(weights)] * num_here
    columns = [[x] * num_here if x is None else part_per_rank(grid, x) for x in tensors]
    return [batch.replaced(*row) for row in zip(*columns, strict=True)]
