"""A click log with a planted truth: who clicks what is known, and can be learned.

Ids follow a power law: the r-th most frequent of a table is drawn about 1/r as often as the first.
Every id has a hidden score and some have a hidden taste; the log-odds of a click are a sum of
scores, a product of the tastes of user and item, and a linear function of the dense features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.embedding import Jagged, Table

WIDTH = 16
NUM_DENSE = 13
HISTORY = 5

#: Name -> rows, from a table that one would split to one that one would copy.
SIZES = {
    "user": 60_000,
    "item": 30_000,
    "campaign": 4_000,
    "city": 1_000,
    "category": 300,
    "device": 40,
    "hour": 24,
}


@dataclass(frozen=True)
class Batch:
    """Examples: dense features, bags of ids, clicks, and the log-odds that they were drawn from.

    Logs from elsewhere have no `truth`.
    """

    dense: torch.Tensor
    ids: Jagged
    clicks: torch.Tensor
    truth: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.clicks)


def tables() -> list[Table]:
    """A table per kind of id; items are looked up twice, as what is shown and as what was seen."""
    features = {"item": ("item", "seen")}
    return [
        Table(name, rows, WIDTH, features=features.get(name, (name,)), pooling="mean")
        for name, rows in SIZES.items()
    ]


class ClickLog:
    """Draws batches; the same seed gives the same log."""

    def __init__(self, seed: int) -> None:
        planted = torch.Generator().manual_seed(seed)
        self._draws = torch.Generator().manual_seed(seed + 1)
        # Frequent ids lie anywhere in a table, not in its first rows.
        self._order = {n: torch.randperm(rows, generator=planted) for n, rows in SIZES.items()}
        self._score = {n: torch.randn(rows, generator=planted) for n, rows in SIZES.items()}
        self._taste = {
            name: torch.randn(SIZES[name], 2, generator=planted) for name in ("user", "item")
        }
        self._dense = torch.randn(NUM_DENSE, generator=planted) / math.sqrt(NUM_DENSE)

    def batch(self, size: int) -> Batch:
        dense = torch.randn(size, NUM_DENSE, generator=self._draws)
        ids = {name: self._ids(name, size) for name in SIZES}
        seen = self._ids("item", size * HISTORY).view(size, HISTORY)
        truth = self._truth(dense, ids, seen)
        clicks = torch.rand(size, generator=self._draws) < truth.sigmoid()
        return Batch(dense, _bags(ids, seen), clicks.float(), truth)

    def batches(self, num: int, size: int) -> Iterator[Batch]:
        return (self.batch(size) for _ in range(num))

    def _ids(self, name: str, num: int) -> torch.Tensor:
        order = self._order[name]
        uniform = torch.rand(num, generator=self._draws, dtype=torch.float64)
        frequency_rank = ((len(order) + 1.0) ** uniform).long() - 1
        return order[frequency_rank.clamp_(0, len(order) - 1)]

    def _truth(
        self, dense: torch.Tensor, ids: dict[str, torch.Tensor], seen: torch.Tensor
    ) -> torch.Tensor:
        odds = dense @ self._dense
        for name, which in ids.items():
            odds = odds + 0.6 * self._score[name][which]
        odds = odds + 0.8 * self._score["item"][seen].mean(1)
        return odds + (self._taste["user"][ids["user"]] * self._taste["item"][ids["item"]]).sum(1)


def _bags(ids: dict[str, torch.Tensor], seen: torch.Tensor) -> Jagged:
    """One id per bag, and the items that a user saw before in a bag."""
    values, lengths, features = [], [], []
    for table in tables():
        for feature in table.features:
            bag = seen if feature == "seen" else ids[feature][:, None]
            features.append(feature)
            values.append(bag.reshape(-1))
            lengths.append(torch.full((len(bag),), bag.shape[1]))
    return Jagged(features, torch.cat(values), lengths=torch.cat(lengths))


def best_loss(batches: Sequence[Batch]) -> float:
    """The loss of someone who knows the planted truth."""
    truth = torch.cat([b.truth for b in batches if b.truth is not None])
    clicks = torch.cat([b.clicks for b in batches])
    return float(torch.nn.functional.binary_cross_entropy_with_logits(truth, clicks))
