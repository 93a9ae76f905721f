"""What an optimizer step costs: shardwise, torch's DTensor and plain tensors, in one process.

    python -m benchmarks.optimizers [--sizes 16 100 1000] [--repeats 15] [--json out.json]

The tensors are small, so the times are mostly overhead. Parameters are sharded by rows, sharded by
columns and replicated in turn, on a mesh of 4 ranks with a fake process group. Both systems get the
same values in the same placements; gradients have the layouts of their parameters. The last cases
clip the gradients by their norm, which takes one all-reduce.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours
from benchmarks.timing import Case, add_options, measure, print_table, write_json

NUM_RANKS = 4
SIZE = 16
#: The local shape of a parameter, and the dim that is sharded; None: replicated.
KINDS: tuple[tuple[tuple[int, ...], int | None], ...] = (
    ((SIZE, SIZE), 0),
    ((SIZE,), 0),
    ((SIZE, SIZE), 1),
    ((SIZE,), None),
)
Make = Callable[[Any], Callable[[], Any]]


def parameters(system: Any, mesh: DeviceMesh, num: int) -> list[nn.Parameter]:
    """As many parameters with gradients; plain ones where `system` is None."""
    made = []
    for number in range(num):
        shape, dim = KINDS[number % len(KINDS)]
        value: Any = torch.randn(shape) / 10
        if system is not None:
            placement = system.Replicate() if dim is None else system.Shard(dim)
            value = system.DTensor.from_local(value, mesh, [placement], run_check=False)
        parameter = nn.Parameter(value)
        parameter.grad = torch.zeros_like(parameter)
        made.append(parameter)
    return made


def cases(mesh: DeviceMesh, num: int) -> Iterator[Case]:
    def stepping(kind: Callable[..., Any], **options: Any) -> Make:
        return lambda system: kind(parameters(system, mesh, num), lr=1e-3, **options).step

    def clipping(system: Any) -> Callable[[], Any]:
        all_parameters = parameters(system, mesh, num)
        return lambda: nn.utils.clip_grad_norm_(all_parameters, 1.0)

    def case(name: str, make: Make) -> Case:
        return Case(f"{name}, {num} parameters", make(ours), make(theirs), make(None))

    yield case("AdamW foreach", stepping(torch.optim.AdamW, foreach=True))
    yield case("AdamW", stepping(torch.optim.AdamW, foreach=False))
    yield case("AdamW fused", stepping(torch.optim.AdamW, fused=True))
    yield case("SGD foreach", stepping(torch.optim.SGD, momentum=0.9, foreach=True))
    yield case("clip_grad_norm_", clipping)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 100, 1000])
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    add_options(parser, repeats=15)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        mesh = init_device_mesh("cpu", (NUM_RANKS,))
        chosen = (c for num in options.sizes for c in cases(mesh, num) if options.filter in c.name)
        results = [measure(case, options.repeats) for case in chosen]
    finally:
        dist.destroy_process_group()
    print_table(f"one step, {SIZE}x{SIZE} local, {NUM_RANKS} ranks", results)
    write_json(options.json, results, benchmark="optimizers", num_ranks=NUM_RANKS, size=SIZE)


if __name__ == "__main__":
    main()
