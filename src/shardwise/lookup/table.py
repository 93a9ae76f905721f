"""Table: the description of one table of a collection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import ArgumentError, LayoutError

POOLINGS = ("sum", "mean")


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
