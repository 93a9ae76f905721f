"""Measure the constants of this machine: time steps, then fit lookups, updates and exchanges.

Times are CPU seconds of the whole process, so other load on the machine does not change them. On a
GPU, kernels are timed alone (`benchmarks/planner_gpu.py`), and the seconds are those of its stream.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.embedding.collection import EmbeddingBagCollection
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.plan import Entry, Plan
from shardwise.launch import launch
from shardwise.lookup.optimizers import RowWiseAdagrad
from shardwise.lookup.tiling import Table
from shardwise.planner.costs import Constants, Kernel, Setting
from shardwise.planner.price import price
from shardwise.planner.problem import Array
from shardwise.planner.workload import Workload, with_sample, workload

#: Bytes that a step touches, at which seconds per byte are fitted.
TOUCHED = (1e5, 4e6, 2e8)


#: How many steps of several ranks are measured. Tables and plans are random, since tables of one
#: width on a rank share a kernel call, and all share the caches.
NUM_STEPS = 40
#: Constants that are fitted to those steps, besides the terms of both kernels.
FITTED = (
    "step_s", "width_s", "asker_byte_s", "leg_s", "send_id_s", "split_id_s", "sum_id_s",
    "group_s", "copies_s", "copy_byte_s",
)  # fmt: skip
TERMS = ("tile_s", "id_s", "bag_s", "bag_byte_s")
ROW_TERMS = ("row_s", "row_byte_s", "narrow_row_s")


@dataclass(frozen=True, slots=True)
class DrawnStep:
    """A step to measure: tables, ids per bag of each, a plan, bags of a rank, skew of ids."""

    tables: tuple[Table, ...]
    ids: tuple[int, ...]
    plan: Plan
    bags: int
    skew: float


def calibrate(*, num_ranks: int = 4, repeats: int = 11) -> Constants:
    """The constants of this machine's CPU, in CPU seconds."""
    threads = torch.get_num_threads()
    measured = launch(measure_steps, num_ranks, repeats, threads, collective_timeout_s=300)
    times, sent_byte_s = zip(*measured, strict=True)
    said = f"CPU seconds, measured by shardwise plan --calibrate; {threads} threads"
    sources = {
        "all but those below": f"{said}; {NUM_STEPS} steps of {num_ranks} gloo processes",
        "round_byte_s, owner_byte_s": said,
        "between hosts": "not measured: taken as within one",
    }
    found = fit_steps(step_cases(num_ranks), np.asarray(times), max(sent_byte_s))
    return replace(found, round_byte_s=measure_rounding(), sources=sources)


def step_cases(num_ranks: int) -> list[DrawnStep]:
    return [drawn_case(seed, num_ranks) for seed in range(NUM_STEPS)]


