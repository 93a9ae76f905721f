"""Fused embedding kernels on one GPU, beside the copy bandwidth and torch's own lookups.

    python -m benchmarks.gpu_embedding [--tables 26 --rows 1000000 --dim 128 --batch 16384 --ids 20]

Forward, and the whole training step (forward, backward, update), with uniform and with power-law
ids; medians of device events, all in one run. Bytes are those of the rows, the ids and the output.
Batches of 256 are compared with one empty launch, host time included; one table as a DTensor with
the same plain table; and a batch that has a bag of 100,000 ids with one that has not. Then what
users call: a collection on a mesh of one rank beside the bare kernels and, where it is installed,
torchrec, in turns, host time included. Exits with a message if there is no GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F


def triton_or_nothing(function: Callable[..., None]) -> Any:
    """A Triton kernel where there is Triton."""
    if importlib.util.find_spec("triton") is None:
        return function
    import triton

    return triton.jit(function)


def median_ms(action: Callable[[], Any], repeats: int = 20, warm_up: int = 3) -> float:
    """Median milliseconds of device time."""
    for _ in range(warm_up):
        action()
    spans = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in spans)


def draw_ids(count: int, rows: int, law: str) -> torch.Tensor:
    """Uniform ids, or ids of which the k-th most frequent has a share of about 1/k."""
    u = torch.rand(count, device="cuda", dtype=torch.float64)
    if law == "uniform":
        return (u * rows).long().clamp_(max=rows - 1)
    exponent = 1.05
    rank = ((rows ** (1 - exponent) - 1) * u + 1) ** (1 / (1 - exponent))
    # Frequent rows are scattered over the table, as hashed ids are.
    return rank.long().clamp_(1, rows) * 2654435761 % rows


class Problem:
    """Tables in one buffer, and one batch of ids for each."""

    def __init__(self, options: argparse.Namespace, law: str, batch: int) -> None:
        from shardwise.kernels.tables import IdBags, TableSet, side_by_side

        count, rows, dim = options.tables, options.rows, options.dim
        self.buffer = torch.randn(count * rows, dim, device="cuda") / dim
        self.tables = list(self.buffer.split(rows))
        self.set = TableSet(self.tables, range(count))
        self.batch, self.per_bag = batch, options.ids
        num_ids = count * batch * options.ids
        self.ids = draw_ids(num_ids, rows, law)
        self.offsets = torch.arange(count * batch + 1, device="cuda") * options.ids
        self.first_bag = torch.arange(count + 1, device="cuda") * batch
        self.rows = side_by_side(self.set, batch)
        self.bags = IdBags(self.ids, self.offsets, self.first_bag, batch, self.rows)
        self.grad = torch.randn(self.rows.num_elements, device="cuda") / batch
        self.read_bytes = num_ids * (dim * 4 + 8) + self.rows.num_elements * 4

    def forward(self, trace: bool = False) -> Any:
        from shardwise.kernels.lookup import pooled_lookup

        return pooled_lookup(self.set, self.bags, trace=trace)

    def step(self, optimizer: str, states: Any) -> None:
        _, trace = self.forward(trace=True)
        self.update(optimizer, states, trace)

    def update(self, optimizer: str, states: Any, trace: Any) -> None:
        from shardwise.kernels.update import update

        update(self.set, trace, self.grad, optimizer, states, lr=0.01, eps=1e-8)

    def torch_forward(self) -> list[torch.Tensor]:
        count = self.batch * self.per_bag
        offsets = self.offsets[: self.batch]
        return [
            F.embedding_bag(self.ids[n * count : (n + 1) * count], table, offsets, mode="sum")
            for n, table in enumerate(self.tables)
        ]

    def torch_step(self) -> None:
        """Forward, sparse backward and sparse SGD with torch's kernels."""
        count, dim = self.batch * self.per_bag, self.tables[0].shape[1]
        offsets = self.offsets[: self.batch]
        grads = self.grad.view(self.batch, -1).split(dim, 1)
        for n, table in enumerate(self.tables):
            weight = table.detach().requires_grad_()
            ids = self.ids[n * count : (n + 1) * count]
            out = F.embedding_bag(ids, weight, offsets, mode="sum", sparse=True)
            out.backward(grads[n])
            with torch.no_grad():
                weight.add_(weight.grad, alpha=-0.01)


