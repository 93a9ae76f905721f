"""The planner's constants of a GPU, and how well they order plans: run this on one GPU.

    python -m benchmarks.planner_gpu --output src/shardwise/planner/constants_h200.json --name h200
    python -m benchmarks.planner_gpu --constants h200

Lookups and updates are measured with a collection on the GPU (seconds between device events, host
included) and fitted. Then twenty plans of 26 tables on 8 ranks are drawn, each rank's set of tables
is run alone, and the order of the slowest ranks is compared with the predicted one. What one GPU
cannot measure, the networks, is taken from data sheets, and the file says so. Needs torch, triton
and numpy. `--device cpu --quick` tests the script without a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.planner_steps import rank_correlation
from benchmarks.planner_tasks import DLRM_IDS, DLRM_ROWS
from shardwise.embedding import EmbeddingBagCollection, Jagged, Plan, RowWiseAdagrad, Table
from shardwise.embedding.batch import bags_of
from shardwise.lookup.bags import FeatureBags
from shardwise.lookup.messages import RankBatch
from shardwise.lookup.routing import Route
from shardwise.planner.calibrate import draw_batch, least_squares_from_zero
from shardwise.planner.costs import Constants, Kernel, Setting
from shardwise.planner.price import price, shard_groups
from shardwise.planner.workload import workload

#: Bytes touched at which seconds per byte are fitted: the L2 cache of an H200 has 50 MB.
TOUCHED = (1e6, 3e7, 3e8, 5e9)
#: Tables, rows of each, dim, bags, ids per bag, skew.
CASES = (
    (1, 1_000, 64, 4096, 1, 1.0),
    (1, 1_000, 128, 65536, 10, 1.0),
    (1, 100_000, 128, 65536, 10, 1.0),
    (1, 1_000_000, 128, 65536, 10, 1.0),
    (1, 10_000_000, 128, 65536, 10, 1.0),
    (1, 10_000_000, 128, 65536, 40, 3.0),
    (1, 10_000_000, 64, 65536, 20, 1.0),
    (1, 1_000_000, 32, 65536, 20, 1.0),
    (1, 1_000_000, 128, 65536, 1, 1.0),
    (1, 4_000_000, 256, 16384, 20, 1.0),
    (8, 1_000_000, 64, 16384, 10, 2.0),
    (26, 100_000, 128, 16384, 5, 1.0),
    (26, 1_000_000, 128, 16384, 20, 1.0),
    (100, 200_000, 64, 2048, 20, 1.0),
    (200, 20_000, 32, 1024, 5, 1.0),
    (26, 1_000, 32, 256, 2, 1.0),
)
RANKS, BATCH = 8, 65_536


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """One measured kernel call."""

    tiles: int
    ids: float
    bags: float
    row_bytes: float
    #: Different bytes that it touched, of one shard.
    touched: float
    seconds: float


def timer(device: str) -> Callable[[Callable[[], Any]], float]:
    """Seconds of one call, on the device's own clock."""

    def on_gpu(action: Callable[[], Any]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1e3

    def on_cpu(action: Callable[[], Any]) -> float:
        start = time.process_time()
        action()
        return time.process_time() - start

    return on_gpu if device == "cuda" else on_cpu


def step_times(
    tables: list[Table], batch: Jagged, device: str, repeats: int
) -> tuple[float, float]:
    """Median seconds of the forward and of the backward pass with its update."""
    bags = EmbeddingBagCollection(
        tables, optimizer=RowWiseAdagrad(0.01), output="tensor", device=device
    )
    measure, box = timer(device), {}
    forward, backward = [], []
    grad: torch.Tensor | None = None
    for number in range(repeats + 2):

        def run() -> None:
            box["out"] = bags(batch)

        spent = measure(run)
        out = box["out"]
        grad = torch.ones_like(out) if grad is None else grad
        back = measure(lambda: out.backward(grad))  # noqa: B023
        if number > 1:
            forward.append(spent)
            backward.append(back)
    return statistics.median(forward), statistics.median(backward)


def measure_kernels(
    device: str, cases: Any, repeats: int
) -> tuple[list[KernelTiming], list[KernelTiming]]:
    lookups, updates = [], []
    for num, rows, dim, bags, ids, skew in cases:
        tables = [Table(f"t{i}", rows, dim) for i in range(num)]
        batch = draw_batch(tables, bags, ids, skew)
        different = len(torch.unique(batch.values[: bags * ids]))
        figures = (
            num,
            float(num * bags * ids),
            float(num * bags),
            dim * 4.0,
            different * dim * 4.0,
        )
        forward, backward = step_times(tables, batch.to(device), device, repeats)
        lookups.append(KernelTiming(*figures, forward))
        updates.append(KernelTiming(*figures, backward))
        print(
            f"{num:4} x {rows:9} x {dim:4}, {bags:6} bags of {ids:3}: {1e3 * forward:8.3f} "
            f"{1e3 * backward:8.3f} ms",
            flush=True,
        )
    return lookups, updates


def fit_kernel(samples: Sequence[KernelTiming], touched: Sequence[float]) -> Kernel:
    """Non-negative constants with the least relative errors; see Note [Seconds per byte]
    in `planner/costs.py`."""
    logs = np.log(np.asarray(touched))
    rows = []
    for s in samples:
        at = np.interp(np.log(max(s.touched, 1.0)), logs, np.arange(len(touched)))
        hats = np.maximum(0.0, 1 - np.abs(at - np.arange(len(touched))))
        work = s.ids * s.row_bytes
        rows.append([1.0, s.tiles, s.ids, s.bags, *(hats * work), s.bags * s.row_bytes])
    matrix, times = np.asarray(rows), np.asarray([s.seconds for s in samples])
    found = least_squares_from_zero(matrix / times[:, None], np.ones(len(times)))
    call, tile, per_id, bag, *rest = found.tolist()
    *byte_s, bag_byte = rest
    # More bytes touched are never read faster.
    byte_s = np.maximum.accumulate(byte_s).tolist()
    return Kernel(call, tile, per_id, bag, tuple(touched), tuple(byte_s), bag_byte)


def measure_packing(device: str) -> tuple[float, float, float]:
    """Seconds per id that is sent, per id of a row-split table beside, and per leg."""
    measure = timer(device)

    def packed(num: int, kind: str, bags: int, ids: int) -> float:
        tables = [Table(f"t{i}", 100_000, 64) for i in range(num)]
        route = Route(Plan.of(kind).tiling(tables, 8), pooled=True)
        batch = draw_batch(tables, bags, ids, 1.0).to(device)
        found = bags_of(route.features, batch, weights_train=False, side_by_side=False)
        assert isinstance(found, FeatureBags), "a good batch"
        times = [measure(lambda: RankBatch(route, 0, found)) for _ in range(6)]
        return statistics.median(times[1:])

    few, many = packed(8, "table_wise", 64, 1), packed(64, "table_wise", 64, 1)
    leg_s = max(0.0, (many - few) / 56)
    small, large = packed(8, "table_wise", 4096, 1), packed(8, "table_wise", 4096, 41)
    send_id_s = max(0.0, (large - small) / (8 * 4096 * 40))
    split = packed(8, "row_wise", 4096, 41) - packed(8, "row_wise", 4096, 1)
    split_id_s = max(0.0, split / (8 * 4096 * 40) - send_id_s)
    return send_id_s, split_id_s, leg_s


def copy_byte_s(device: str) -> float:
    measure = timer(device)
    source = torch.zeros(1 << (28 if device == "cuda" else 22), device=device)
    target = torch.empty_like(source)
    times = [measure(lambda: target.copy_(source)) for _ in range(6)]
    return statistics.median(times[1:]) / (source.numel() * 4)


#: Widths of tables that one collection holds together, their rows; bags and ids per bag.
MIXED = ((32, 64, 128), 1_000_000), ((16384, 10), (65536, 10), (65536, 20))


def measure_widths(device: str, lookup: Kernel, update: Kernel, repeats: int) -> float:
    """Seconds of a further width beside the first: its kernels start while others still run."""
    (widths, rows), sizes = MIXED
    more = []
    for bags, ids in sizes:

        def step(*dims: int, bags: int = bags, ids: int = ids) -> float:
            tables = [Table(f"t{dim}", rows, dim) for dim in dims]
            batch = draw_batch(tables, bags, ids, 1.0).to(device)
            return sum(step_times(tables, batch, device, repeats))

        alone = [step(dim) for dim in widths]
        together = step(*widths)
        calls = lookup.call_s + update.call_s
        more.append((together - sum(alone)) / (len(widths) - 1) + calls)
        print(f"widths {widths}, {bags} bags of {ids}: {1e3 * more[-1]:.3f} ms for a further one")
    return max(0.0, statistics.median(more))


def calibrate_gpu(device: str, name: str, cases: Any, repeats: int) -> Constants:
    lookups, updates = measure_kernels(device, cases, repeats)
    lookup, update = fit_kernel(lookups, TOUCHED), fit_kernel(updates, TOUCHED)
    width_s = measure_widths(device, lookup, update, repeats)
    send_id_s, split_id_s, leg_s = measure_packing(device)
    copied = copy_byte_s(device)
    what = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    said = f"measured on one {what} by benchmarks/planner_gpu.py, torch {torch.__version__}"
    sheet = "not measured, from data sheets: NVLink 450 GB/s and one 400 Gb/s adapter a GPU"
    return Constants(
        name=name,
        lookup=lookup,
        update=update,
        width_s=width_s,
        latency_s=20e-6,
        latency_between_s=40e-6,
        # Two thirds of the sheets' rates.
        owner_byte_s=1 / 300e9,
        owner_byte_between_s=1 / 33e9,
        asker_byte_s=copied,
        leg_s=leg_s,
        send_id_s=send_id_s,
        split_id_s=split_id_s,
        copy_byte_s=1 / 300e9 + 2 * copied,
        copy_byte_between_s=1 / 33e9 + 2 * copied,
        sources={
            "lookup, update, width_s, send_id_s, split_id_s, leg_s, asker_byte_s": said,
            "latency, owner_byte, copy_byte": f"{sheet}, of which two thirds",
        },
    )


# -- twenty plans, each rank alone -----------------------------------------------------------


def drawn_tables(most: int) -> list[Table]:
    draw = random.Random(5)
    return [
        Table(f"t{i}", min(rows, most), draw.choice((32, 64, 128)))
        for i, rows in enumerate(DLRM_ROWS)
    ]


def drawn_plan(tables: list[Table], seed: int) -> Plan:
    draw = random.Random(seed)
    split = draw.random() * 0.6
    entries: dict[str, Any] = {}
    for table in tables:
        if draw.random() < split:
            kind = draw.choice(["row_wise", "column_wise", "grid"])
            ranks = sorted(draw.sample(range(RANKS), draw.choice((2, 4))))
            entries[table.name] = {"kind": kind, "ranks": ranks} if kind != "row_wise" else kind
        else:
            rank = draw.randrange(2 + seed % (RANKS - 1))
            entries[table.name] = {"kind": "table_wise", "rank": rank}
    return Plan(entries)


def rank_alone(
    tables: list[Table], plan: Plan, rank: int, batch: int, device: str, repeats: int
) -> float:
    """Seconds of lookups and updates of one rank's parts, for the ids of all ranks."""
    held, ids_of = [], []
    for group in shard_groups(plan, tables, RANKS):
        if rank not in torch.arange(RANKS)[group.ranks].tolist():
            continue
        table = tables[group.table]
        by_columns = group.kind == "column_wise"
        rows = table.num_embeddings if by_columns else group.size
        width = group.size if by_columns else table.embedding_dim
        held.append(Table(table.name, rows, width))
        ids_of.append((DLRM_IDS[group.table], rows / table.num_embeddings))
    if not held:
        return 0.0
    draw = torch.Generator().manual_seed(rank)
    values, lengths = [], []
    for table, (ids, part) in zip(held, ids_of, strict=True):
        # Of the ids of each bag, those of this part of the rows.
        mine = torch.rand(batch, ids, generator=draw) < part
        lengths.append(mine.sum(1))
        uniform = torch.rand(int(mine.sum()), generator=draw, dtype=torch.float64)
        found = (uniform**2 * table.num_embeddings).long()
        values.append(found.clamp_(max=table.num_embeddings - 1))
    jagged = Jagged([t.name for t in held], torch.cat(values), lengths=torch.cat(lengths))
    return sum(step_times(held, jagged.to(device), device, repeats))


def compare_plans(constants: Constants, device: str, num: int, batch: int, most: int) -> float:
    """The rank correlation of predicted and measured compute of the slowest rank."""
    tables = drawn_tables(most)
    different = []
    for table, ids in zip(tables, DLRM_IDS, strict=True):
        drawn = torch.rand(batch * ids, dtype=torch.float64)
        values = (drawn**2 * table.num_embeddings).long()
        different.append(1 - len(torch.unique(values)) / len(values))
    work = workload(
        tables,
        batch=batch,
        ids_per_bag={t.name: float(i) for t, i in zip(tables, DLRM_IDS, strict=True)},
        repeated={t.name: min(d, 1 - 1e-6) for t, d in zip(tables, different, strict=True)},
    )
    setting = Setting(RANKS, RANKS, constants)
    base = constants.lookup.call_s + constants.update.call_s
    predicted, measured = [], []
    for seed in range(num):
        plan = drawn_plan(tables, seed)
        priced = price(plan, work, setting)
        predicted.append(float(np.max(priced.compute_s + priced.widths_s)) + base)
        times = [rank_alone(tables, plan, rank, batch, device, 6) for rank in range(RANKS)]
        measured.append(max(times))
        print(f"plan {seed}: {1e3 * predicted[-1]:8.3f} ms predicted, {1e3 * measured[-1]:8.3f}")
    return rank_correlation(predicted, measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", default="constants_gpu.json")
    parser.add_argument("--constants", help="a file, or h200: only plans are measured")
    parser.add_argument("--name", default="gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="small cases: a check of the script")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here: nothing is measured")
        return
    cases, repeats, batch, most = CASES, 10, BATCH, 10_000_000
    if options.quick:
        cases = [
            (n, min(r, 5000), min(d, 32), min(b, 256), min(i, 4), s) for n, r, d, b, i, s in CASES
        ]
        repeats, batch, most = 2, 128, 5000
    if options.constants:
        constants = Constants.of(options.constants)
    else:
        constants = calibrate_gpu(options.device, options.name, cases, repeats)
        constants.save(options.output)
        print(f"constants: {options.output}")
    correlation = compare_plans(constants, options.device, options.plans, batch, most)
    print(f"rank correlation of {options.plans} plans: {correlation:.3f}")


if __name__ == "__main__":
    main()
