"""Check a batch on the device: bags that do not fit their ids, and ids out of range.

Note [Records]
The check writes a small record, and nobody waits for it. Lookups of an invalid batch stay within
its ids, and updates change no row. So the host may learn of it later: the lookup, the next launch
after the check, writes one number to memory of the host, the ticket of the batch and whether it is
invalid. So the host knows without asking the device, for which every question takes microseconds.

A record begins with zeros: whether the batch is invalid; how far from the end of all bags the first
wrong one is; the same of ids. Records come in blocks, which are cleared at once.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from shardwise.kernels.launch import is_captured
from shardwise.kernels.memory import num_pieces
from shardwise.kernels.tables import IdBags, TableSet

#: Numbers of a record.
WIDTH = 4
#: Records that are cleared at a time.
_BLOCK_OF_RECORDS = 256
#: Ids or bags that a program checks at a time, and the number of programs, about.
_BLOCK = 1024
_PROGRAMS = 4096


class Record(NamedTuple):
    """What the kernels write and read, and where the host sees that they did."""

    numbers: torch.Tensor
    seen: torch.Tensor | None
    ticket: int

    def has_arrived(self) -> bool:
        return self.seen is not None and int(self.seen) >> 1 == self.ticket

    def is_invalid(self) -> bool:
        """Whether the batch is invalid, once the answer has arrived."""
        return self.seen is not None and int(self.seen) & 1 == 1


class Records:
    """A supply of cleared records."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._left: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tickets = itertools.count(1)
        #: What replays of graphs found: each clears its own record only.
        self.of_graphs = torch.zeros(WIDTH, dtype=torch.int64, device=device)
        self._fill()

    def _fill(self) -> None:
        num, pinned = _BLOCK_OF_RECORDS, self.device.type == "cuda"
        block = torch.zeros(num, WIDTH, dtype=torch.int64, device=self.device)
        seen = torch.zeros(num, WIDTH, dtype=torch.int64, pin_memory=pinned)
        self._left = list(zip(block.unbind(), seen[:, 0].unbind(), strict=True))

    def take(self) -> Record:
        if not self._left:
            self._fill()
        numbers, seen = self._left.pop()
        if is_captured(self.device):  # each replay clears it
            numbers = torch.zeros_like(numbers)
        return Record(numbers, seen, next(self._tickets))

    def add_to_graphs(self, record: Record) -> None:
        """Keep what a replay finds."""
        torch.maximum(self.of_graphs, record.numbers, out=self.of_graphs)


def check_bags(
    tables: TableSet,
    bags: IdBags,
    record: torch.Tensor,
    *,
    padded: bool,
) -> None:
    """Write to `record` whether bags and ids are valid.

    With `padded`, there may be ids after the last bag. See Note [Records].
    """
    ids, offsets, first_bag, _, rows = bags
    assert offsets is not None, "bags that are checked have offsets"
    num_features, num_bags, num_ids = first_bag.numel() - 1, offsets.numel() - 1, ids.numel()
    features = tables.features(rows)
    pieces = num_pieces(max(num_ids, num_bags), _BLOCK * num_features)
    tables.launches.run(
        _check_bags,
        (max(1, min(pieces, num_pieces(_PROGRAMS, num_features))), num_features),
        (features, first_bag, offsets, ids, record),
        (num_bags, num_ids),
        (padded, features.shape[1], _BLOCK),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_bags", "num_ids"])
def _check_bags(
    features,
    first_bag,
    offsets,
    ids,
    record,
    num_bags,
    num_ids,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, f): every n-th block of the bags and of the ids of feature f."""
    number = tl.program_id(1)
    first = tl.load(first_bag + number).to(tl.int64)
    last = tl.load(first_bag + number + 1).to(tl.int64)
    here = tl.arange(0, BLOCK)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    for i in range(first + begin, last, step):
        bag = i + here
        inside = bag < last
        start = tl.load(offsets + bag, mask=inside, other=0).to(tl.int64)
        end = tl.load(offsets + bag + 1, mask=inside, other=0).to(tl.int64)
        wrong = inside & ((end < start) | (start < 0) | (end > num_ids))
        wrong = wrong | (inside & (bag == 0) & (start != 0))
        if not PADDED:
            wrong = wrong | (inside & (bag == num_bags - 1) & (end != num_ids))
        found = tl.max(tl.where(wrong, num_bags - bag, 0), 0)
        if found > 0:
            tl.atomic_max(record + 1, found)
            tl.store(record, 1)
    low = tl.minimum(tl.maximum(tl.load(offsets + first).to(tl.int64), 0), num_ids)
    high = tl.minimum(tl.maximum(tl.load(offsets + last).to(tl.int64), 0), num_ids)
    num_rows = tl.load(features + number * COLUMNS + 1)
    for i in range(low + begin, high, step):
        at = i + here
        inside = at < high
        row = tl.load(ids + at, mask=inside, other=0).to(tl.int64)
        wrong = inside & ((row < 0) | (row >= num_rows))
        found = tl.max(tl.where(wrong, num_ids - at, 0), 0)
        if found > 0:
            tl.atomic_max(record + 2, found)
            tl.store(record, 1)
