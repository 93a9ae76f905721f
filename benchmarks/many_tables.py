"""Sharding, and one step of all ranks of a simulated world, with few and with many tables.

python -m benchmarks.many_tables --ranks 64 --tables 100 1000
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch

import shardwise
from shardwise import LocalTensor
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, Table

ROWS, BAGS, IDS, STEPS = 200, 4, 2, 3


def measure(kind: str, num_ranks: int, num_tables: int) -> tuple[float, float]:
    """CPU seconds of sharding, and of the fastest step."""
    dim = num_ranks if kind == "column_wise" else 8
    tables = [Table(f"t{i}", ROWS, dim) for i in range(num_tables)]
    bags = EmbeddingBagCollection(tables, output="tensor", optimizer=SGD(0.1), device="meta")
    start = time.process_time()
    bags.shard(shardwise.init_device_mesh("cpu", (num_ranks,)), kind)
    shard_s = time.process_time() - start
    lengths = torch.full((num_tables * BAGS,), IDS)
    ids = LocalTensor.per_rank(lambda _: torch.randint(ROWS, (num_tables * BAGS * IDS,)))
    steps = []
    for _ in range(STEPS):
        start = time.process_time()
        bags(Jagged(bags.features, ids, lengths=lengths)).sum().backward()
        steps.append(time.process_time() - start)
    return shard_s, min(steps)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tables", type=int, nargs="+", default=[100, 1000])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for kind in ("table_wise", "row_wise", "column_wise"):
        for num_tables in options.tables:
            with shardwise.simulate(options.ranks):
                shard_s, step_s = measure(kind, options.ranks, num_tables)
            print(f"{kind:<12} {num_tables:5} tables: shard {shard_s:.2f} s, step {step_s:.2f} s")


if __name__ == "__main__":
    main()
