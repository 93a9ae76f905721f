"""Where the time of one eager `add` goes: the cost of any wrapper class, and what DTensor adds.

    python -m benchmarks.floor [--repeats 25]

Each row is a whole call, so differences between rows are the cost of a stage: the local op; a
wrapper class that only unwraps, calls and wraps; DTensor's hit path; and parts of that.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from benchmarks.timing import take_turns
from shardwise.dtensor.tensor import run


class Bare(torch.Tensor):
    """The least that a wrapper subclass can do for `add`."""

    _local: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def wrap(cls, local: torch.Tensor) -> Bare:
        out = torch.Tensor._make_wrapper_subclass(
            cls, local.shape, dtype=local.dtype, device=local.device
        )
        out._local = local
        return out

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return cls.wrap(torch.add(args[0]._local, args[1]._local))


class Nothing(Bare):
    """The way into Python and back alone."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return args[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    local = torch.randn(16, 16)
    mesh = init_device_mesh("cpu", (4,))
    ours = shardwise.DTensor.from_local(local, mesh, [shardwise.Shard(0)])
    layout, bare, nothing = ours._layout, Bare.wrap(local), Nothing.wrap(local)
    op = torch.ops.aten.add.Tensor
    actions = {
        "the local op": lambda: torch.add(local, local),
        "torch's dispatcher, into Python and back": lambda: torch.add(nothing, nothing),
        "making a wrapper": lambda: shardwise.DTensor._wrap(local, layout),
        "a bare wrapper's add": lambda: torch.add(bare, bare),
        "DTensor's hit path, called from Python": lambda: run(op, ours, ours),
        "DTensor's add": lambda: torch.add(ours, ours),
    }
    samples = take_turns(actions, options.repeats)
    dist.destroy_process_group()
    for name, times in samples.items():
        print(f"{name:45} {statistics.median(times) * 1e6:6.2f} µs")


if __name__ == "__main__":
    main()
