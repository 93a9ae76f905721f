"""Measure the constants of this machine: time lookups, updates and exchanges, then fit them.

Times are CPU seconds of the whole process, so other load on the machine does not change them. On a
GPU the seconds are those of its stream.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from shardwise.embedding.collection import EmbeddingBagCollection
from shardwise.embedding.jagged import Jagged
from shardwise.embedding.plan import Entry, Plan
from shardwise.launch import launch
from shardwise.lookup.optimizers import RowWiseAdagrad
from shardwise.lookup.table import Table
from shardwise.planner.constants import Constants, Kernel
from shardwise.planner.costs import Setting
from shardwise.planner.price import price
from shardwise.planner.problem import Array
from shardwise.planner.workload import workload

#: Bytes that a step touches, at which seconds per byte are fitted.
TOUCHED = (1e5, 4e6, 2e8)


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


#: Tables, rows of each, dim, bags, ids per bag, and how strongly ids are skewed.
CASES = (
    (1, 1_000, 16, 512, 1, 1.0),
    (1, 1_000, 64, 2048, 10, 1.0),
    (1, 100_000, 64, 2048, 10, 1.0),
    (1, 1_000_000, 64, 2048, 10, 1.0),
    (1, 1_000_000, 64, 8192, 10, 1.0),
    (1, 1_000_000, 128, 4096, 20, 3.0),
    (1, 100_000, 16, 8192, 20, 1.0),
    (1, 100_000, 128, 8192, 1, 1.0),
    (8, 20_000, 32, 1024, 5, 1.0),
    (26, 2_000, 32, 512, 2, 1.0),
    (26, 50_000, 64, 512, 10, 2.0),
    (1, 400_000, 256, 2048, 5, 1.0),
    # Narrow rows, as in column-wise shards: there the ids cost, not the bytes.
    (1, 100_000, 4, 8192, 20, 1.0),
    (1, 20_000, 8, 8192, 20, 2.0),
    (8, 20_000, 8, 2048, 20, 1.0),
    (4, 100_000, 16, 2048, 40, 2.0),
)


#: Constants that are fitted to steps of several ranks, beside factors of both kernels.
FITTED = (
    "step_s", "latency_s", "owner_byte_s", "asker_byte_s", "leg_s", "send_id_s", "split_id_s",
    "copy_byte_s",
)  # fmt: skip
#: Terms of the update kernel that are fitted to those steps too.
TERMS = ("tile_s", "id_s", "bag_s", "bag_byte_s")
#: Tables, rows, dim, bags of a rank and ids per bag, of steps that several ranks take together.
STEPS = (
    (26, 400, 16, 64, 1),
    (26, 2_000, 64, 512, 4),
    (8, 20_000, 64, 512, 20),
    (8, 5_000, 128, 1024, 2),
    (12, 20_000, 32, 1024, 6),
    (12, 20_000, 16, 512, 20),
    (6, 100_000, 32, 512, 40),
)
#: Kinds, and tables on some ranks only, which tell holders' costs from those of requesting ranks.
KINDS: tuple[Entry, ...] = (
    "table_wise",
    "column_wise",
    "row_wise",
    "data_parallel",
    {"kind": "table_wise", "rank": 0},
    {"kind": "column_wise", "ranks": [0, 1]},
    {"kind": "grid", "ranks": [0, 1]},
)


def calibrate(*, num_ranks: int = 4, repeats: int = 4) -> Constants:
    """The constants of this machine's CPU, in CPU seconds."""
    lookups, updates = [], []
    for case in CASES:
        forward, backward = measure_case(case, repeats)
        lookups.append(forward)
        updates.append(backward)
    threads = torch.get_num_threads()
    said = "CPU seconds, measured by shardwise plan --calibrate"
    zero = Kernel(0.0, 0.0, 0.0, 0.0, (1.0,), (0.0,))
    sources = {
        "lookup, update": f"{said}; {len(CASES)} cases, {threads} threads",
        "round_byte_s": said,
        "exchanges": f"{said}; steps of {num_ranks} gloo processes of one machine",
        "between hosts": "not measured: taken as within one",
    }
    nothing = {each.name: 0.0 for each in fields(Constants) if each.type == "float"}
    empty = Constants(name="this machine", lookup=zero, update=zero, sources=sources, **nothing)
    whole = replace(
        empty,
        lookup=fit_kernel(lookups),
        update=fit_kernel(updates),
        round_byte_s=measure_rounding(),
    )
    measured = launch(measure_steps, num_ranks, repeats, threads, collective_timeout_s=300)
    return fit_steps(whole, empty, np.asarray(measured), num_ranks)


