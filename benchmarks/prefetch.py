"""How long a step waits for ids, by when the batch was prefetched.

    python -m benchmarks.prefetch

Gloo processes on this machine, one thread each, train tables and a dense part; the variants take
turns. Two times are measured: `prefetch` itself, which checks and packs a batch, and how long a
step then waits for the ids, which take two exchanges if nothing hides them. Medians over steps of
the mean over ranks.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table as Lines

import shardwise
from benchmarks.embedding_sides import Sizes
from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, Table

WAYS = ("not at all", "after the forward pass", "before the forward pass")
WARM_UP = 1

#: Per variant and turn: the seconds that `prefetch` took, and the seconds of waiting.
Times = dict[str, list[tuple[float, float]]]


class Model:
    """Tables, and a dense part of some layers."""

    def __init__(self, sizes: Sizes, kind: str, layers: int) -> None:
        mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
        tables = [Table(f"t{i}", sizes.rows, sizes.dim) for i in range(sizes.tables)]
        bags = EmbeddingBagCollection(tables, output="tensor", optimizer=SGD(0.1))
        self.bags = bags.shard(mesh, kind)
        width = sizes.tables * sizes.dim
        self.dense = torch.nn.Sequential(
            *[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
        )
        self.lengths = torch.full((sizes.tables * sizes.batch,), sizes.ids)

    def batch(self, ids: torch.Tensor) -> Jagged:
        return Jagged(self.bags.features, ids, lengths=self.lengths)


class Clock:
    """What the parts of a step took."""

    def __init__(self) -> None:
        self.packed_s = self.waited_s = 0.0

    def prefetch(self, model: Model, ids: torch.Tensor) -> Any:
        begin = time.perf_counter()
        ahead = model.bags.prefetch(model.batch(ids))
        self.packed_s = time.perf_counter() - begin
        return ahead

    def arrive(self, ahead: Any) -> None:
        begin = time.perf_counter()
        ahead.arrive()
        self.waited_s = time.perf_counter() - begin


def three_steps(model: Model, way: str, ids: torch.Tensor) -> tuple[float, float]:
    """The first fills the pipe, the second is timed, the third empties the pipe."""
    clock, found = Clock(), (0.0, 0.0)
    ahead = clock.prefetch(model, ids)
    for number in range(3):
        following = None
        if way == WAYS[2] and number < 2:
            following = clock.prefetch(model, ids)
        clock.arrive(ahead)
        loss = model.dense(model.bags(ahead)).square().mean()
        if way == WAYS[1] and number < 2:
            following = clock.prefetch(model, ids)
        loss.backward()
        model.dense.zero_grad()
        if number == 1:
            found = clock.packed_s, clock.waited_s
        if number < 2:
            ahead = clock.prefetch(model, ids) if following is None else following
    return found


def _serve(
    rank: int, world: int, port: int, kind: str, sizes: Sizes, layers: int, turns: int, pipe: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    model = Model(sizes, kind, layers)
    draw = torch.Generator().manual_seed(rank)
    num_ids = sizes.tables * sizes.batch * sizes.ids
    ids = torch.randint(sizes.rows, (num_ids,), generator=draw)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(WARM_UP + turns):
        for way in WAYS:
            times = three_steps(model, way, ids)
            if turn >= WARM_UP:
                found[way].append(times)
    pipe.send(found)
    dist.destroy_process_group()


def measure(world: int, kind: str, sizes: Sizes, layers: int, turns: int) -> list[Times]:
    """What each rank found."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    started = []
    for rank in range(world):
        here, there = context.Pipe()
        given = (rank, world, store.port, kind, sizes, layers, turns, there)
        process = context.Process(target=_serve, args=given, daemon=True)
        process.start()
        pipes.append(here)
        started.append(process)
    found: list[Times] = [pipe.recv() for pipe in pipes]
    for process in started:
        process.join()
    return found


def middle_ms(found: Sequence[Times], way: str, part: int) -> float:
    """The median over turns of the mean over ranks."""
    per_turn = zip(*(each[way] for each in found), strict=True)
    return 1e3 * statistics.median(statistics.mean(t[part] for t in turn) for turn in per_turn)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kinds", nargs="+", default=["table_wise", "row_wise"])
    parser.add_argument("--layers", type=int, default=1, help="of the dense part")
    parser.add_argument("--turns", type=int, default=10)
    options = parser.parse_args(arguments)
    sizes = Sizes(rows=10_000, dim=16)
    lines = Lines("world", "kind", "prefetched", "prefetch, ms", "wait, ms", box=box.SIMPLE)
    for world in options.worlds:
        for kind in options.kinds:
            found = measure(world, kind, sizes, options.layers, options.turns)
            for way in WAYS:
                times = [f"{middle_ms(found, way, part):.1f}" for part in (0, 1)]
                lines.add_row(str(world), kind, way, *times)
    Console().print(lines)


if __name__ == "__main__":
    main()
