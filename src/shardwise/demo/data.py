"""Click logs: a synthetic one whose true probabilities are known, and files in Criteo's format.

Ids of the synthetic log follow a power law: the r-th most frequent of a table is drawn about 1/r as
often as the first.
Every id has a hidden score and some have a hidden taste; the log-odds of a click are a sum of
scores, a product of the tastes of user and item, and a linear function of the dense features.

A line of Criteo's format has a label, 13 integers and 26 hexadecimal ids, separated by tabs. A
field may be empty. Lines of another form are counted, and the first are listed. Only the examples
that are used, and one line, are in memory.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

from shardwise.embedding import Jagged, Table
from shardwise.errors import ArgumentError

WIDTH = 16
NUM_DENSE = 13
HISTORY = 5

#: Name -> rows, from a table to shard to one to replicate.
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
    """A table per kind of id; the items' table has two features: the item shown, and those seen."""
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
        # Frequent ids are anywhere in a table, not in its first rows.
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
    """One id per bag, and a bag of the items that a user saw before."""
    values, lengths, features = [], [], []
    for table in tables():
        for feature in table.features:
            bag = seen if feature == "seen" else ids[feature][:, None]
            features.append(feature)
            values.append(bag.reshape(-1))
            lengths.append(torch.full((len(bag),), bag.shape[1]))
    return Jagged(features, torch.cat(values), lengths=torch.cat(lengths))


def best_loss(batches: Sequence[Batch]) -> float:
    """The loss of the true probabilities."""
    truth = torch.cat([b.truth for b in batches if b.truth is not None])
    clicks = torch.cat([b.clicks for b in batches])
    return float(torch.nn.functional.binary_cross_entropy_with_logits(truth, clicks))


# -- Criteo's format -------------------------------------------------------------------------

NUM_IDS = 26
MOST_ROWS = 20_000
#: Characters of a line; good ones have less than a tenth of this.
MAX_LINE = 16 << 10
#: How many bad lines are listed with what is wrong; the others are counted.
MOST_NAMED = 1000

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_HEXADECIMAL = re.compile(r"[0-9a-fA-F]{1,16}")


@dataclass
class ClickFile:
    """The good lines of a file as numbers, and which lines were bad and why."""

    path: str
    labels: torch.Tensor
    dense: torch.Tensor
    #: One column per field; -1 where the field is empty.
    ids: torch.Tensor
    #: Line number -> what is wrong with it, of the first bad lines.
    bad: dict[int, str] = field(default_factory=dict)
    num_bad: int = 0

    def __len__(self) -> int:
        return len(self.labels)

    def tables(self) -> list[Table]:
        """A table per field with a row per id, up to a limit: then some ids share a row."""
        return [
            Table(f"c{number + 1}", min(MOST_ROWS, self._num_ids(number)), WIDTH, pooling="mean")
            for number in range(NUM_IDS)
        ]

    def _num_ids(self, number: int) -> int:
        return max(1, len(self.ids[:, number].unique()))

    def batches(self, num: int, size: int) -> Iterator[Batch]:
        """`num` batches; at its end the file starts again."""
        tables = self.tables()
        for start in range(0, num * size, size):
            rows = torch.arange(start, start + size) % len(self)
            yield Batch(self.dense[rows], _criteo_bags(self.ids[rows], tables), self.labels[rows])


def _criteo_bags(ids: torch.Tensor, tables: list[Table]) -> Jagged:
    values, lengths = [], []
    for number, table in enumerate(tables):
        column = ids[:, number]
        values.append(column[column >= 0] % table.num_embeddings)
        lengths.append((column >= 0).long())
    names = [table.name for table in tables]
    return Jagged(names, torch.cat(values), lengths=torch.cat(lengths))


def read_clicks(path: str, most: int | None = None) -> ClickFile:
    """Read a file, or its first `most` examples; bad lines are left out and listed."""
    if not Path(path).is_file():
        raise ArgumentError(f"There is no file {path!r} to train on.")
    labels, dense, ids = array("b"), array("f"), array("q")
    bad: dict[int, str] = {}
    num_bad = 0
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        for number, line in enumerate(_lines(file), start=1):
            if most is not None and len(labels) >= most:
                break
            try:
                label, counts, names = _fields(line)
            except ValueError as error:
                num_bad += 1
                if num_bad <= MOST_NAMED:
                    bad[number] = str(error)
                continue
            labels.append(label)
            dense.extend(counts)
            ids.extend(names)
    if not labels:
        why = "; ".join(f"line {n}: {text}" for n, text in list(bad.items())[:3])
        raise ArgumentError(f"{path} has no line in Criteo's format. {why or 'It is empty.'}")
    counts_of = torch.frombuffer(dense, dtype=torch.float32).view(len(labels), NUM_DENSE)
    return ClickFile(
        path,
        torch.frombuffer(labels, dtype=torch.int8).float(),
        counts_of.clamp(min=0).log1p_(),
        torch.frombuffer(ids, dtype=torch.int64).view(len(labels), NUM_IDS),
        bad,
        num_bad,
    )


def _lines(file: TextIO) -> Iterator[str]:
    """The lines of a file without line ends; only the start of one that is too long."""
    while line := file.readline(MAX_LINE):
        rest = line
        while not rest.endswith("\n") and (rest := file.readline(MAX_LINE)):
            pass
        yield line.rstrip("\r\n")


def _fields(line: str) -> tuple[int, list[int], list[int]]:
    """
    >>> label, counts, ids = _fields("1" + 13 * "\\t2" + 25 * "\\t0a" + "\\t")
    >>> label, counts[0], ids[0], ids[-1]
    (1, 2, 10, -1)
    """
    if len(line) >= MAX_LINE:
        raise ValueError(f"it has {MAX_LINE} characters or more")
    fields = line.split("\t")
    wanted = 1 + NUM_DENSE + NUM_IDS
    if len(fields) != wanted:
        raise ValueError(f"{len(fields)} fields, not {wanted}")
    if fields[0] not in ("0", "1"):
        raise ValueError(f"the label is {fields[0][:40]!r}, not 0 or 1")
    counts = [_integer(text, place) for place, text in enumerate(fields[1:14], start=2)]
    names = [_id(text, place) for place, text in enumerate(fields[14:], start=15)]
    return int(fields[0]), counts, names


def _integer(text: str, place: int) -> int:
    if not text:
        return 0
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"field {place} is {text[:40]!r}, not an integer")
    return int(text)


def _id(text: str, place: int) -> int:
    if not text:
        return -1
    if _HEXADECIMAL.fullmatch(text) is None:
        raise ValueError(f"field {place} is {text[:40]!r}, not a hexadecimal id")
    number = int(text, 16)
    if number >= 2**63:
        raise ValueError(f"field {place} is {text!r}, not an id of at most 63 bits")
    return number
