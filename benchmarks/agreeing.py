"""What `shardwise.debug.agree(every="step")` adds to a small training step.

    python -m benchmarks.agreeing [--ranks 2] [--turns 150] [--steps 4]

Gloo processes on this machine, one thread each, train a small tensor-parallel model of DTensors;
with the mode and without it, in turn, each the first in every other turn. The mode is entered once
and swapped in and out. What it adds is the median of the turns' differences, and the range in which
that median lies with 95% certainty, in percent of a step: of the CPU time of a rank, its
communication threads included, or in the last row of wall time. All that the mode does in a rank is
done by its main thread, so the second row has it without the noise of the other threads; in the
third row is the rank's share of the launcher, in which the store answers. Steps vary by more than
the mode adds, so its two parts are also measured alone: what recording adds to one call, and one
comparison, after an all-reduce as in a step; in CPU time of the main thread, least of slices and
median.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table as Lines
from torch import nn

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import agree
from shardwise.launch import launch

WIDTH, ROWS, LAYERS = 128, 32, 4
#: Per turn the seconds of a step, by the clocks of `now`.
Times = list[list[float]]
CLOCKS = ("CPU of a rank", "its main thread", "its share of the store", "wall")


class Layer(nn.Module):
    def __init__(self, mesh: shardwise.DeviceMesh) -> None:
        super().__init__()
        up, down = torch.randn(4 * WIDTH, WIDTH) / 16, torch.randn(WIDTH, 4 * WIDTH) / 16
        self.norm = nn.LayerNorm(WIDTH)
        shardwise.distribute_module(self.norm, mesh)
        self.up = nn.Parameter(shardwise.distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(shardwise.distribute_tensor(down, mesh, [Shard(1)]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(nn.functional.linear(self.norm(x), self.up))
        return x + nn.functional.linear(hidden, self.down)


def make_step() -> Callable[[], None]:
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(*[Layer(mesh) for _ in range(LAYERS)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = shardwise.distribute_tensor(torch.randn(ROWS, WIDTH), mesh, [Replicate()])

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def now(store_pid: int) -> list[float]:
    store_s = time.clock_gettime((~store_pid << 3) | 2)  # Linux's clock of another process
    share_s = store_s / dist.get_world_size()
    return [time.process_time(), time.thread_time(), share_s, time.perf_counter()]


def take_turns(
    num_turns: int, num_steps: int, store_pid: int
) -> tuple[Times, Times, int, tuple[float, float]]:
    """Per turn the seconds of a step, without the mode and with it; then calls, and parts."""
    torch.set_num_threads(1)
    parts, step, times = take_parts(), make_step(), ([], [])
    mode = agree(every="step")
    with mode:
        for _ in range(5):
            step()
        num_calls = mode.num_calls // mode.num_steps
        for turn in range(num_turns):
            for number in (0, 1) if turn % 2 else (1, 0):
                if not number:
                    mode._swap_out()
                for _ in range(3):
                    step()
                dist.barrier()
                begin = now(store_pid)
                for _ in range(num_steps):
                    step()
                end = now(store_pid)
                times[number].append([(b - a) / num_steps for a, b in zip(begin, end, strict=True)])
                if not number:
                    mode._swap_in()
    return *times, num_calls, parts


def take_parts() -> tuple[float, float]:
    """Seconds that recording adds to a call, and seconds of a comparison."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    x = shardwise.ones(16, 16, device_mesh=mesh, placements=[Shard(0)])
    signal, mode = torch.ones(1), agree(every="step")

    def calls_s(num: int = 300) -> float:
        begin = time.thread_time()
        for _ in range(num):
            torch.add(x, x)
        return (time.thread_time() - begin) / num

    def comparison_s() -> float:
        dist.all_reduce(signal)
        time.sleep(5e-4)  # as in a step, the others' messages are there
        begin = time.thread_time()
        mode.step()
        return time.thread_time() - begin

    plain_s = min(calls_s() for _ in range(15))
    with mode:
        recorded_s = min(calls_s() for _ in range(15))
        comparisons = [comparison_s() for _ in range(200)]
    return recorded_s - plain_s, statistics.median(comparisons)


def added(off: Sequence[float], on: Sequence[float], step: Sequence[float]) -> str:
    """The median of the differences in percent, and the order statistics that bound it."""
    parts = sorted(100 * (b - a) / s for a, b, s in zip(off, on, step, strict=True))
    away = math.ceil(0.98 * math.sqrt(len(parts)))  # 1.96 standard deviations of a fair coin
    middle = len(parts) // 2
    low, high = parts[max(middle - away, 0)], parts[min(middle + away, len(parts) - 1)]
    return f"{statistics.median(parts):+.1f}% ({low:+.1f} to {high:+.1f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--turns", type=int, default=150)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    found = launch(take_turns, options.ranks, options.turns, options.steps, os.getpid())
    lines = Lines(box=box.SIMPLE, title=f"{found[0][2]} recorded calls a step")
    for name in ("clock", "without, ms", "with, ms", "added"):
        lines.add_column(name, justify="right")
    means = [
        [
            [statistics.mean(rank[mode][t][clock] for rank in found) for t in range(options.turns)]
            for clock in range(len(CLOCKS))
        ]
        for mode in (0, 1)
    ]
    for name, off, on in zip(CLOCKS, *means, strict=True):
        step = means[0][-1] if name == "wall" else means[0][0]
        medians = (1e3 * statistics.median(off), 1e3 * statistics.median(on))
        lines.add_row(name, *(f"{m:.2f}" for m in medians), added(off, on, step))
    console = Console()
    console.print(lines)
    call_s, comparison_s = (statistics.mean(rank[3][i] for rank in found) for i in (0, 1))
    sum_s = found[0][2] * call_s + comparison_s
    share = sum_s / statistics.median(means[0][0])
    console.print(
        f"by parts: {found[0][2]} calls of {call_s * 1e6:.2f} µs and a comparison of "
        f"{comparison_s * 1e6:.0f} µs: {sum_s * 1e6:.0f} µs, {share:.1%} of the CPU of a rank"
    )


if __name__ == "__main__":
    main()
