"""FeatureBags, one rank's checked batch: feature by feature, and without ids that repeat."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shardwise.lookup.ids import distinct, places_of_runs, segment_sums, spread


@dataclass(frozen=True, slots=True)
class FeatureBags:
    """The ids of all features in the declared order."""

    values: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor | None
    #: Feature i has ids ids_from[i] to ids_to[i], and num_bags[i] bags from bags_from[i] on.
    ids_from: np.ndarray
    ids_to: np.ndarray
    bags_from: np.ndarray
    num_bags: np.ndarray
    #: Whether the weights require grad.
    weights_train: bool = False
    #: Ids that were given, those of a padded batch that are in no bag included.
    num_given: int = 0
    #: Whether backward of this rank needs that of all others, whatever those train.
    needs_backward: bool = False
    #: Whether this rank records no backward, so that it cannot take part in that of the others.
    no_backward: bool = False
    #: A digest of the replicated tables that this rank freezes; 0 for none.
    frozen: int = 0


def bags_of_one(
    ids: torch.Tensor,
    lengths: torch.Tensor,
    weights: torch.Tensor | None,
    *,
    weights_train: bool,
    needs_backward: bool,
    no_backward: bool,
) -> FeatureBags:
    """The bags of a single feature."""
    num, zero = ids.shape[0], np.array([0])
    ends, bags = np.array([num]), np.array([lengths.shape[0]])
    given = ids, lengths, weights, zero, ends, zero, bags
    return FeatureBags(*given, weights_train, num, needs_backward, no_backward)


class PerFeature:
    """The ids, lengths and weights of each feature, as views; made where tables are split."""

    def __init__(self, bags: FeatureBags) -> None:
        self._bags = bags
        self.num_ids, self.num_bags = bags.ids_to - bags.ids_from, bags.num_bags
        order = np.lexsort((self.num_bags, bags.bags_from))
        #: The features in the order of the batch; None if that is the declared one.
        self._order = None if (order == np.arange(len(order))).all() else order

    @functools.cached_property
    def ids(self) -> Sequence[torch.Tensor]:
        return self.of_ids(self._bags.values)

    @functools.cached_property
    def lengths(self) -> Sequence[torch.Tensor]:
        return self.of_bags(self._bags.lengths)

    @functools.cached_property
    def weights(self) -> Sequence[torch.Tensor] | None:
        return None if self._bags.weights is None else self.of_ids(self._bags.weights)

    def declared_ids(self) -> torch.Tensor:
        """The ids of all features in the declared order."""
        return self._bags.values if self._order is None else torch.cat(list(self.ids))

    def of_ids(self, values: torch.Tensor, per_id: int = 1) -> Sequence[torch.Tensor]:
        """Per feature, its share of what is given for each id of the batch."""
        return self._views(values, self.num_ids * per_id)

    def of_bags(self, values: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._views(values, self.num_bags)

    def _views(self, values: torch.Tensor, counts: np.ndarray) -> Sequence[torch.Tensor]:
        if self._order is None:
            return values.split(counts.tolist())
        parts = values.split(counts[self._order].tolist())
        return tuple([parts[place] for place in np.argsort(self._order).tolist()])

    def spread(self, numbers: np.ndarray, like: torch.Tensor) -> torch.Tensor:
        """For each id of the batch, the number of its feature."""
        order = slice(None) if self._order is None else self._order
        given, counts = torch.from_numpy(numbers[order]), self.num_ids[order]
        return spread(given, counts, like.shape[0], like.device).to(like.dtype)


#: The largest share of different ids with which it pays to leave out those that repeat.
MOST_DIFFERENT = 0.9
#: Elements of rows at a time: 1 MB.
_CHUNK_NUMBERS = 1 << 18


class Repeats:
    """Which ids of an unpooled batch repeat; see Note [Repeated ids] in `messages`.

    Features of one width are handled together, as many as fit the cache: the calls do not grow with
    features, and large ones are not copied.
    """

    def __init__(
        self, order: torch.Tensor, starts: torch.Tensor, num_ids: np.ndarray, num_found: np.ndarray
    ) -> None:
        """`order` sorts the ids of all features, in which each different id begins at `starts`.

        Feature i has `num_ids[i]` ids, of which `num_found[i]` are different.
        """
        self._num_ids, self._num_found = num_ids, num_found
        #: Per feature: the place of each id among the different ones; the places of the ids in
        #: order, and where each different one begins there.
        self._places = _of_each(places_of_runs(order, starts), num_ids, num_found)
        self._order = _of_each(order, num_ids, num_ids)
        self._starts = _of_each(starts[:-1], num_found, num_ids)

    def spread(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per feature, a row for each id, from a row for each different id."""
        found = list(rows)
        for group in self._groups(rows):
            places = _joined(group, self._places, self._num_found)
            each = _rows_of(group, rows).index_select(0, places)
            _put(found, group, each.split(self._num_ids[group].tolist()))
        return found

    def summed(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of different ids' rows."""
        found = list(grads)
        for group in self._groups(grads):
            order = _joined(group, self._order, self._num_ids)
            starts = _joined(group, self._starts, self._num_ids)
            edges = torch.nn.functional.pad(starts, (0, 1), value=order.shape[0])
            sums = segment_sums(_rows_of(group, grads), order, edges)
            _put(found, group, sums.split(self._num_found[group].tolist()))
        return found

    def _groups(self, rows: Sequence[torch.Tensor | None]) -> Iterator[list[int]]:
        """The features that have rows: those of one width, as many as fit the cache."""
        pairs = [(x.shape[1], feature) for feature, x in enumerate(rows) if x is not None]
        if not pairs:
            return
        widths, features = np.array(sorted(pairs)).T
        chunk = (self._num_ids[features] * widths).cumsum() // _CHUNK_NUMBERS
        changes = np.diff(widths, prepend=-1) | np.diff(chunk, prepend=-1)
        for group in np.split(features, np.flatnonzero(changes)[1:]):
            yield group.tolist()


def _of_each(
    numbers: torch.Tensor, lengths: np.ndarray, counted: np.ndarray
) -> Sequence[torch.Tensor]:
    """Per feature, `lengths[i]` of some numbers, which then count from its own first.

    Of what they count, it has `counted[i]`.
    """
    before = torch.from_numpy(counted.cumsum() - counted)
    shifts = spread(before, lengths, numbers.shape[0], numbers.device)
    return (numbers - shifts).split(lengths.tolist())


def _joined(
    group: Sequence[int], of_each: Sequence[torch.Tensor], counted: np.ndarray
) -> torch.Tensor:
    """The inverse for some features: they count from the first of these."""
    parts = [of_each[feature] for feature in group]
    if len(parts) == 1:
        return parts[0]
    lengths, found = np.array([part.shape[0] for part in parts]), torch.cat(parts)
    before = torch.from_numpy(counted[group].cumsum() - counted[group])
    return found.add_(spread(before, lengths, found.shape[0], found.device))


def _rows_of(group: Sequence[int], rows: Sequence[Any]) -> torch.Tensor:
    return rows[group[0]] if len(group) == 1 else torch.cat([rows[feature] for feature in group])


def _put(found: list[Any], group: Sequence[int], parts: Sequence[torch.Tensor]) -> None:
    for feature, part in zip(group, parts, strict=True):
        found[feature] = part


def without_repeats(bags: FeatureBags, num_rows: np.ndarray) -> tuple[FeatureBags, Repeats | None]:
    """An unpooled batch with each id of a feature once, where that pays.

    `num_rows` are the rows of each feature's table.
    """
    if bags.weights is not None or not bags.values.shape[0]:
        return bags, None
    counts = bags.ids_to - bags.ids_from
    ids = PerFeature(bags).declared_ids()
    first = np.cumsum([0, *num_rows])
    small = torch.int32 if first[-1] < 2**31 else torch.int64
    shifts = spread(torch.from_numpy(first[:-1]), counts, ids.shape[0], ids.device)
    found, order, starts = distinct((ids + shifts).to(small))
    if found.shape[0] > MOST_DIFFERENT * ids.shape[0]:
        return bags, None
    bounds = torch.from_numpy(first).to(found.device, small)
    edges = torch.searchsorted(found, bounds).cpu().numpy()
    num_found = np.diff(edges)
    shifts = spread(torch.from_numpy(first[:-1]), num_found, found.shape[0], found.device)
    left = replace(
        bags,
        values=found.to(bags.values.dtype) - shifts.to(bags.values.dtype),
        lengths=bags.lengths.new_ones(found.shape[0]),
        ids_from=edges[:-1],
        ids_to=edges[1:],
        bags_from=edges[:-1],
        num_bags=num_found,
        num_given=found.shape[0],
    )
    return left, Repeats(order, starts, counts, num_found)