def step_cases() -> list[tuple[list[Table], Plan, int, int]]:
    """Tables, a plan, bags of a rank and ids per bag."""
    found = []
    for num, rows, dim, bags, ids in STEPS:
        tables = [Table(f"t{i}", rows, dim) for i in range(num)]
        found += [(tables, Plan({"*": entry}), bags, ids) for entry in KINDS]
    return found


def measure_steps(repeats: int, threads: int) -> list[float]:
    """On each rank: CPU seconds of a step of each case."""
    torch.set_num_threads(threads)
    num, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (num,))
    found = []
    for tables, plan, bags, ids in step_cases():
        optimizer = RowWiseAdagrad(0.01, across_columns=False)
        collection = EmbeddingBagCollection(
            tables, optimizer=optimizer, output="tensor", device="meta"
        ).shard(mesh, plan)
        batch = draw_batch(tables, bags, ids, 1.0, seed=rank)
        times = []
        for _ in range(repeats + 1):
            dist.barrier()
            start = time.process_time()
            out = collection(batch)
            out.backward(torch.ones_like(out))
            times.append(time.process_time() - start)
        found.append(min(times[1:]))
    return found


def fit_steps(whole: Constants, empty: Constants, measured: Array, num_ranks: int) -> Constants:
    """The constants of updates and exchanges, from steps by rank and case.

    A step's cost is linear in the constants: with one of them set to 1, it is the coefficient.
    Lookups stay as they were measured alone; so do the sizes at which bytes cost more.
    """
    update = whole.update
    none = replace(update, call_s=0.0, tile_s=0.0, id_s=0.0, bag_s=0.0, bag_byte_s=0.0)
    unread = replace(none, byte_s=tuple(0.0 for _ in update.byte_s))
    terms = [replace(unread, **{name: 1.0}) for name in TERMS]  # type: ignore[arg-type]
    singles = [replace(empty, update=none), *(replace(empty, update=each) for each in terms)]
    singles += [replace(empty, **{name: 1.0}) for name in FITTED]  # type: ignore[arg-type]
    matrix = np.stack([_step_seconds(single, num_ranks) for single in singles], 1)
    known = _step_seconds(replace(empty, lookup=whole.lookup), num_ranks)
    times = measured.reshape(-1)
    left = np.maximum(times - known, 0.1 * times)
    found = least_squares_from_zero(matrix / times[:, None], left / times)
    factor, *rest = found.tolist()
    of_update = dict(zip(TERMS, rest, strict=False))
    named = dict(zip(FITTED, rest[len(TERMS) :], strict=True))
    byte_s = tuple(factor * each for each in update.byte_s)
    return replace(
        whole,
        update=replace(update, byte_s=byte_s, call_s=update.call_s, **of_update),
        latency_between_s=named["latency_s"],
        owner_byte_between_s=named["owner_byte_s"],
        copy_byte_between_s=named["copy_byte_s"],
        **{**named, "step_s": max(0.0, named["step_s"] - update.call_s)},
    )