def drawn_case(seed: int, num_ranks: int) -> DrawnStep:
    """Some tables, each split, replicated, or whole on one of a few ranks."""
    draw = random.Random(seed)
    num = draw.randint(4, 30)
    bags, skew = draw.choice((128, 256, 512, 1024)), draw.choice((1.0, 2.0, 3.0))
    split, used = draw.random(), draw.randint(1, num_ranks)
    # Some steps split tables in one way only, and some replicate none: so the fit can separate the
    # costs of each kind.
    kinds = draw.choice((("row_wise", "column_wise", "grid"), ("row_wise",), ("column_wise",)))
    copies = draw.choice((0.0, 0.3))
    tables: list[Table] = []
    ids: list[int] = []
    entries: dict[str, Entry] = {}
    for i in range(num):
        name = f"t{i}"
        rows = int(math.exp(draw.uniform(math.log(4), math.log(200_000))))
        dim = draw.choice((8, 16, 32, 64, 64, 128, 128))
        most = min(60, 100_000 // bags)
        ids.append(min(most, max(1, int(math.exp(draw.gauss(1.2, 1.6))))))
        tables.append(Table(name, rows, dim))
        if rows < 3000 and draw.random() < copies:
            entries[name] = "data_parallel"
        elif draw.random() < split and rows >= 100:
            kind = draw.choice(kinds)
            holders = min(draw.choice((2, 2, 3, 4) if kind == "grid" else (2, 4)), num_ranks)
            ranks = sorted(draw.sample(range(num_ranks), holders))
            entries[name] = kind if kind == "row_wise" else {"kind": kind, "ranks": ranks}
        else:
            entries[name] = {"kind": "table_wise", "rank": draw.randrange(used)}
    return DrawnStep(tuple(tables), tuple(ids), Plan(entries), bags, skew)


def measure_steps(repeats: int, threads: int) -> tuple[list[float], float]:
    """On each rank: CPU seconds of a step of each case, and per byte sent or received.

    Other programs only make a step slower, so it is the lower quartile of the repeats. Cases take
    turns. Each takes two batches, and the second counts: its code is in the caches, its rows are
    not.
    """
    torch.set_num_threads(threads)
    num, rank = dist.get_world_size(), dist.get_rank()
    keep_to_own_cores(rank, num)
    mesh = init_device_mesh("cpu", (num,))
    made = []
    for case in step_cases(num):
        optimizer = RowWiseAdagrad(0.01, across_columns=False)
        collection = EmbeddingBagCollection(
            case.tables, optimizer=optimizer, output="tensor", device="meta"
        ).shard(mesh, case.plan)
        made.append((collection, [rank_batch(case, rank, step) for step in range(2)]))
    times = np.zeros((len(made), repeats + 1))
    for number in range(repeats + 1):
        for place, (collection, batches) in enumerate(made):
            for batch in batches:
                dist.barrier()
                start = time.process_time()
                out = collection(batch)
                out.backward(torch.ones_like(out))
                times[place, number] = time.process_time() - start
    return np.quantile(times[:, 1:], 0.25, axis=1).tolist(), measure_exchange()


def keep_to_own_cores(rank: int, num_ranks: int) -> None:
    """Keep this process to some of its cores: moving between cores empties its caches.

    Where there are fewer cores than ranks, ranks share them.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // num_ranks)
    first = rank * each % len(cores)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores[first : first + each])


def measure_exchange() -> float:
    """CPU seconds per byte that a rank sends to others or receives from them."""
    num, repeats = 1 << 20, 10
    others = dist.get_world_size() - 1
    if not others:
        return 0.0
    sent = torch.zeros((others + 1) * num)
    received = torch.empty_like(sent)
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.process_time()
        dist.all_to_all_single(received, sent)
        times.append(time.process_time() - start)
    return float(np.median(times)) / (2 * others * num * sent.element_size())


def rank_batch(case: DrawnStep, rank: int, step: int) -> Jagged:
    return draw_batch(case.tables, case.bags, case.ids, case.skew, seed=1000 * rank + step)


def fit_steps(cases: Sequence[DrawnStep], measured: Array, owner_byte_s: float) -> Constants:
    """Fit the constants to the steps' seconds, by rank and case, with the least relative errors.

    A step's cost is linear in the constants: with one of them 1 and the others 0, it is the
    coefficient.
    `owner_byte_s` is measured apart, since these steps cannot separate the time that the owner of a
    row takes to send it from the time to look it up.
    """
    num_ranks = len(measured)
    zero = Kernel(0.0, 0.0, 0.0, 0.0, TOUCHED, tuple(0.0 for _ in TOUCHED))
    nothing: dict[str, Any] = {e.name: 0.0 for e in fields(Constants) if e.type == "float"}
    empty = Constants(
        name="this machine", lookup=zero, update=zero, width_s=0.0, split_leg_s=0.0, **nothing
    )
    # More bytes touched are never read faster: each piece adds to those before it.
    pieces = [tuple(float(k >= i) for k in range(len(TOUCHED))) for i in range(len(TOUCHED))]
    lookups = [replace(zero, **{name: 1.0}) for name in TERMS]  # type: ignore[arg-type]
    lookups += [replace(zero, byte_s=piece) for piece in pieces]
    updates = lookups + [replace(zero, **{name: 1.0}) for name in ROW_TERMS]  # type: ignore[arg-type]
    singles = [replace(empty, lookup=each) for each in lookups]
    singles += [replace(empty, update=each) for each in updates]
    singles += [replace(empty, **{name: 1.0}) for name in FITTED]  # type: ignore[arg-type]
    works = [sampled(case, num_ranks) for case in cases]
    matrix = np.stack(
        [_step_seconds(single, cases, works, num_ranks) for single in singles], axis=1
    )
    sending = replace(empty, owner_byte_s=owner_byte_s, owner_byte_between_s=owner_byte_s)
    times = measured.reshape(-1)
    left = times - _step_seconds(sending, cases, works, num_ranks)
    found = least_squares_from_zero(matrix / times[:, None], left / times)
    edges = np.cumsum([len(lookups), len(updates)])
    lookup, update, rest = np.split(found, edges)
    named = dict(zip(FITTED, rest.tolist(), strict=True))
    return replace(
        sending,
        lookup=_kernel_of(zero, lookup),
        update=_kernel_of(zero, update),
        copy_byte_between_s=named["copy_byte_s"],
        **named,
    )


def _kernel_of(zero: Kernel, found: Array) -> Kernel:
    terms, pieces, rows = np.split(found, [len(TERMS), len(TERMS) + len(TOUCHED)])
    named = dict(zip(TERMS + ROW_TERMS, [*terms.tolist(), *rows.tolist()], strict=False))
    return replace(zero, byte_s=tuple(np.cumsum(pieces).tolist()), **named)


def sampled(case: DrawnStep, num_ranks: int) -> Workload:
    """The workload of a case, measured from the batches of all ranks."""
    found = []
    for step in range(2):
        parts = [rank_batch(case, rank, step) for rank in range(num_ranks)]
        sizes = [case.bags * ids for ids in case.ids]
        split = [part.values.split(sizes) for part in parts]
        values = torch.cat([each for feature in zip(*split, strict=True) for each in feature])
        lengths = torch.tensor(case.ids).repeat_interleave(num_ranks * case.bags)
        found.append(Jagged(parts[0].features, values, lengths=lengths))
    return with_sample(workload(case.tables), found, num_ranks=num_ranks)


def _step_seconds(
    constants: Constants, cases: Sequence[DrawnStep], works: Sequence[Workload], num_ranks: int
) -> Array:
    """Of each rank in each case, rank by rank."""
    setting = Setting(num_ranks, num_ranks, constants, "sgd")
    prices = [price(case.plan, work, setting) for case, work in zip(cases, works, strict=True)]
    return np.stack([each.seconds + each.widths_s for each in prices], 1).reshape(-1)


def draw_batch(
    tables: Sequence[Table],
    bags: int,
    ids_per_bag: int | Sequence[int],
    skew: float,
    seed: int = 0,
) -> Jagged:
    """A random batch; the larger `skew`, the more ids are small."""
    generator = torch.Generator().manual_seed(seed)
    per_table = [ids_per_bag] * len(tables) if isinstance(ids_per_bag, int) else ids_per_bag
    values, lengths = [], []
    for table, ids in zip(tables, per_table, strict=True):
        for _ in table.features:
            uniform = torch.rand(bags * ids, generator=generator, dtype=torch.float64)
            found = (uniform**skew * table.num_embeddings).long()
            values.append(found.clamp_(max=table.num_embeddings - 1))
            lengths.append(torch.full((bags,), ids))
    features = [feature for table in tables for feature in table.features]
    return Jagged(features, torch.cat(values), lengths=torch.cat(lengths))


def measure_rounding() -> float:
    """CPU seconds per byte to round numbers to bfloat16, or to widen them."""
    numbers = torch.rand(1 << 18)
    times = []
    for _ in range(20):
        start = time.process_time()
        numbers.to(torch.bfloat16).to(torch.float32)
        times.append(time.process_time() - start)
    return min(times) / (2 * numbers.nbytes)


# -- fitting ---------------------------------------------------------------------------------


def least_squares_from_zero(matrix: Array, wanted: Array) -> Array:
    """Non-negative least squares: the x >= 0 for which `matrix @ x` is nearest to `wanted`."""
    scale = np.maximum(np.sqrt((matrix**2).sum(0)), 1e-300)
    scaled = matrix / scale
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    x = np.zeros(matrix.shape[1])
    for _ in range(20_000):
        largest = 0.0
        for i in np.flatnonzero(np.diag(gram)).tolist():
            new = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
            largest = max(largest, abs(new - x[i]))
            x[i] = new
        if largest < 1e-12:
            break
    return np.asarray(x / scale)
