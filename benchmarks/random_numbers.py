"""What one device's random numbers cost: a draw on rank 0 of 8, by the thread's CPU clock.

    .venv/bin/python -m benchmarks.random_numbers

shardwise in both modes is compared with the same draw on one device, torch's DTensor (whose values
are not those of one device), and a plain draw of the local shard, the lower bound.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours
from benchmarks.timing import take_turns

NUM_RANKS = 8
Fn = Callable[[Any], Any]

DRAWS: dict[str, Fn] = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "dropout": lambda t: F.dropout(t, 0.5),
}
SIDES = ("one device", "local part", "torch DTensor", "shardwise, fast", "shardwise")


def actions(fn: Fn, size: int, dim: int, mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    whole = torch.ones(size, size)
    part = whole.chunk(NUM_RANKS, dim)[0].clone()
    sharded = ours.DTensor.from_local(part.clone(), mesh, [ours.Shard(dim)])
    their = theirs.DTensor.from_local(part.clone(), mesh, [theirs.Shard(dim)])

    def fast() -> None:
        with ours.rng("fast"):
            fn(sharded)

    return dict(
        zip(
            SIDES,
            (lambda: fn(whole), lambda: fn(part), lambda: fn(their), fast, lambda: fn(sharded)),
            strict=True,
        )
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="slices per callable")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    table = Table("draw", *(f"{side}, ms" for side in SIDES), title=f"rank 0 of {NUM_RANKS}")
    try:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        for size in (64, 4096):
            for dim in (0, 1):
                for name, fn in DRAWS.items():
                    sides = actions(fn, size, dim, mesh)
                    samples = take_turns(sides, options.repeats)
                    medians = [statistics.median(samples[side]) for side in SIDES]
                    label = f"{name}, {size} x {size}, Shard({dim})"
                    table.add_row(label, *(f"{1000 * s:.3g}" for s in medians))
    finally:
        dist.destroy_process_group()
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
