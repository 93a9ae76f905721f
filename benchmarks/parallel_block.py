"""A Llama-like block, forward and backward, through one plan: shardwise and torch's DTensor.

    python -m benchmarks.parallel_block [--filter sequence] [--repeats 15] [--json out.json]

Both systems share one mesh of 4 ranks with a fake process group, so the times are those of one
rank: its arithmetic and the overhead. The column "local" is that arithmetic on plain tensors. Both
get the same plan: styles of the same names with the same layouts, on copies of one module.

One counter counts the bytes of both sides, as a ring sends them. The run fails if shardwise sends
more than torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as torch_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import parallel as torch_parallel
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
import shardwise.parallel
from benchmarks.timing import Case, add_options, measure, print_table, write_json
from shardwise.debug import CommDebugMode

NUM_RANKS = 4
BATCH = 2


@dataclass(frozen=True, slots=True)
class Size:
    name: str
    positions: int
    width: int
    hidden: int
    num_heads: int


SIZES = (
    Size("small", 16, 64, 176, 4),
    Size("medium", 64, 256, 704, 8),
    Size("large", 256, 1024, 2816, 16),
)


class Attention(nn.Module):
    """Heads are counted by what the projections give: a rank holds some of them."""

    def __init__(self, size: Size, num_parts: int) -> None:
        super().__init__()
        width, here = size.width, size.width // num_parts
        self.head_width = width // size.num_heads
        self.q, self.k, self.v = (nn.Linear(width, here, bias=False) for _ in range(3))
        self.o = nn.Linear(here, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            y.unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for y in (self.q(x), self.k(x), self.v(x))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, size: Size, num_parts: int) -> None:
        super().__init__()
        here = size.hidden // num_parts
        self.gate, self.up = (nn.Linear(size.width, here, bias=False) for _ in range(2))
        self.down = nn.Linear(here, size.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """With `num_parts` above 1, what one rank of so many computes, without the others."""

    def __init__(self, size: Size, num_parts: int = 1) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(size.width), nn.RMSNorm(size.width)
        self.attention, self.mlp = Attention(size, num_parts), MLP(size, num_parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def plain_plan(tensor: Any, parallel: Any) -> dict[str, Any]:
    """Activations whole on every rank between the layers, and plain tensors."""
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    return {
        **{path: parallel.ColwiseParallel() for path in columns},
        **{path: parallel.RowwiseParallel() for path in ("attention.o", "mlp.down")},
    }


def sequence_plan(tensor: Any, parallel: Any) -> dict[str, Any]:
    """Activations split along the sequence between the layers."""

    def gathered() -> Any:
        return parallel.PrepareModuleInput(
            input_layouts=(tensor.Shard(1),), desired_input_layouts=(tensor.Replicate(),)
        )

    def scattered() -> Any:
        return parallel.RowwiseParallel(output_layouts=tensor.Shard(1))

    return {
        **plain_plan(tensor, parallel),
        "attention_norm": parallel.SequenceParallel(),
        "mlp_norm": parallel.SequenceParallel(),
        "attention": gathered(),
        "mlp": gathered(),
        "attention.o": scattered(),
        "mlp.down": scattered(),
    }


PLANS = {"plain": plain_plan, "sequence": sequence_plan}

#: shardwise and torch, by the same names.
SYSTEMS = {
    "ours": (shardwise, shardwise.parallel),
    "theirs": (torch_tensor, torch_parallel),
}


def training_step(module: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward and backward; gradients are dropped, as `zero_grad` does."""
    parameters = list(module.parameters())

    def step() -> None:
        y = module(x)
        y.backward(torch.ones_like(y))
        x.grad = None
        for parameter in parameters:
            parameter.grad = None

    return step


def steps(mesh: DeviceMesh, plan: str, size: Size) -> dict[str, Callable[[], None]]:
    block = Block(size)
    here = size.positions // NUM_RANKS if plan == "sequence" else size.positions
    made = {}
    for side, system in SYSTEMS.items():
        module = system[1].parallelize_module(deepcopy(block), mesh, PLANS[plan](*system))
        x = torch.randn(BATCH, here, size.width, requires_grad=True)
        made[side] = training_step(module, x)
    whole = torch.randn(BATCH, size.positions, size.width, requires_grad=True)
    made["local"] = training_step(Block(size, NUM_RANKS), whole)
    return made


#: Bytes that a rank sends in a ring, per byte of its input.
RING = {
    "all_reduce": 2 * (NUM_RANKS - 1) / NUM_RANKS,
    "all_gather_into_tensor": NUM_RANKS - 1,
    "reduce_scatter_tensor": (NUM_RANKS - 1) / NUM_RANKS,
    "all_to_all_single": (NUM_RANKS - 1) / NUM_RANKS,
}


def bytes_sent(step: Callable[[], None]) -> int:
    step()  # on a first call the counter would see the fake tensors of torch's planning
    with CommDebugMode() as comm:
        step()
    return round(sum(RING[event.kind] * event.num_bytes for event in comm.events))


def cases(mesh: DeviceMesh) -> Iterator[tuple[Case, int, int]]:
    """Each case, and the bytes of a step: ours and theirs."""
    for plan in PLANS:
        for size in SIZES:
            made = steps(mesh, plan, size)
            sent = [bytes_sent(made[side]) for side in SYSTEMS]
            yield Case(f"{plan}, {size.name}", **made), *sent


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--filter", default="", help="only cases whose name contains this")
    add_options(parser, repeats=15)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    try:
        mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
        chosen = [each for each in cases(mesh) if options.filter in each[0].name]
        results = [measure(case, options.repeats) for case, _, _ in chosen]
    finally:
        dist.destroy_process_group()
    print_table("A Llama-like block, forward and backward", results, unit="ms")
    for case, ours, theirs in chosen:
        print(f"{case.name}: {ours:,} bytes sent, torch {theirs:,}")
    write_json(options.json, results, bytes={case.name: sent for case, *sent in chosen})
    if any(ours > theirs for _, ours, theirs in chosen):
        sys.exit("shardwise sends more than torch")


if __name__ == "__main__":
    main()
