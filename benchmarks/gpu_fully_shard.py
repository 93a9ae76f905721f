"""A step of a 1B-parameter transformer on one GPU: plain torch, and fully sharded on one rank.

    python -m benchmarks.gpu_fully_shard [--batch 8] [--turns 7] [--json out.json]

On a mesh of one rank there is nobody to send to, so `fully_shard` should cost nothing: at most 1.03
of plain torch is wanted. Two settings: everything in bf16, and parameters in fp32 that compute in
bf16 (`param_dtype`; plain torch has autocast for it). The sides (plain torch, shardwise, torch's
`fully_shard`) train copies of one model with the same batches, in turns of a few steps; medians of
device events. Then kernels in which a side spends longer than plain torch, by the profiler.
`--device cpu --tiny` tests the script without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

from benchmarks.fully_shard import Model
from shardwise.parallel import MixedPrecisionPolicy, fully_shard

#: Width, layers, heads, tokens: 1.07e9 parameters; and the length of a sequence.
LARGE, POSITIONS = (2048, 20, 16, 32_000), 1024
TINY, FEW_POSITIONS = (32, 2, 2, 64), 8
SETTINGS = ("bf16", "fp32, computed in bf16")
PHASES = ("forward", "backward", "optimizer")


class Clock:
    """Milliseconds between marks: of the device, or of the CPU where there is no other."""

    def __init__(self, device: str) -> None:
        self.on_device = device == "cuda"

    def mark(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end) if self.on_device else (end - begin) * 1000)

    def wait(self) -> None:
        if self.on_device:
            torch.cuda.synchronize()


class Side:
    """A model with its optimizer, and what its steps took."""

    def __init__(self, model: nn.Module, clock: Clock, autocast: str | None) -> None:
        self.model, self.clock = model, clock
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.context: Callable[[], Any] = contextlib.nullcontext
        if autocast is not None:
            self.context = lambda: torch.autocast(autocast, torch.bfloat16)
        self.times: dict[str, list[float]] = {name: [] for name in ("step", *PHASES, "host")}
        self.loss = torch.zeros(())

    def step(self, ids: torch.Tensor) -> list[Any]:
        marks = [self.clock.mark()]
        with self.context():
            self.loss = self.model(ids)
        marks.append(self.clock.mark())
        self.loss.backward()
        marks.append(self.clock.mark())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(self.clock.mark())
        return marks

    def turn(self, batches: torch.Tensor) -> None:
        """Some steps without a break, as in training; the host may run ahead."""
        self.clock.wait()
        begin = time.perf_counter()
        marks = [self.step(ids) for ids in batches]
        host = (time.perf_counter() - begin) * 1000 / len(batches)
        self.clock.wait()
        self.times["host"].append(host)
        self.times["step"].append(self.clock.ms(marks[0][0], marks[-1][-1]) / len(batches))
        for number, name in enumerate(PHASES):
            spans = [self.clock.ms(each[number], each[number + 1]) for each in marks]
            self.times[name].append(statistics.fmean(spans))

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(times) for name, times in self.times.items()}


def make_sides(setting: str, options: argparse.Namespace) -> dict[str, Side]:
    """The three sides, with equal parameters."""
    mixed = setting != "bf16"
    mesh, clock = init_device_mesh(options.device, (1,)), Clock(options.device)
    dtype = torch.bfloat16

    def ours(model: Model) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=dtype) if mixed else None
        for layer in model.layers:
            fully_shard(layer, mesh, mp_policy=policy)
        return fully_shard(model, mesh, mp_policy=policy)

    def torchs(model: Model) -> nn.Module:
        policy = TorchPolicy(param_dtype=dtype) if mixed else TorchPolicy()
        for layer in model.layers:
            torch_fully_shard(layer, mesh=mesh, mp_policy=policy)
        return torch_fully_shard(model, mesh=mesh, mp_policy=policy)

    makers: dict[str, Callable[[Model], nn.Module]] = {
        "plain torch": lambda model: model,
        "shardwise": ours,
        "torch fully_shard": torchs,
    }
    sides = {}
    for name, make in makers.items():
        torch.manual_seed(0)
        with torch.device(options.device):
            model = Model(*(TINY if options.tiny else LARGE))
        model = model if mixed else model.to(dtype)
        autocast = options.device if mixed and name == "plain torch" else None
        sides[name] = Side(make(model), clock, autocast)
    return sides


def kernel_times(side: Side, ids: torch.Tensor) -> dict[str, tuple[float, int]]:
    """Milliseconds and calls of each kernel in a step."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        side.step(ids)
        side.clock.wait()
    return {
        event.key: (event.self_device_time_total / 1000, event.count)
        for event in found.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.key.startswith("FSDP::")
    }


def print_kernels(name: str, mine: Any, plain: Any, most: int = 8) -> None:
    """Kernels in which a side spends longer than plain torch."""
    extra = {key: ms - plain.get(key, (0.0, 0))[0] for key, (ms, _) in mine.items()}
    for key in sorted(extra, key=lambda k: -extra[k])[:most]:
        if extra[key] > 0.05:
            calls = f"{mine[key][1]} calls, plain {plain.get(key, (0, 0))[1]}"
            print(f"    {name}: +{extra[key]:.2f} ms ({calls}) {key[:90]}")


def run(setting: str, options: argparse.Namespace) -> dict[str, Any]:
    sides = make_sides(setting, options)
    width, positions = (2, FEW_POSITIONS) if options.tiny else (options.batch, POSITIONS)
    num_tokens = (TINY if options.tiny else LARGE)[-1]
    shape = (options.steps, width, positions)
    batches = torch.randint(num_tokens, shape, device=options.device)
    for _ in range(2):
        for side in sides.values():
            side.turn(batches)
    for side in sides.values():
        side.times = {name: [] for name in side.times}
    for _ in range(options.turns):
        for side in sides.values():
            side.turn(batches)
    found = {name: side.medians() for name, side in sides.items()}
    plain = found["plain torch"]["step"]
    count = sum(p.numel() for p in sides["plain torch"].model.parameters())
    print(f"{setting}: {count / 1e9:.2f}e9 parameters, {width} x {positions} tokens")
    for name, times in found.items():
        spread = sides[name].times["step"]
        phases = "  ".join(f"{each} {times[each]:7.2f}" for each in (*PHASES, "host"))
        print(
            f"  {name:18} step {times['step']:8.2f} ms ({min(spread):.2f} to {max(spread):.2f})  "
            f"{times['step'] / plain:.3f} of plain  {phases}  loss {sides[name].loss.item():.4f}"
        )
    if options.device == "cuda":
        kernels = {name: kernel_times(side, batches[0]) for name, side in sides.items()}
        for name in ("shardwise", "torch fully_shard"):
            print_kernels(name, kernels[name], kernels["plain torch"])
        for name, side in sides.items():
            found[name]["peak_gib"] = peak(side, batches[0])
            print(f"  {name:18} a step's peak {found[name]['peak_gib']:.2f} GiB over what is held")
    return found


def peak(side: Side, ids: torch.Tensor) -> float:
    """What a step allocates over what is held before it."""
    side.clock.wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    side.step(ids)
    side.clock.wait()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="steps of a turn")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("needs a GPU; --device cpu --tiny tests the script without one")
        return 1
    if options.device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    try:
        for setting in SETTINGS:
            found[setting] = run(setting, options)
            gc.collect()
            if options.device == "cuda":
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
