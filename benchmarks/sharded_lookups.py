"""Lookups in a table sharded by spec: each rank's own batch, against torch's ShardedTensor.

    python -m benchmarks.sharded_lookups --world 2 --out lookups.json

Gloo processes, one thread each. A step is forward and backward of an EmbeddingBag; torch's and ours
alternate, and CPU seconds are summed over processes. The gradients of both are first compared with
those of one device.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ROWS, COLUMNS, BATCH, BAG = 100_000, 64, 2048, 15
WARM_UP, REPEATS = 2, 7

Step = Callable[[], torch.Tensor]


def ours(dim: int, mode: str, world: int, ids: torch.Tensor) -> Step:
    from shardwise.shard import ChunkShardingSpec, ShardingPlan, shard_module

    places = [f"rank:{rank}/cpu" for rank in range(world)]
    bag = nn.EmbeddingBag(ROWS, COLUMNS, mode=mode)
    plan = ShardingPlan({"weight": ChunkShardingSpec(dim, places)})
    shard_module(bag, plan, grad_reduction="sum")

    def step() -> torch.Tensor:
        bag.zero_grad()
        bag(ids).sum().backward()
        grad: Any = bag.weight.grad
        return grad.local_tensor()

    return step


def theirs(dim: int, mode: str, world: int, ids: torch.Tensor) -> Step:
    from torch.distributed._shard import shard_parameter
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    places: Any = [f"rank:{rank}/cpu" for rank in range(world)]
    bag = nn.EmbeddingBag(ROWS, COLUMNS, mode=mode)
    shard_parameter(bag, "weight", ChunkShardingSpec(dim, places))
    weight: Any = bag.weight
    local = weight.local_shards()[0].tensor

    def step() -> torch.Tensor:
        local.grad = None
        bag(ids).sum().backward()
        return local.grad

    return step


def expected(dim: int, mode: str, world: int, rank: int) -> torch.Tensor:
    """This rank's block of the gradient that one device has for all batches."""
    bag = nn.EmbeddingBag(ROWS, COLUMNS, mode=mode)
    for other in range(world):
        bag(batch(other)).sum().backward()
    grad = bag.weight.grad
    assert grad is not None, "every batch has ids"
    return grad.chunk(world, dim)[rank]


def batch(rank: int) -> torch.Tensor:
    return torch.randint(0, ROWS, (BATCH, BAG), generator=torch.Generator().manual_seed(rank))


CASES = [(0, "sum"), (0, "mean"), (0, "max"), (1, "sum"), (1, "mean"), (1, "max")]


def serve(rank: int, world: int, port: int, out: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    ids = batch(rank)
    results = []
    for dim, mode in CASES:
        torch.manual_seed(0)
        sides = {"ours": ours(dim, mode, world, ids)}
        torch.manual_seed(0)
        sides["theirs"] = theirs(dim, mode, world, ids)
        torch.manual_seed(0)
        wanted = expected(dim, mode, world, rank)
        right = {f"{n} right": torch.allclose(s(), wanted, atol=1e-5) for n, s in sides.items()}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(WARM_UP + REPEATS):
            for name, step in sides.items():
                dist.barrier()
                start = time.process_time()
                step()
                spent = torch.tensor([time.process_time() - start])
                dist.all_reduce(spent)
                if repeat >= WARM_UP:
                    seconds[name].append(spent.item())
        ratio = statistics.median(
            a / b for a, b in zip(seconds["ours"], seconds["theirs"], strict=True)
        )
        medians = {name: statistics.median(each) for name, each in seconds.items()}
        results.append({"dim": dim, "mode": mode, "ratio": ratio, **right, **medians})
    if rank == 0:
        Path(out).write_text(json.dumps(results, indent=1))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--port", type=int, default=29_611)
    parser.add_argument("--out", default="sharded_lookups.json")
    opt = parser.parse_args()
    mp.spawn(serve, (opt.world, opt.port, opt.out), nprocs=opt.world)
    print("cut     mode    torch    ours   ratio   gradients right: torch, ours")
    for r in json.loads(Path(opt.out).read_text()):
        cut = "rows" if r["dim"] == 0 else "columns"
        right = f"{r['theirs right']}, {r['ours right']}"
        print(f"{cut:8}{r['mode']:5}{r['theirs']:8.3f}{r['ours']:8.3f}{r['ratio']:8.2f}   {right}")


if __name__ == "__main__":
    main()
