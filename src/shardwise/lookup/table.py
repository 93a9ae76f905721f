"""Table: the description of one table of a collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.errors import ArgumentError, LayoutError

POOLINGS = ("sum", "mean")
#: Orders of features that are remembered.
_KNOWN = 32


@dataclass(frozen=True, slots=True)
class Table:
    """A table by name, its size, how bags are pooled, and the features that look it up.

    Without `features`, the table has one feature of its own name.

    >>> Table("movie", 1000, 16, features=("watched", "liked"))
    Table(name='movie', num_embeddings=1000, embedding_dim=16, features=('watched', 'liked'), \
pooling='sum')
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    features: tuple[str, ...] = ()
    pooling: str = "sum"

    def __post_init__(self) -> None:
        for what, number in (
            ("num_embeddings", self.num_embeddings),
            ("embedding_dim", self.embedding_dim),
        ):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ArgumentError(
                    f"Table {self.name!r}: {what} must be a positive int, found {number!r}."
                )
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ArgumentError(
                f"A table's name is a text without dots (it names a parameter); found "
                f"{self.name!r}."
            )
        if isinstance(self.features, str):
            raise ArgumentError(f"Table {self.name!r}: features is a sequence of names, not text.")
        features = tuple(self.features) or (self.name,)
        object.__setattr__(self, "features", features)
        if self.pooling not in POOLINGS:
            raise LayoutError(
                f"Table {self.name!r}: pooling is one of {', '.join(POOLINGS)}; found "
                f"{self.pooling!r}."
            )


def checked_tables(tables: Sequence[Table]) -> tuple[Table, ...]:
    """The tables of a collection: names and features must each be unique."""
    found = tuple(tables)
    if not found:
        raise ArgumentError("A collection needs at least one Table.")
    for table in found:
        if not isinstance(table, Table):
            raise ArgumentError(f"A collection takes Tables, found {type(table).__name__}.")
    for what, names in (
        ("table", [t.name for t in found]),
        ("feature", [f for t in found for f in t.features]),
    ):
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise LayoutError(
                f"Every {what} of a collection has a name of its own; twice there: "
                f"{', '.join(twice)}."
            )
    return found


class Features:
    """The features of tables, in the declared order."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tables
        self.owners = {feature: table for table in tables for feature in table.features}
        #: The rows of each feature's table.
        self.num_rows = np.array([table.num_embeddings for table in self.owners.values()])
        self.fewest_rows = int(self.num_rows.min())
        self._places: dict[tuple[str, ...], np.ndarray | str] = {}

    def called(self, feature: str) -> str:
        """A feature, as errors name it."""
        return f"feature {feature!r} of table {self.owners[feature].name!r}"

    def places(self, given: tuple[str, ...]) -> np.ndarray | str:
        """Where each feature is among those of a batch; or what is wrong with those."""
        if given not in self._places:
            if len(self._places) > _KNOWN:
                self._places.clear()
            found: np.ndarray | str | None = self._wrong_names(given)
            if found is None:
                place_of = {feature: place for place, feature in enumerate(given)}
                found = np.array([place_of[feature] for feature in self.owners])
            self._places[given] = found
        return self._places[given]

    def _wrong_names(self, given: Sequence[str]) -> str | None:
        counts = Counter(given)
        unknown = [name for name in counts if name not in self.owners]
        if unknown:
            known = "; ".join(f"{t.name!r} has {', '.join(t.features)}" for t in self.tables)
            return f"feature {unknown[0]!r} belongs to no table; of the tables, {known}"
        twice = sorted(name for name, count in counts.items() if count > 1)
        if twice:
            return f"{self.called(twice[0])} is there more than once"
        missing = [name for name in self.owners if name not in counts]
        return f"{self.called(missing[0])} is missing" if missing else None
