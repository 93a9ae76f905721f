"""The tasks of the planner's benchmark: sets of tables, numbers of ranks, memory per rank.

Plain Python, so that torchrec's process can import it too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

#: MLPerf's DLRM on Criteo 1 TB: rows of its 26 tables of dim 128, and ids per bag (multi-hot).
DLRM_ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209,
    11938, 155, 4, 976, 14, 40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
DLRM_IDS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
#: Meta's 2021 set: 887,017,990 ids in one batch of 65,536 over 856 tables.
IDS_PER_BAG = 887_017_990 / 65_536 / 856


@dataclass(frozen=True)
class TaskTable:
    name: str
    rows: int
    dim: int
    ids_per_bag: float

    @property
    def num_bytes(self) -> int:
        return self.rows * self.dim * 4


@dataclass(frozen=True)
class Task:
    name: str
    tables: tuple[TaskTable, ...]
    ranks: int
    ranks_per_host: int
    #: Bytes of a rank's memory.
    memory: int
    #: Bags of each feature on each rank.
    batch: int = 1024


def dlrm_tables() -> tuple[TaskTable, ...]:
    pairs = zip(DLRM_ROWS, DLRM_IDS, strict=True)
    return tuple(TaskTable(f"t{i}", rows, 128, float(ids)) for i, (rows, ids) in enumerate(pairs))


def drawn_tables(number: int, seed: int) -> tuple[TaskTable, ...]:
    """Tables with heavy-tailed rows, and as many ids per bag as Meta's on average."""
    draw = random.Random(seed)
    found = []
    for index in range(number):
        rows = int(min(max(math.exp(draw.gauss(12.5, 2.2)), 50), 30_000_000))
        dim = draw.choice((32, 64, 64, 96, 128, 128, 128, 256))
        ids = math.exp(draw.gauss(math.log(IDS_PER_BAG) - 0.72, 1.2))
        found.append(TaskTable(f"t{index}", rows, dim, round(min(max(ids, 1.0), 200.0), 2)))
    return tuple(found)


def task(tables: tuple[TaskTable, ...], name: str, ranks: int, room: float) -> Task:
    """`room` is how many times the tables would fit into the memory of all ranks."""
    whole = sum(table.num_bytes for table in tables)
    memory = int(room * whole / ranks) + (1 << 30)
    word = "tight" if room < 2 else "loose"
    return Task(f"{name} x {ranks} {word}", tables, ranks, min(8, ranks), memory)


def tasks() -> list[Task]:
    """Thirty of them."""
    found = []
    for ranks in (8, 16, 32):
        for room in (1.3, 4.0):
            found.append(task(dlrm_tables(), "dlrm 26", ranks, room))
    drawn = [
        (20, 8), (20, 16), (40, 8), (40, 16), (60, 8), (60, 32), (80, 16), (100, 8), (100, 16),
        (60, 64), (40, 128), (200, 8),
    ]  # fmt: skip
    for seed, (number, ranks) in enumerate(drawn):
        for room in (1.3, 4.0):
            found.append(task(drawn_tables(number, seed), f"drawn {number}", ranks, room))
    return found


def large_task(number: int, ranks: int, room: float = 2.0) -> Task:
    return task(drawn_tables(number, 1000), f"drawn {number}", ranks, room)
