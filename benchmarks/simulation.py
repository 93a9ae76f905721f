"""One training step of a column/row-wise MLP (256-1024-256), all ranks played in one process.

    .venv/bin/python -m benchmarks.simulation

Against torch's private LocalTensorMode, and against the plain step on one device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh

import shardwise as ours

BATCH = 64
RANKS = (2, 4, 8, 16, 64)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))


def sharded(system: Any, mesh: Any) -> nn.Sequential:
    model = mlp()
    plan = {"0.weight": 0, "0.bias": 0, "2.weight": 1, "2.bias": None}
    for path, dim in plan.items():
        module = model[int(path[0])]
        name = path[2:]
        placement = system.Replicate() if dim is None else system.Shard(dim)
        placed = system.distribute_tensor(getattr(module, name).detach(), mesh, [placement])
        setattr(module, name, nn.Parameter(placed))
    return model


def stepper(model: nn.Module, x: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return step


def seconds(step: Callable[[], None], num: int) -> float:
    start = time.thread_time()
    for _ in range(num):
        step()
    return (time.thread_time() - start) / num


@contextmanager
def torch_world(num_ranks: int) -> Iterator[Any]:
    from torch.distributed._local_tensor import LocalTensorMode, maybe_disable_local_tensor_mode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with LocalTensorMode(frozenset(range(num_ranks))):
            with maybe_disable_local_tensor_mode():
                mesh = init_device_mesh("cpu", (num_ranks,))
            yield mesh
    finally:
        dist.destroy_process_group()


def measure(num_ranks: int, x: torch.Tensor, num: int) -> tuple[float, float]:
    """Seconds of a step in each system, after one to warm up."""
    with ours.simulate(num_ranks):
        mesh = init_device_mesh("cpu", (num_ranks,))
        placed = ours.distribute_tensor(x, mesh, [ours.Replicate()])
        step = stepper(sharded(ours, mesh), placed)
        step()
        our_s = seconds(step, num)
    with torch_world(num_ranks) as mesh:
        placed = theirs.distribute_tensor(x, mesh, [theirs.Replicate()])
        step = stepper(sharded(theirs, mesh), placed)
        step()
        their_s = seconds(step, num)
    return our_s, their_s


def main() -> None:
    torch.set_num_threads(1)
    x = torch.randn(BATCH, 256)
    plain = stepper(mlp(), x)
    plain()
    table = Table(title="a step of a sharded MLP, one process")
    for column in (
        "ranks",
        "plain ms",
        "torch LocalTensorMode ms",
        "shardwise ms",
        "ours / theirs",
    ):
        table.add_column(column, justify="right")
    for num_ranks in RANKS:
        samples = []
        for _ in range(5):
            plain_s = seconds(plain, 5)
            samples.append((plain_s, *measure(num_ranks, x, 3)))
        plain_ms, our_ms, their_ms = (
            statistics.median(s) * 1e3 for s in zip(*samples, strict=True)
        )
        ratio = statistics.median(o / t for _, o, t in samples)
        table.add_row(
            str(num_ranks), f"{plain_ms:.1f}", f"{their_ms:.1f}", f"{our_ms:.1f}", f"{ratio:.2f}"
        )
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
