"""A training step, fully sharded: shardwise and torch's `fully_shard` in the same processes.

    python -m benchmarks.fully_shard [--ranks 2] [--repeats 5] [--json out.json]

A transformer of 12 layers and 50M parameters on gloo processes of this machine; each layer is a
group, and so is the rest. Both sides train copies of one model with the same batches. Reported per
rank and step: seconds of CPU, bytes that a ring sends, and the largest growth of the process's
memory over what it holds before training. `--copies` counts bytes that each side copies around its
collectives instead, on a fake group of 4 ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.parallel import fully_shard

WIDTH, NUM_LAYERS, NUM_HEADS, NUM_TOKENS = 512, 12, 8, 24_000
BATCH, POSITIONS = 2, 32


class Layer(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        mixed = F.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(
        self,
        width: int = WIDTH,
        num_layers: int = NUM_LAYERS,
        num_heads: int = NUM_HEADS,
        num_tokens: int = NUM_TOKENS,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.layers = nn.ModuleList(Layer(width, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(1).flatten())


def _ours(model: Model, mesh: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh)
    return fully_shard(model, mesh)


def _torchs(model: Model, mesh: Any) -> nn.Module:
    for layer in model.layers:
        torch_fully_shard(layer, mesh=mesh)
    return torch_fully_shard(model, mesh=mesh)


SIDES: dict[str, Callable[[Model, Any], nn.Module]] = {"shardwise": _ours, "torch": _torchs}


class Sent(TorchDispatchMode):
    """Counts the bytes that collectives of c10d and their functional forms send, as rings do."""

    def __init__(self, num_ranks: int) -> None:
        super().__init__()
        self.num_bytes, self.num_calls, self.num_ranks = 0, 0, num_ranks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._overloadpacket.__name__
        whole = None
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            size = args[0].numel() * args[0].element_size()
            whole = size * (self.num_ranks if "gather" in name else 1)
            whole *= 2 if "all_reduce" in name else 1
            if "all_to_all" in name and args[2][dist.get_rank()] == 0:  # all of it is sent
                whole = size * self.num_ranks // (self.num_ranks - 1)
        elif func.namespace == "c10d":
            sent = args[0] if "allreduce" in name else args[1] if "_base" in name else None
            sent = sent[0] if isinstance(sent, (list, tuple)) else sent
            if sent is not None:
                size = sent.numel() * sent.element_size()
                whole = size * (self.num_ranks if "gather" in name else 1)
                whole *= 2 if "allreduce" in name else 1
        if whole is not None:
            self.num_bytes += whole * (self.num_ranks - 1) // self.num_ranks
            self.num_calls += 1
        return func(*args, **kwargs)


def _resident() -> int:
    with Path("/proc/self/statm").open(encoding="utf-8") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


class Peak:
    """The largest resident memory inside, over that at the start; looked at every millisecond."""

    def __enter__(self) -> Peak:
        self.before = self.most = _resident()
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.ended.wait(0.001):
            self.most = max(self.most, _resident())

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()
        self.num_bytes = self.most - self.before


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    model(ids).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _measure(rank: int, num_ranks: int, side: str, repeats: int, port: int, out: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (num_ranks,))
    model = SIDES[side](Model(), mesh)
    gc.collect()
    batches = torch.randint(NUM_TOKENS, (repeats + 3, num_ranks, BATCH, POSITIONS))
    with Peak() as peak:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for ids in batches[:3]:
            _step(model, optimizer, ids[rank])
    times = []
    for ids in batches[3:]:  # without the thread that looks at the memory
        before = time.process_time()
        _step(model, optimizer, ids[rank])
        times.append(time.process_time() - before)
    with Sent(num_ranks) as sent:
        loss = model(batches[0][rank])
        loss.backward()
    total = sum(p.numel() for p in model.parameters())
    out.put(
        {
            "rank": rank,
            "cpu_s": statistics.median(times),
            "peak_bytes": peak.num_bytes,
            "sent_bytes": sent.num_bytes,
            "num_collectives": sent.num_calls,
            "num_parameters": total,
            "loss": loss.item(),
        }
    )
    dist.barrier()
    dist.destroy_process_group()


def measure(side: str, num_ranks: int, repeats: int, port: int) -> list[dict[str, Any]]:
    """What each rank found."""
    context = mp.get_context("spawn")
    out = context.SimpleQueue()
    mp.start_processes(
        _measure,
        (num_ranks, side, repeats, port, out),
        nprocs=num_ranks,
        start_method="spawn",
    )
    return sorted((out.get() for _ in range(num_ranks)), key=lambda row: row["rank"])


class Copied(TorchDispatchMode):
    """Counts bytes that ops write which move values, or scale them into a buffer."""

    NAMES = (
        "copy_",
        "_foreach_copy_",
        "_chunk_cat",
        "cat",
        "clone",
        "split_with_sizes_copy",
        "all_gather_copy_in",
    )

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if name in self.NAMES or (name == "mul" and "out" in kwargs):
            written = kwargs.get("out", result if result is not None else args[0])
            for tensor in written if isinstance(written, (list, tuple)) else [written]:
                self.num_bytes += tensor.numel() * tensor.element_size()
        return result


def copies(num_ranks: int = 4) -> dict[str, int]:
    """Bytes copied in a forward and backward of each side, less those of the model alone."""
    ids = torch.randint(NUM_TOKENS, (BATCH, POSITIONS))

    def count(model: nn.Module) -> int:
        model(ids).backward()
        model.zero_grad()
        with Copied() as copied:
            model(ids).backward()
        return copied.num_bytes

    model = Model()
    with Copied() as copied:  # without accumulation, which copies gradients of whole parameters
        torch.autograd.grad(model(ids), list(model.parameters()))
    alone = copied.num_bytes
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = init_device_mesh("cpu", (num_ranks,))
        return {side: count(make(Model(), mesh)) - alone for side, make in SIDES.items()}
    finally:
        dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=29733)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    found: dict[str, Any] = {}
    if options.copies:
        found["copied_bytes"] = copies()
        for side, num in found["copied_bytes"].items():
            print(f"{side:10} copies {num / 1e6:8.1f} MB around collectives")
    for num_ranks in () if options.copies else options.ranks:
        for number, side in enumerate(SIDES):
            rows = measure(side, num_ranks, options.repeats, options.port + number)
            found[f"{side}, {num_ranks} ranks"] = rows
            largest = {key: max(row[key] for row in rows) for key in rows[0]}
            print(
                f"{num_ranks} ranks {side:10} CPU {largest['cpu_s']:6.3f} s  sent "
                f"{largest['sent_bytes']:,} B in {largest['num_collectives']}  peak "
                f"{largest['peak_bytes'] / 2**20:6.0f} MiB  loss {rows[0]['loss']:.4f}"
            )
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
