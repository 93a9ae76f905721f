"""Saving and loading over gloo processes, beside torch.distributed.checkpoint.

    python -m benchmarks.checkpoint [--size 2e9] [--ranks 4] [--repeats 3] [--folder /tmp]

Both systems save the same sharded state in turn and load it in turn, each repeat in its own folder.
Reported are the wall time of the slowest rank (files synced), the CPU time of all ranks, which is
less sensitive to other work on the machine, and a rank's peak memory above its use before.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardwise
import shardwise.checkpoint
from shardwise.launch import launch

NUM_TENSORS = 16
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_statm = os.open("/proc/self/statm", os.O_RDONLY)


class Peak:
    """The most resident memory while it is open, sampled every 10 ms."""

    def __enter__(self) -> Peak:
        self.before = self.peak = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, _resident())

    def __exit__(self, *error: Any) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def extra_mb(self) -> float:
        return (self.peak - self.before) / 1e6


def _resident() -> int:
    """Memory without that of mapped files: the page cache is the kernel's, not the process's."""
    _, resident, shared, *_ = map(int, os.pread(_statm, 128, 0).split())
    return (resident - shared) * _PAGE_BYTES


def _state(size: int, fill: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same memory as shardwise's DTensors and as torch's."""
    from shardwise.interop import to_torch

    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    rows = max(size // NUM_TENSORS // 4096, dist.get_world_size())
    ours: dict[str, Any] = {}
    for number in range(NUM_TENSORS):
        place = [shardwise.Shard(0)]
        ours[f"w{number}"] = shardwise.full(
            (rows, 1024), fill + number, device_mesh=mesh, placements=place
        )
    return ours, {name: to_torch(value) for name, value in ours.items()}


def _timed(action: Callable[..., Any], *arguments: Any) -> tuple[float, float, float]:
    """Wall seconds of the slowest rank, CPU seconds of all, and extra MB of the largest."""
    dist.barrier()
    with Peak() as peak:
        start, cpu_start = time.perf_counter(), time.process_time()
        action(*arguments)
        seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    most = torch.tensor([seconds, peak.extra_mb], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    total = torch.tensor([cpu_s], dtype=torch.float64)
    dist.all_reduce(total)
    return most[0].item(), total.item(), most[1].item()


def measure(
    folder: str, size: int, num_repeats: int
) -> dict[str, list[tuple[float, float, float]]]:
    """Per action and repeat, what `_timed` gives."""
    from torch.distributed import checkpoint as theirs

    def torch_save(state: dict[str, Any], path: str) -> None:
        theirs.save(state, checkpoint_id=path)

    def torch_load(state: dict[str, Any], path: str) -> None:
        theirs.load(state, checkpoint_id=path)

    ours_state, torch_state = _state(size, 1.0)
    found: dict[str, list[tuple[float, float, float]]] = {}
    for repeat in range(num_repeats):
        mine, other = f"{folder}/ours-{repeat}", f"{folder}/torch-{repeat}"
        actions: list[tuple[Any, ...]] = [
            ("save, shardwise", shardwise.checkpoint.save, ours_state, mine),
            ("save, torch", torch_save, torch_state, other),
            ("load, shardwise", shardwise.checkpoint.load, ours_state, mine),
            ("load, torch", torch_load, torch_state, other),
        ]
        if repeat % 2:
            actions = [actions[1], actions[0], actions[3], actions[2]]
        for name, *action in actions:
            found.setdefault(name, []).append(_timed(*action))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(mine)
            shutil.rmtree(other)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=2e9, help="bytes in all")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", default=None, help="where to write; a temporary folder")
    parser.add_argument("--json", default=None)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = launch(
            measure,
            options.ranks,
            folder,
            int(options.size),
            options.repeats,
            collective_timeout_s=600,
        )[0]
    print(f"{options.size / 1e9:g} GB over {options.ranks} processes, {options.repeats} repeats")
    for kind in ("save", "load"):
        rows = {side: found[f"{kind}, {side}"] for side in ("shardwise", "torch")}
        for side, row in rows.items():
            seconds, cpu_s = (statistics.median(r[i] for r in row) for i in (0, 1))
            extra = max(r[2] for r in row)
            print(f"{kind}  {side:10} {seconds:8.2f} s {cpu_s:8.2f} CPU s {extra:8.1f} MB extra")
        pairs = list(zip(rows["shardwise"], rows["torch"], strict=True))
        wall, cpu = (statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1))
        print(f"{kind}  shardwise / torch: wall {wall:.2f}, CPU {cpu:.2f}")
        each = "  ".join(f"{a[0] / b[0]:.2f}/{a[1] / b[1]:.2f}" for a, b in pairs)
        print(f"{kind}  wall/CPU ratio of each repeat: {each}")
    if options.json:
        Path(options.json).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
