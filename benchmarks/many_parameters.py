"""A step over many small parameters, data-parallel and fully sharded: shardwise and torch.

    python -m benchmarks.many_parameters [--sizes 100 1000] [--repeats 40] [--json out.json]

Linear layers of 16 x 16, batch 8, so the times are mostly overhead. `data_parallel` and DDP run
forward and backward in two gloo processes, both sides in each, in turn; the time is the CPU time of
the first process, gloo's threads included. `fully_shard` of torch and of shardwise run on a fake
group of 4 ranks, with a group for every 10 layers; the last case clips gradients and steps, too.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.timing import Case, Result, add_options, measure, print_table, summarize, write_json
from shardwise.parallel import data_parallel, fully_shard

WIDTH, BATCH, NUM_LAYERS = 16, 8, 10
NUM_PROCESSES, NUM_RANKS, WARM_UP = 2, 4, 5


def model_of(num: int) -> nn.Sequential:
    """A model of as many parameters, in blocks of `NUM_LAYERS` layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
            for _ in range(num // (2 * NUM_LAYERS))
        )
    )


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Callable[[], Any]:
    """Forward and backward; with an optimizer, clipping and a step too."""
    parameters, x = list(model.parameters()), torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        if optimizer is not None:
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    return step


def _replicated(rank: int, num: int, repeats: int, port: int, out: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=NUM_PROCESSES)
    mesh = init_device_mesh("cpu", (NUM_PROCESSES,))
    actions = {
        "ours": stepping(data_parallel(model_of(num), mesh)),
        "theirs": stepping(nn.parallel.DistributedDataParallel(model_of(num))),
        "local": stepping(model_of(num)),
    }
    samples: dict[str, list[float]] = {side: [] for side in actions}
    gc.disable()
    for number in range(repeats + WARM_UP):
        for side, action in actions.items():
            dist.barrier()
            before = time.process_time()
            action()
            if number >= WARM_UP:
                samples[side].append(time.process_time() - before)
    if rank == 0:
        out.put(samples)
    dist.barrier()
    dist.destroy_process_group()


def replicated(num: int, repeats: int, port: int) -> Result:
    out = mp.get_context("spawn").SimpleQueue()
    mp.start_processes(
        _replicated, (num, repeats, port, out), nprocs=NUM_PROCESSES, start_method="spawn"
    )
    return summarize(f"data_parallel, {num} parameters", out.get())


def sharded_cases(mesh: DeviceMesh, num: int) -> Iterator[Case]:
    def sharding(shard: Callable[..., Any], *, steps: bool) -> Callable[[], Any]:
        model = model_of(num)
        for block in model:
            shard(block, mesh=mesh)
        shard(model, mesh=mesh)
        sgd = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, foreach=True)
        return stepping(model, sgd if steps else None)

    for steps, name in ((False, "fully_shard"), (True, "fully_shard, clipping and SGD")):
        ours, theirs = (sharding(each, steps=steps) for each in (fully_shard, torch_fully_shard))
        yield Case(f"{name}, {num} parameters", ours, theirs, stepping(model_of(num)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--port", type=int, default=29741)
    add_options(parser, repeats=40)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = [
        replicated(num, options.repeats, options.port + number)
        for number, num in enumerate(options.sizes)
    ]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        cases = (case for num in options.sizes for case in sharded_cases(mesh, num))
        results += [measure(case, max(3, options.repeats // 4)) for case in cases]
    finally:
        dist.destroy_process_group()
    print_table("one step of many small parameters", results)
    write_json(options.json, results, benchmark="many_parameters", num_ranks=NUM_RANKS, size=WIDTH)


if __name__ == "__main__":
    main()
