"""One training step of 26 tables: sharded collections, torchrec, DDP and torch's DTensor.

    python -m benchmarks.embedding --worlds 2 4

Gloo processes on this machine, one thread each. The sides of a case take turns, so that a slow
phase of the machine hits all of them, and ratios are medians of the turns' own ratios. CPU seconds
are summed over ranks (all threads of the processes); bytes are what the processes' sockets sent, as
the kernel counts them; memory is a rank's peak above its use before the tables were made. The floor
reads the rows, sends the bytes and adds to the rows, with all else done beforehand. torchrec's rows
need `torchrec` and `fbgemm-gpu-cpu`, and are left out without them.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import socket
import statistics
import struct
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.embedding_sides import Sizes, make_step

WARM_UP = 2
NUM_BATCHES = 3


@dataclass(frozen=True, slots=True)
class Side:
    """One of those that are compared in a case."""

    name: str
    kind: str
    optimizer: str

    def __str__(self) -> str:
        return f"{self.name} {self.kind}, {self.optimizer}"


@dataclass(frozen=True, slots=True)
class Turn:
    """Some steps of one rank: per step."""

    cpu_s: float
    wall_s: float
    sent_bytes: float
    loss: float
    peak_bytes: int


def cases(wanted: Sequence[str]) -> list[list[Side]]:
    """Groups of sides that take turns with each other."""
    rival = ["torchrec"] if importlib.util.find_spec("torchrec") else []
    # The default compiles a kernel for row-wise Adagrad where there is a compiler.
    plain = ["shardwise, fbgemm's kernels", "shardwise, torch kernels"]
    plain = plain if importlib.util.find_spec("fbgemm_gpu") else plain[1:]
    found: dict[str, list[Side]] = {}
    for kind in ("table_wise", "column_wise", "row_wise"):
        for optimizer in ("sgd", "row-wise adagrad"):
            names = ["shardwise", *rival, *(["floor"] if optimizer == "sgd" else plain)]
            sides = [Side(name, kind, optimizer) for name in names]
            found[f"{kind}/{optimizer}"] = sides
    found["ordinary"] = [
        *(Side("shardwise", k, "torch SGD") for k in ("table_wise", "column_wise", "row_wise")),
        Side("DDP", "sparse", "torch SGD"),
    ]
    found["dense"] = [Side("shardwise", "row_wise", "torch SGD"), Side("DDP", "dense", "torch SGD")]
    for kind in ("column_wise", "row_wise"):
        found[f"dtensor/{kind}"] = [
            Side("shardwise", kind, "torch SGD"),
            Side("torch DTensor", kind, "torch SGD"),
        ]
    return [sides for name, sides in found.items() if not wanted or any(w in name for w in wanted)]


# -- in the processes ------------------------------------------------------------------------


def _serve(rank: int, world: int, port: int, side: Side, sizes: Sizes, pipe: Connection) -> None:
    warnings.filterwarnings("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    wait = timedelta(seconds=600)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
    before = _resident_bytes("VmRSS")
    step = make_step(side.name, sizes, kind=side.kind, optimizer=side.optimizer)
    draw = torch.Generator().manual_seed(rank)
    num_ids = sizes.tables * sizes.batch * sizes.ids
    batches = [
        (
            torch.randint(sizes.rows, (num_ids,), generator=draw),
            torch.randn(sizes.batch, sizes.tables * sizes.dim, generator=draw),
        )
        for _ in range(NUM_BATCHES)
    ]
    _forget_peak()
    done = 0
    pipe.send("ready")
    while (num := pipe.recv()) is not None:
        sent, cpu, wall = _sent_bytes(), time.process_time(), time.perf_counter()
        loss = 0.0
        for _ in range(num):
            loss = step(*batches[done % NUM_BATCHES])
            done += 1
        dist.barrier()
        pipe.send(
            Turn(
                (time.process_time() - cpu) / num,
                (time.perf_counter() - wall) / num,
                (_sent_bytes() - sent) / num,
                loss,
                _resident_bytes("VmHWM") - before,
            )
        )


def _resident_bytes(what: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {what}")


def _forget_peak() -> None:
    """What was used while the tables were made does not count."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _sent_bytes() -> int:
    """What this process sent through TCP: the kernel's count, for every socket it has open."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            copy = socket.socket(fileno=os.dup(int(name)))
        except OSError:
            continue
        with copy:
            if copy.family in (socket.AF_INET, socket.AF_INET6):
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


# -- in the parent ---------------------------------------------------------------------------


class Ranks:
    """The processes of one side."""

    def __init__(self, side: Side, world: int, sizes: Sizes) -> None:
        self.side = side
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world):
            here, there = context.Pipe()
            args = (rank, world, self._store.port, side, sizes, there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, num_steps: int) -> list[Turn]:
        for pipe in self._pipes:
            pipe.send(num_steps)
        return [pipe.recv() for pipe in self._pipes]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@dataclass(frozen=True, slots=True)
class Result:
    """Medians over turns; CPU summed over ranks, the rest of the rank that has most."""

    world: int
    name: str
    kind: str
    optimizer: str
    cpu_s: float
    wall_s: float
    examples_per_s: float
    sent_mb: float
    peak_mb: float
    loss: float
    #: CPU seconds of the first side of the case over this one's.
    cpu_ratio: float


def measure(sides: Sequence[Side], world: int, sizes: Sizes, repeats: int) -> list[Result]:
    ranks = [Ranks(side, world, sizes) for side in sides]
    try:
        for each in ranks:
            each.run(WARM_UP)
        turns: list[list[list[Turn]]] = [[] for _ in sides]
        for _ in range(repeats):
            for number, each in enumerate(ranks):
                turns[number].append(each.run(2))
    finally:
        for each in ranks:
            each.stop()
    cpu = [[sum(t.cpu_s for t in turn) for turn in of_side] for of_side in turns]
    results = []
    for number, side in enumerate(sides):
        wall = statistics.median(max(t.wall_s for t in turn) for turn in turns[number])
        last = turns[number][-1]
        results.append(
            Result(
                world,
                side.name,
                side.kind,
                side.optimizer,
                statistics.median(cpu[number]),
                wall,
                sizes.batch * world / wall,
                max(t.sent_bytes for t in last) / 1e6,
                max(t.peak_bytes for t in last) / 1e6,
                statistics.fmean(t.loss for t in last),
                statistics.median(a / b for a, b in zip(cpu[0], cpu[number], strict=True)),
            )
        )
    return results


def show(results: Sequence[Result]) -> None:
    table = Table(title="One step", box=box.SIMPLE_HEAD)
    table.add_column("world, side")
    for column in ("CPU s", "wall s", "examples/s", "MB sent", "peak MB", "loss", "ours / this"):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            f"{r.world}  {r.name} {r.kind}, {r.optimizer}",
            f"{r.cpu_s:.3f}",
            f"{r.wall_s:.3f}",
            f"{r.examples_per_s:.0f}",
            f"{r.sent_mb:.1f}",
            f"{r.peak_mb:.0f}",
            f"{r.loss:.4f}",
            f"{r.cpu_ratio:.2f}",
        )
    Console(width=130).print(table)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--cases", nargs="*", default=[], help="parts of names; all without")
    parser.add_argument("--sides", nargs="*", default=[], help="names; all without")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rows", type=int, default=Sizes().rows)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    sizes = Sizes(rows=options.rows)
    results: list[Result] = []
    for world in options.worlds:
        for sides in cases(options.cases):
            sides = [s for s in sides if not options.sides or s.name in options.sides]
            found = measure(sides, world, sizes, options.repeats)
            show(found)
            results += found
    if options.json:
        about: dict[str, Any] = {"torch": torch.__version__, "sizes": asdict(sizes)}
        about["results"] = [asdict(r) for r in results]
        options.json.write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