def copy_tb_s() -> float:
    """Bandwidth of a large copy on the device, read plus written."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    ms = median_ms(lambda: target.copy_(source))
    return 2 * source.numel() * 4 / ms / 1e9


def _of_law(options: argparse.Namespace, law: str, bandwidth: float) -> dict[str, float]:
    problem = Problem(options, law, options.batch)
    states = [list(torch.zeros(len(problem.buffer), device="cuda").split(options.rows))]
    _, trace = problem.forward(trace=True)
    found = {
        "forward": median_ms(problem.forward),
        "forward, traced": median_ms(lambda: problem.forward(trace=True)),
        "torch forward": median_ms(problem.torch_forward),
        "step, SGD": median_ms(lambda: problem.step("sgd", [])),
        "step, row-wise Adagrad": median_ms(lambda: problem.step("rowwise_adagrad", states)),
        "torch step, sparse SGD": median_ms(problem.torch_step, repeats=5, warm_up=2),
        "of a step: sorting": median_ms(lambda: torch.sort(trace.keys)),
        "of a step: update, SGD": median_ms(lambda: problem.update("sgd", [], trace)),
    }
    share = problem.read_bytes / found["forward"] / 1e9 / bandwidth
    touched = torch.unique(trace.keys).numel()
    times = found["torch forward"] / found["forward"]
    print(
        f"{law} ids: forward at {share:.0%} of the copy, {times:.2f} times as fast as torch, "
        f"{touched:,} rows touched"
    )
    for name, ms in found.items():
        print(f"  {name:25} {ms:8.3f} ms")
    return {**found, "forward / copy": share, "rows touched": touched}


#: Tables, rows, columns, batch, ids per bag of what users call.
COLLECTIONS = (
    (26, 1_000_000, 128, 16384, 20),
    (26, 1_000_000, 128, 256, 20),
    (100, 200_000, 64, 2048, 20),
    (500, 20_000, 32, 512, 5),
)


def _in_turns(actions: dict[str, Callable[[], Any]], repeats: int = 20) -> dict[str, float]:
    """Median milliseconds of each: the device's time or the host's, whichever is longer."""
    for action in actions.values():
        for _ in range(4):
            action()
    spans: dict[str, list[Any]] = {name: [] for name in actions}
    for _ in range(repeats):
        for name, action in actions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            action()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: statistics.median(begin.elapsed_time(end) for begin, end in each)
        for name, each in spans.items()
    }


def _collection(problem: Problem, optimizer: str) -> Callable[[], torch.Tensor]:
    import shardwise
    from shardwise.embedding import SGD, EmbeddingBagCollection, Jagged, RowWiseAdagrad, Table

    rows, dim = problem.tables[0].shape
    names = [f"t{number}" for number in range(len(problem.tables))]
    collection = EmbeddingBagCollection(
        [Table(name, rows, dim) for name in names],
        optimizer=SGD(0.01) if optimizer == "sgd" else RowWiseAdagrad(0.01),
        device="cuda",
        output="tensor",
    ).shard(shardwise.init_device_mesh("cuda", (1,)), "table_wise")
    return lambda: collection(Jagged(names, problem.ids, offsets=problem.offsets))


def _torchrec(problem: Problem, optimizer: str) -> Callable[[], torch.Tensor]:
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel, sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.types import ShardingPlan

    rows, dim = problem.tables[0].shape
    names = [f"t{number}" for number in range(len(problem.tables))]
    rule = EmbOptimType.EXACT_SGD if optimizer == "sgd" else EmbOptimType.EXACT_ROWWISE_ADAGRAD
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": rule, "learning_rate": 0.01, "eps": 1e-8}
    )
    tables = [
        EmbeddingBagConfig(name=n, num_embeddings=rows, embedding_dim=dim, feature_names=[n])
        for n in names
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=tables)
    whole = sharding_plan.table_wise(rank=0, compute_kernel="fused")
    plan = sharding_plan.construct_module_sharding_plan(
        bags, dict.fromkeys(names, whole), sharder=sharder, local_size=1, world_size=1,
        device_type="cuda",
    )  # fmt: skip
    model = DistributedModelParallel(
        bags, device=torch.device("cuda"), plan=ShardingPlan(plan={"": plan}), sharders=[sharder]
    )
    lengths = problem.offsets.diff().int()
    return lambda: model(KeyedJaggedTensor(names, problem.ids, lengths=lengths)).values()


def _of_collections() -> dict[str, Any]:
    """What users call, on a mesh of one rank through NCCL."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl")
    sides = {"collection": _collection}
    if importlib.util.find_spec("torchrec") is not None:
        sides["torchrec"] = _torchrec
    results = {}
    for (tables, rows, dim, batch, ids), optimizer in itertools.product(
        COLLECTIONS, ("sgd", "rowwise_adagrad")
    ):
        size = argparse.Namespace(tables=tables, rows=rows, dim=dim, ids=ids)
        problem = Problem(size, "power law", batch)
        states = [list(torch.zeros(len(problem.buffer), device="cuda").split(rows))]
        states = [] if optimizer == "sgd" else states
        actions: dict[str, Callable[[], Any]] = {
            "kernels, forward": problem.forward,
            "kernels, step": partial(problem.step, optimizer, states),
        }
        for name, make in sides.items():
            look_up, grad = make(problem, optimizer), problem.grad.view(batch, -1)
            actions[f"{name}, forward"] = torch.no_grad()(look_up)
            actions[f"{name}, step"] = partial(lambda f, g: f().backward(g), look_up, grad)
        title = f"{tables} tables of {rows:,} × {dim}, batch {batch} × {ids}, {optimizer}"
        results[title] = _in_turns(actions)
        for part in ("forward", "step"):
            results[title][f"collection, launches of a {part}"] = _num_launches(
                actions[f"collection, {part}"]
            )
        _show(title, results[title])
        del problem, states, actions
        torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()
    return results


