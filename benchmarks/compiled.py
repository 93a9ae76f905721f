"""What compiled code costs: shardwise and torch's DTensor against plain torch on the local shapes.

    python -m benchmarks.compiled [--repeats 15] [--only bags] [--json out.json]

All sides are compiled by inductor with `fullgraph=True` and run forward and backward, in one
process, on one mesh of 4 ranks with a fake process group. The tensors are small, so the times are
mostly overhead. Plain torch starts the same collectives, written by hand. Where nothing is sent, a
bare wrapper class is timed too: its cost is torch's own. The compile time is that of the first
call, caches off. The sides are timed with `dynamic=False`: they share a code object, and torch
would take the local sizes of one side for new sizes of another.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch._inductor.config as inductor
import torch.distributed as dist
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as ours
from benchmarks.bare_wrapper import BareWrapper
from benchmarks.timing import add_options, print_table, summarize, take_turns, write_json

NUM_RANKS = 4
BATCH, WIDTH, ROWS = 64, 128, 1024
SIDES: dict[str, Any] = {"ours": ours, "theirs": theirs, "local": None, "bare": BareWrapper}


def _laid(system: Any, mesh: DeviceMesh, local: torch.Tensor, dim: int | None, grad: bool) -> Any:
    """A tensor of `system` (None: plain) whose local part is `local`."""
    x = local.detach().clone()
    if system is BareWrapper:
        x = BareWrapper(x)
    elif system is not None:
        placement = system.Replicate() if dim is None else system.Shard(dim)
        x = system.DTensor.from_local(x, mesh, [placement], run_check=False)
    return x.detach().requires_grad_(grad)


class _Summed(torch.autograd.Function):
    """The sum of the ranks' terms, as somebody writes it who shards by hand."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group_name: str) -> torch.Tensor:
        started = torch.ops._c10d_functional.all_reduce(x, "sum", group_name)
        return torch.ops._c10d_functional.wait_tensor(started)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def _mlp(system: Any, mesh: DeviceMesh) -> tuple[Callable[..., Any], list[Any]]:
    first = torch.randn(4 * WIDTH // NUM_RANKS, WIDTH) / 10
    second = torch.randn(WIDTH, 4 * WIDTH // NUM_RANKS) / 10
    group_name = mesh.get_group().group_name

    def mlp(x: Any, up: Any, down: Any) -> Any:
        y = F.linear(F.gelu(F.linear(x, up)), down)
        if system is None:
            return _Summed.apply(y, group_name)
        return y.redistribute(placements=[system.Replicate()]).to_local()

    x = _laid(system, mesh, torch.randn(BATCH, WIDTH), None, grad=False)
    return mlp, [x, _laid(system, mesh, first, 0, True), _laid(system, mesh, second, 1, True)]


def _by_columns(
    system: Any, mesh: DeviceMesh, batch: int = BATCH, rows: int = ROWS
) -> tuple[Callable[..., Any], list[Any]]:
    """A table by columns; ids are on every rank. Nothing is sent."""

    def lookup(ids: Any, table: Any) -> Any:
        y = F.embedding(ids, table)
        return y if system is None else y.to_local()

    ids = _laid(system, mesh, torch.randint(0, rows, (batch,)), None, grad=False)
    table = torch.randn(rows, WIDTH // NUM_RANKS)
    return lookup, [ids, _laid(system, mesh, table, 1, True)]


def _by_rows(system: Any, mesh: DeviceMesh) -> tuple[Callable[..., Any], list[Any]]:
    """A table by rows: each rank looks up the ids that are its own, and the terms are summed up."""
    group_name = mesh.get_group().group_name
    held = ROWS // NUM_RANKS

    def lookup(ids: Any, table: Any) -> Any:
        if system is not None:
            return F.embedding(ids, table).redistribute(placements=[system.Replicate()]).to_local()
        own = (ids >= 0) & (ids < held)
        found = F.embedding(torch.where(own, ids, 0), table)
        return _Summed.apply(torch.where(own.unsqueeze(-1), found, 0.0), group_name)

    ids = _laid(system, mesh, torch.randint(0, ROWS, (BATCH,)), None, grad=False)
    return lookup, [ids, _laid(system, mesh, torch.randn(held, WIDTH), 0, True)]


def _bags_by_columns(
    system: Any, mesh: DeviceMesh, bags: int, length: int, rows: int
) -> tuple[Callable[..., Any], list[Any]]:
    """Bags of a table by columns. Nothing is sent."""

    def pool(ids: Any, table: Any) -> Any:
        y = F.embedding_bag(ids, table, mode="sum")
        return y if system is None else y.to_local()

    ids = _laid(system, mesh, torch.randint(0, rows, (bags, length)), None, grad=False)
    return pool, [ids, _laid(system, mesh, torch.randn(rows, WIDTH // NUM_RANKS), 1, True)]


def _bags_by_rows(
    system: Any, mesh: DeviceMesh, bags: int, length: int, rows: int
) -> tuple[Callable[..., Any], list[Any]]:
    """Bags of a table by rows. By hand, ids of other ranks have weight 0."""
    group_name = mesh.get_group().group_name
    held = rows // NUM_RANKS

    def pool(ids: Any, table: Any) -> Any:
        if system is not None:
            pooled = F.embedding_bag(ids, table, mode="sum")
            return pooled.redistribute(placements=[system.Replicate()]).to_local()
        own = ids < held
        weights = own.to(table.dtype)
        query = (torch.where(own, ids, 0), table)
        return _Summed.apply(
            F.embedding_bag(*query, mode="sum", per_sample_weights=weights), group_name
        )

    ids = _laid(system, mesh, torch.randint(0, rows, (bags, length)), None, grad=False)
    return pool, [ids, _laid(system, mesh, torch.randn(held, WIDTH), 0, True)]


_SMALL: dict[str, int] = {"bags": 64, "length": 8, "rows": 1024}
_LARGE: dict[str, int] = {"bags": 1024, "length": 15, "rows": 8192}

CASES: dict[str, Any] = {
    "mlp, columns then rows": _mlp,
    "embedding by columns, 64 ids of 1024": _by_columns,
    "embedding by columns, 512 ids of 8192": functools.partial(_by_columns, batch=512, rows=8192),
    "embedding by rows, 64 ids of 1024": _by_rows,
}
#: torch's DTensor has no rule for bags.
BAGS: dict[str, Any] = {
    f"bags by {name}, {size['bags']} of {size['length']} ids": functools.partial(make, **size)
    for name, make in (("columns", _bags_by_columns), ("rows", _bags_by_rows))
    for size in (_SMALL, _LARGE)
}
#: Cases without a bare wrapper, which has no collectives.
SENDING = (_mlp, _by_rows)


def _step(make: Any, system: Any, mesh: DeviceMesh) -> tuple[Callable[[], Any], float]:
    """A compiled forward and backward, and the seconds that its first run took."""
    torch.manual_seed(0)
    fn, inputs = make(system, mesh)
    fast = torch.compile(fn, fullgraph=True, dynamic=False)
    wanted = [x for x in inputs if x.requires_grad]

    def step() -> Any:
        out = fast(*inputs)
        return torch.autograd.grad(out, wanted, torch.ones_like(out))

    start = time.thread_time()
    step()
    return step, time.thread_time() - start


def _ratio(samples: Mapping[str, Sequence[float]], side: str) -> float:
    """The median of what `side` takes of plain torch's time."""
    return statistics.median(a / b for a, b in zip(samples[side], samples["local"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser, repeats=15)
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose name has this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    inductor.force_disable_caches = True
    inductor.compile_threads = 1
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=NUM_RANKS)
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    results = []
    for name, make in (CASES | BAGS).items():
        if options.only not in name:
            continue
        _step(make, None, mesh)  # one-time imports
        sides = [side for side in SIDES if side != "bare" or make not in SENDING]
        sides = ["ours", "local"] if name in BAGS else sides
        compile_s: dict[str, list[float]] = {side: [] for side in sides}
        for _ in range(3):
            torch._dynamo.reset()
            steps = {}
            for side in sides:
                steps[side], seconds = _step(make, SIDES[side], mesh)
                compile_s[side].append(seconds)
        samples = take_turns(steps, options.repeats)
        results.append(summarize(name, samples))
        bare = f" (a bare wrapper {_ratio(samples, 'bare'):.2f})" if "bare" in samples else ""
        best = {side: min(times) for side, times in compile_s.items()}
        theirs = ""
        if "theirs" in best:
            ratio = best["ours"] / best["theirs"]
            theirs = f"torch's DTensor in {best['theirs']:.2f} s ({ratio:.2f}), "
        print(
            f"{name}: {_ratio(samples, 'ours'):.2f} of plain torch{bare}; compiled in "
            f"{best['ours']:.2f} s, {theirs}plain torch in {best['local']:.2f} s"
        )
    print_table("compiled forward and backward", results)
    write_json(options.json, results)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
