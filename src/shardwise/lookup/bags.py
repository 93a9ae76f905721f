"""FeatureBags: one rank's checked batch, as the exchange takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from shardwise.lookup.order import distinct, places_of_runs, segment_sums, spread


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

    def ids_of(self, feature: int) -> torch.Tensor:
        return self.values[self.ids_from[feature] : self.ids_to[feature]]

    def lengths_of(self, feature: int) -> torch.Tensor:
        start = self.bags_from[feature]
        return self.lengths[start : start + self.num_bags[feature]]


def bags_of_one(
    ids: torch.Tensor, lengths: torch.Tensor, weights: torch.Tensor | None, *, train: bool
) -> FeatureBags:
    """The bags of a single feature."""
    num, zero = ids.shape[0], np.array([0])
    ends, bags = np.array([num]), np.array([lengths.shape[0]])
    return FeatureBags(ids, lengths, weights, zero, ends, zero, bags, train, num)


#: The largest share of different ids with which it pays to leave out those that repeat.
MOST_DIFFERENT = 0.9


class Repeats:
    """Which ids of an unpooled batch repeat; see Note [Repeated ids] in `messages`."""

    def __init__(self, order: torch.Tensor, starts: torch.Tensor, edges: np.ndarray) -> None:
        """`order` sorts the ids of all features, in which each different id begins at `starts`.

        The different ids of feature i are numbers `edges[i]` to `edges[i + 1]`.
        """
        self._edges = edges.tolist()
        first_id = starts[torch.from_numpy(edges).to(starts.device)].tolist()
        self._num_ids = np.diff(first_id)
        bounds = list(zip(self._edges, self._edges[1:], strict=False))
        places = places_of_runs(order, starts)
        #: Per feature: the place of each id among the different ones; and the ids in order, with
        #: where each different one begins.
        self._places = self._from_feature(places, self._edges[:-1])
        self._order = self._from_feature(order, first_id[:-1])
        self._starts = [starts[a : b + 1] - n for (a, b), n in zip(bounds, first_id, strict=False)]

    def _from_feature(self, numbers: torch.Tensor, first: list[int]) -> Sequence[torch.Tensor]:
        """Numbers per id, counted from the first of each feature."""
        shifts = spread(torch.tensor(first), self._num_ids, numbers.shape[0], numbers.device)
        return (numbers - shifts).split(self._num_ids.tolist())

    def spread(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per feature, a row for each id, from a row for each different id."""
        return list(map(torch.index_select, rows, [0] * len(rows), self._places))

    def summed(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of different ids' rows."""
        return [
            None if grad is None else segment_sums(grad, order, starts)
            for grad, order, starts in zip(grads, self._order, self._starts, strict=True)
        ]


def without_repeats(bags: FeatureBags, num_rows: np.ndarray) -> tuple[FeatureBags, Repeats | None]:
    """An unpooled batch with each id of a feature once, where that pays.

    `num_rows` are the rows of each feature's table.
    """
    if bags.weights is not None or not bags.values.shape[0]:
        return bags, None
    counts = bags.ids_to - bags.ids_from
    ids = torch.cat([bags.ids_of(feature) for feature in range(len(num_rows))])
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
    return left, Repeats(order, starts, edges)