def measure(options: argparse.Namespace) -> dict[str, Any]:
    bandwidth = copy_tb_s()
    print(f"copy: {bandwidth:.2f} TB/s")
    results: dict[str, Any] = {"copy_tb_s": bandwidth}
    for law in ("uniform", "power law"):
        results[law] = _of_law(options, law, bandwidth)
    results["batch 256"] = _of_small_batches(options)
    results["one table"] = _of_one_table(options)
    results["a shard"] = _of_a_shard(options)
    results["a long bag"] = _of_a_long_bag(options)
    results["collections"] = _of_collections()
    return results


@triton_or_nothing
def _empty(a, b, c, d, e, f):  # type: ignore[no-untyped-def]
    """The least that a launch from Python can do."""


def _of_small_batches(options: argparse.Namespace) -> dict[str, float]:
    """Where launching costs more than working: as called from Python, and as a replayed graph."""
    small = Problem(options, "power law", 256)
    states = [list(torch.zeros(len(small.buffer), device="cuda").split(options.rows))]
    nothing = torch.zeros((), device="cuda")
    given = (small.ids, small.offsets, small.first_bag, small.grad, small.buffer, nothing)

    def stepped() -> None:
        small.step("rowwise_adagrad", states)

    found = {
        "one launch, torch": median_ms(lambda: nothing.add_(1), 200, 20),
        "one launch, Triton": median_ms(lambda: _empty[(1,)](*given), 200, 20),
        "forward": median_ms(small.forward, 200, 20),
        "torch forward": median_ms(small.torch_forward, 50, 5),
        "step, row-wise Adagrad": median_ms(stepped, 200, 20),
        "forward, replayed": median_ms(_graph(small.forward).replay, 200, 20),
        "step, replayed": median_ms(_graph(stepped).replay, 200, 20),
        "launches of a forward": _num_launches(small.forward),
        "launches of a step": _num_launches(stepped),
    }
    found["forward / one launch"] = found["forward"] / found["one launch, Triton"]
    _show("batches of 256, power law ids", found)
    return found


def _of_one_table(options: argparse.Namespace) -> dict[str, float]:
    """One table, a DTensor split by rows on a mesh of one rank, and plain.

    Device time of a large batch; and of batches of 256 the larger of the host's and the device's.
    """
    import shardwise

    rows, dim, found = options.rows, options.dim, {}
    plain = torch.randn(rows, dim, device="cuda")
    for batch, clock, name in (
        (options.batch, _device_ms, "device time"),
        (256, lambda action: median_ms(action, 50, 10), "batch 256, called from Python"),
    ):
        ids = draw_ids(batch * options.ids, rows, "power law").view(batch, options.ids)
        grad = torch.randn(batch, dim, device="cuda")
        with shardwise.simulate(1):
            mesh = shardwise.init_device_mesh("cuda", (1,))
            whole = [
                shardwise.distribute_tensor(x, mesh, [placement])
                for x, placement in zip(
                    (plain, ids, grad),
                    (shardwise.Shard(0), shardwise.Replicate(), shardwise.Replicate()),
                    strict=True,
                )
            ]
            actions = {
                f"{side}{what}": action
                for side, given in (("", whole), ("torch ", (plain, ids, grad)))
                for what, action in _of_table(*given).items()
            }
            times = {what: clock(action) for what, action in actions.items()}
        _show(f"one table, power law ids, {name}", times)
        found.update({f"{what}, {name}": ms for what, ms in times.items()})
    return found