def _step_seconds(constants: Constants, num_ranks: int) -> Array:
    """Of each rank in each case, rank by rank."""
    setting = Setting(num_ranks, num_ranks, constants, "sgd")
    found = []
    for tables, plan, bags, ids in step_cases():
        rows = tables[0].num_embeddings
        drawn = num_ranks * bags * ids
        different = rows * (1 - (1 - 1 / rows) ** drawn)
        work = workload(
            tables,
            batch=bags * num_ranks,
            ids_per_bag=float(ids),
            repeated=max(0.0, 1 - different / drawn),
        )
        found.append(price(plan, work, setting).seconds)
    return np.stack(found, 1).reshape(-1)


def draw_batch(
    tables: Sequence[Table], bags: int, ids_per_bag: int, skew: float, seed: int = 0
) -> Jagged:
    """A random batch; the larger `skew`, the more ids are small."""
    generator = torch.Generator().manual_seed(seed)
    features = [feature for table in tables for feature in table.features]
    values = []
    for table in tables:
        for _ in table.features:
            uniform = torch.rand(bags * ids_per_bag, generator=generator)
            ids = (uniform.double() ** skew * table.num_embeddings).long()
            values.append(ids.clamp_(max=table.num_embeddings - 1))
    lengths = torch.full((len(features) * bags,), ids_per_bag)
    return Jagged(features, torch.cat(values), lengths=lengths)


def measure_case(
    case: tuple[int, int, int, int, int, float], repeats: int
) -> tuple[KernelTiming, KernelTiming]:
    """The forward and the backward pass of one collection."""
    num, rows, dim, bags, per_bag, skew = case
    tables = [Table(f"t{i}", rows, dim) for i in range(num)]
    collection = EmbeddingBagCollection(tables, optimizer=RowWiseAdagrad(0.01), output="tensor")
    batches = [draw_batch(tables, bags, per_bag, skew, seed) for seed in range(2)]
    forward, backward = [], []
    for number in range(repeats + 1):
        batch = batches[number % 2]
        start = time.process_time()
        out = collection(batch)
        middle = time.process_time()
        grad = torch.ones_like(out)
        before = time.process_time()
        out.backward(grad)
        end = time.process_time()
        if number:
            forward.append(middle - start)
            backward.append(end - before)
    different = len(torch.unique(batches[0].values[: bags * per_bag]))
    figures = (
        num,
        float(num * bags * per_bag),
        float(num * bags),
        dim * 4.0,
        different * dim * 4.0,
    )
    return KernelTiming(*figures, min(forward)), KernelTiming(*figures, min(backward))


def measure_rounding(num: int = 1 << 18, repeats: int = 20) -> float:
    """CPU seconds per byte to round numbers to bfloat16, or to widen them."""
    numbers = torch.rand(num)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        numbers.to(torch.bfloat16).to(torch.float32)
        times.append(time.process_time() - start)
    return min(times) / (2 * num * numbers.element_size())


# -- fitting ---------------------------------------------------------------------------------


def fit_kernel(samples: Sequence[KernelTiming], touched: Sequence[float] = TOUCHED) -> Kernel:
    """Non-negative constants with the least relative errors; see Note [Seconds per byte]."""
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


def least_squares_from_zero(matrix: Array, wanted: Array, rounds: int = 20_000) -> Array:
    """Non-negative least squares: the x >= 0 for which `matrix @ x` is nearest to `wanted`."""
    scale = np.maximum(np.sqrt((matrix**2).sum(0)), 1e-300)
    scaled = matrix / scale
    gram, target = scaled.T @ scaled, scaled.T @ wanted
    x = np.zeros(matrix.shape[1])
    for _ in range(rounds):
        largest = 0.0
        for i in np.flatnonzero(np.diag(gram)).tolist():
            new = max(0.0, x[i] + (target[i] - gram[i] @ x) / gram[i, i])
            largest = max(largest, abs(new - x[i]))
            x[i] = new
        if largest < 1e-12:
            break
    return np.asarray(x / scale)
