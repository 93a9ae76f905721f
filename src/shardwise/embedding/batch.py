"""One rank's batch, checked: where the ids and bags of each feature begin.

An invalid batch does not raise here, as other ranks wait for this one: the fault is sent with the
counts and raised on every rank; see Note [Agreement].
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.comm.agreement import Fault
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.table import Table
from shardwise.errors import BatchError, IdRangeError


@dataclass(frozen=True, slots=True)
class FeatureBags:
    """The ids of all features in the declared order."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    #: Feature i has ids ids_from[i] to ids_to[i], and num_bags[i] bags from bags_from[i] on.
    ids_from: tuple[int, ...]
    ids_to: tuple[int, ...]
    bags_from: tuple[int, ...]
    num_bags: tuple[int, ...]
    #: Whether the weights require grad.
    weights_train: bool = False

    def ids_of(self, feature: int) -> torch.Tensor:
        return self.values[self.ids_from[feature] : self.ids_to[feature]]

    def lengths_of(self, feature: int) -> torch.Tensor:
        start = self.bags_from[feature]
        return self.lengths[start : start + self.num_bags[feature]]

    def weights_of(self, feature: int) -> torch.Tensor:
        assert self.weights is not None, "a batch without weights"
        return self.weights[self.ids_from[feature] : self.ids_to[feature]]

    def num_ids(self, feature: int) -> int:
        return self.ids_to[feature] - self.ids_from[feature]


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
    owners = {feature: table for table in tables for feature in table.features}
    fault = _names_fault(tables, owners, features)
    if fault is not None:
        return fault
    sizes = _sizes(owners, batch)
    if isinstance(sizes, Fault):
        return sizes
    fault = _lengths_fault(batch, owners, sizes) or (
        _uneven_fault(features, owners, sizes) if side_by_side else None
    )
    if fault is not None:
        return fault
    bag_starts = list(itertools.accumulate(sizes, initial=0))
    id_starts = _id_starts(lengths, sizes, bag_starts)
    place_of = {feature: place for place, feature in enumerate(features)}
    places = [place_of[feature] for feature in owners]
    bags = FeatureBags(
        values=batch.values,
        lengths=lengths,
        weights=batch.weights,
        ids_from=tuple(id_starts[place] for place in places),
        ids_to=tuple(id_starts[place + 1] for place in places),
        bags_from=tuple(bag_starts[place] for place in places),
        num_bags=tuple(sizes[place] for place in places),
        weights_train=weights_train,
    )
    return _ids_fault(bags, list(owners), owners) or bags


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
    num, total = len(batch.features), batch.lengths.shape[0]
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
    if total != values.shape[0]:
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


def _id_starts(lengths: torch.Tensor, sizes: Sequence[int], bag_starts: Sequence[int]) -> list[int]:
    if sizes and min(sizes) == max(sizes) and sizes[0]:
        counts = lengths.view(len(sizes), -1).sum(1).tolist()
    else:
        counts = [
            int(lengths[start : start + size].sum())
            for start, size in zip(bag_starts, sizes, strict=False)
        ]
    return list(itertools.accumulate(counts, initial=0))


def _ids_fault(
    bags: FeatureBags, features: Sequence[str], owners: dict[str, Table]
) -> Fault | None:
    numbers = [n for n in range(len(features)) if bags.num_ids(n)]
    if not numbers:
        return None
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