def _of_table(table: Any, ids: Any, grad: Any) -> dict[str, Callable[[], Any]]:
    """What users call."""

    def trained(sparse: bool) -> Callable[[], None]:
        def action() -> None:
            leaf = table.detach().requires_grad_()
            F.embedding_bag(ids, leaf, mode="sum", sparse=sparse).backward(grad)

        return action

    weight = torch.nn.Parameter(table.detach())
    sgd = torch.optim.SGD([weight], lr=0.01)

    def step() -> None:
        F.embedding_bag(ids, weight, mode="sum", sparse=True).sum().backward()
        sgd.step()
        sgd.zero_grad()

    return {
        "lookup": lambda: F.embedding(ids, table),
        "bags": lambda: F.embedding_bag(ids, table, mode="sum"),
        "bags and dense gradient": trained(sparse=False),
        "bags and row-sparse gradient": trained(sparse=True),
        "step with row-sparse SGD": step,
    }


def _device_ms(action: Callable[[], Any], repeats: int = 5) -> float:
    """Milliseconds that the device works, whatever the host does meanwhile."""
    for _ in range(3):
        action()
    return sum(event.device_time for event in _device_events(action, repeats)) / repeats / 1e3


def _of_a_shard(options: argparse.Namespace) -> dict[str, float]:
    """The rows of a rank that has the first half of a table, and zeros for the other ids."""
    from shardwise.ops.lookup.rank_bags import Bags, fused_backend

    num_here = options.rows // 2
    weight = torch.randn(num_here, options.dim, device="cuda")
    ids = draw_ids(options.batch * options.ids, options.rows, "uniform")
    kernels = fused_backend(weight)

    def masked() -> torch.Tensor:
        row = ids.clamp(max=num_here - 1)
        return F.embedding(row, weight).masked_fill_((row != ids).unsqueeze(1), 0)

    def fused() -> torch.Tensor:
        return kernels.look_up(weight, Bags(ids.view(-1, 1), None, None, -1).fused_query(0))

    assert torch.equal(fused(), masked())
    found = {"one launch": median_ms(fused), "F.embedding and a mask": median_ms(masked)}
    _show("rows of one shard, uniform ids", found)
    return found


def _of_a_long_bag(options: argparse.Namespace) -> dict[str, float]:
    """The same number of ids: in bags of one length, and with 100,000 of them in one bag."""
    from shardwise.kernels.lookup import pooled_lookup
    from shardwise.kernels.tables import IdBags, TableSet, first_bags, side_by_side

    num_ids = options.batch * options.ids
    tables = TableSet([torch.randn(options.rows, options.dim, device="cuda")], [0])
    ids = draw_ids(num_ids, options.rows, "uniform")
    firsts, rows = first_bags((options.batch,), tables.device), side_by_side(tables, options.batch)
    even = torch.arange(options.batch + 1, device="cuda") * options.ids
    long = torch.linspace(min(100_000, num_ids), num_ids, options.batch, device="cuda").long()

    def look_up(offsets: torch.Tensor) -> Callable[[], Any]:
        bags = IdBags(ids, offsets, firsts, options.batch, rows)
        return lambda: pooled_lookup(tables, bags)

    found = {
        "bags of one length": median_ms(look_up(even)),
        "one of 100,000 ids": median_ms(look_up(F.pad(long, (1, 0)))),
    }
    _show("one table, uniform ids", found)
    return found


def _show(title: str, found: dict[str, float]) -> None:
    print(title)
    for name, value in found.items():
        print(f"  {name:37} {value:8.4f}")


def _graph(action: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph


def _num_launches(action: Callable[[], Any]) -> int:
    return len(_device_events(action, 1))


def _device_events(action: Callable[[], Any], repeats: int) -> list[Any]:
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds, acc_events=True) as seen:
        for _ in range(repeats):
            action()
        torch.cuda.synchronize()
    return [event for event in seen.events() if event.device_type.name == "CUDA"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("tables", 26), ("rows", 10**6), ("dim", 128), ("batch", 16384)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--ids", type=int, default=20, help="ids per bag")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("No GPU is to be seen here; this benchmark needs one (CUDA, with Triton).")
        return
    torch.manual_seed(0)
    results = measure(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
