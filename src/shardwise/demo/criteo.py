"""Criteo's format: per line a label, 13 integers and 26 hexadecimal ids, separated by tabs.

A field may be empty. Lines that are not of this form are counted, and the first are named.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardwise.demo.clicks import NUM_DENSE, WIDTH, Batch
from shardwise.embedding import Jagged, Table
from shardwise.errors import ArgumentError

NUM_IDS = 26
MOST_ROWS = 20_000


@dataclass
class ClickFile:
    """The good lines of a file as numbers, and which lines were bad and why."""

    path: str
    labels: torch.Tensor
    dense: torch.Tensor
    #: One column per field; -1 where the field is empty.
    ids: torch.Tensor
    #: Line number -> what is wrong with it.
    bad: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def tables(self) -> list[Table]:
        """A table per field, as large as the field has ids; of many, some share a row."""
        return [
            Table(f"c{number + 1}", min(MOST_ROWS, self._num_ids(number)), WIDTH, pooling="mean")
            for number in range(NUM_IDS)
        ]

    def _num_ids(self, number: int) -> int:
        return max(1, len(self.ids[:, number].unique()))

    def batches(self, num: int, size: int) -> Iterator[Batch]:
        """That many batches; the file is begun again when it ends."""
        tables = self.tables()
        for start in range(0, num * size, size):
            rows = torch.arange(start, start + size) % len(self)
            yield Batch(self.dense[rows], _bags(self.ids[rows], tables), self.labels[rows])


def _bags(ids: torch.Tensor, tables: list[Table]) -> Jagged:
    values, lengths = [], []
    for number, table in enumerate(tables):
        column = ids[:, number]
        values.append(column[column >= 0] % table.num_embeddings)
        lengths.append((column >= 0).long())
    names = [table.name for table in tables]
    return Jagged(names, torch.cat(values), lengths=torch.cat(lengths))


def read_clicks(path: str) -> ClickFile:
    """Read a file; bad lines are left out and listed."""
    if not Path(path).is_file():
        raise ArgumentError(f"There is no file {path!r} to train on.")
    labels: list[int] = []
    dense: list[list[int]] = []
    ids: list[list[int]] = []
    bad: dict[int, str] = {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                label, counts, names = _fields(line.rstrip("\n"))
            except ValueError as error:
                bad[number] = str(error)
                continue
            labels.append(label)
            dense.append(counts)
            ids.append(names)
    if not labels:
        why = "; ".join(f"line {n}: {text}" for n, text in list(bad.items())[:3])
        raise ArgumentError(f"{path} has no line in Criteo's format. {why or 'It is empty.'}")
    counts_of = torch.tensor(dense, dtype=torch.float32).view(len(labels), NUM_DENSE)
    return ClickFile(
        path,
        torch.tensor(labels, dtype=torch.float32),
        counts_of.clamp_(min=0).log1p_(),
        torch.tensor(ids, dtype=torch.int64).view(len(labels), NUM_IDS),
        bad,
    )


def _fields(line: str) -> tuple[int, list[int], list[int]]:
    """
    >>> label, counts, ids = _fields("1" + 13 * "\\t2" + 25 * "\\t0a" + "\\t")
    >>> label, counts[0], ids[0], ids[-1]
    (1, 2, 10, -1)
    """
    fields = line.split("\t")
    wanted = 1 + NUM_DENSE + NUM_IDS
    if len(fields) != wanted:
        raise ValueError(f"{len(fields)} fields, not {wanted}")
    if fields[0] not in ("0", "1"):
        raise ValueError(f"the label is {fields[0]!r}, not 0 or 1")
    counts: list[int] = []
    names: list[int] = []
    for place, text in enumerate(fields[1:], start=2):
        integer = place <= 1 + NUM_DENSE
        try:
            number = int(text, 10 if integer else 16) if text else 0 if integer else -1
        except ValueError:
            kind = "an integer" if integer else "a hexadecimal id"
            raise ValueError(f"field {place} is {text!r}, not {kind}") from None
        if not integer and text and not 0 <= number < 2**63:
            raise ValueError(f"field {place} is {text!r}, not an id of at most 63 bits")
        (counts if integer else names).append(number)
    return int(fields[0]), counts, names
