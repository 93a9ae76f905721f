"""One training step of a sharded table against torch's DTensor: CPU seconds and bytes.

    python -m benchmarks.table --world 2 4

Both systems run the same step in the same gloo processes, in turn: a lookup in a 100k x 64 table
with a batch of ids that is sharded over the ranks, a loss, backward, and a gradient in the layout
of the table. CPU seconds are of the whole process (gloo's threads included); bytes are a rank's
input to collectives, as each system's ops pass it to torch.distributed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, COLUMNS, BATCH = 100_000, 64, 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    print(
        f"{'world':>5} {'table':<12} {'ids':<11} {'ms theirs':>9} {'ms ours':>8} {'ratio':>6} ",
        end="",
    )
    print(f"{'bytes theirs':>13} {'bytes ours':>11} {'ratio':>7}")
    for world in options.world:
        port = str(29_600 + os.getpid() % 300 + world)
        mp.spawn(_serve, (world, port, options.repeats), nprocs=world)


def _serve(rank: int, world: int, port: str, repeats: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for name in ("row-wise", "column-wise"):
        for placed in ("sharded", "replicated"):
            _compare(rank, world, name, placed, repeats)
    dist.destroy_process_group()


def _compare(rank: int, world: int, name: str, placed: str, repeats: int) -> None:
    steps = {side: _step(side, world, name, placed) for side in ("theirs", "ours")}
    num_bytes = {side: _bytes_of(step) for side, step in steps.items()}
    for step in steps.values():
        step()
    spent: dict[str, list[float]] = {"theirs": [], "ours": []}
    for _ in range(repeats):
        for side, step in steps.items():
            dist.barrier()
            start = time.process_time()
            step()
            spent[side].append(time.process_time() - start)
    # The cost of a step is the CPU seconds of all ranks together.
    both = torch.tensor([spent["theirs"], spent["ours"]], dtype=torch.float64)
    sent = torch.tensor([num_bytes["theirs"], num_bytes["ours"]], dtype=torch.float64)
    dist.all_reduce(both)
    dist.all_reduce(sent)
    if rank == 0:
        theirs, ours = both.tolist()
        ratio = statistics.median(b / a for a, b in zip(theirs, ours, strict=True))
        times = [statistics.median(side) * 1e3 / world for side in (theirs, ours)]
        a, b = (sent / world).tolist()
        print(
            f"{world:>5} {name:<12} {placed:<11} {times[0]:9.2f} {times[1]:8.2f} {ratio:6.2f} "
            f"{a:13,.0f} {b:11,.0f} {b / a if a else float('nan'):7.4f}",
            flush=True,
        )


def _step(side: str, world: int, name: str, placed: str) -> Callable[[], Any]:
    if side == "theirs":
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    else:
        from shardwise import Replicate, Shard, distribute_tensor  # type: ignore[assignment]
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    table = torch.nn.Parameter(
        distribute_tensor(torch.randn(ROWS, COLUMNS), mesh, [Shard(0 if name == "row-wise" else 1)])
    )
    batch = torch.randint(0, ROWS, (BATCH * world,))
    ids = distribute_tensor(batch, mesh, [Shard(0) if placed == "sharded" else Replicate()])
    wanted = table.placements

    def step() -> Any:
        rows = F.embedding(ids, table)
        if name == "row-wise" and placed == "replicated":
            rows = rows.redistribute(placements=[Replicate()])
        (grad,) = torch.autograd.grad(rows.sum(), table)
        return grad.redistribute(placements=wanted)

    return step


class _Sent(TorchDispatchMode):
    """Adds up the bytes of the tensors that collectives are called with."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ in ("DTensor", "AsyncCollectiveTensor") for kind in types):
            return NotImplemented  # their inner tensors arrive later
        if func.namespace == "_c10d_functional" and "wait" not in func.__name__:
            self.num_bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def _bytes_of(step: Callable[[], Any]) -> int:
    step()
    with _Sent() as sent:
        step()
    return sent.num_bytes


if __name__ == "__main__":
    main()
