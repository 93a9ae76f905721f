"""plan: the best plan found for tables and ranks, with a bound on what a better one could save."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.collectives import show_bytes
from shardwise.core.mesh import grid_of
from shardwise.embedding.collection import EmbeddingBagCollection, EmbeddingCollection
from shardwise.embedding.plan import Entry, Plan, check_exchange_dtype
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.lookup.tiling import Table
from shardwise.planner.costs import Constants, Setting, SplitKind, table_options
from shardwise.planner.price import Price, cores_at_once, price
from shardwise.planner.problem import Assignment, Bounds, Problem
from shardwise.planner.settling import Settling
from shardwise.planner.solve import NoPlanFits, Progress, Solution, gap_of, solve
from shardwise.planner.workload import Workload, is_number, with_sample, workload

#: The memory of a rank if none is given.
UNLIMITED = float(1 << 60)
#: Tables times ranks up to which plans are searched to say what would fit; beyond, estimated.
_MOST_TRIED = 20_000


@dataclass(frozen=True, eq=False, repr=False)
class PlanResult:
    """A plan, its cost, and the bound of the best plan's cost."""

    plan: Plan
    work: Workload
    setting: Setting
    memory: float
    price: Price
    problem: Problem
    solution: Solution
    #: Seconds of `table_wise` for every table, where that fits.
    table_wise_s: float | None
    #: A lower bound for the dtype of exchanges that was allowed but not chosen, and for shards of
    #: rows that get equally many ids.
    other_bound_s: float = float("inf")
    #: The dtype of exchanges that was allowed.
    allowed_dtype: torch.dtype | None = None

    @property
    def cost_s(self) -> float:
        return self.price.step_s

    @property
    def bound_s(self) -> float:
        """The lower bound: no plan of these kinds is cheaper."""
        return min(self.solution.bound_s, self.other_bound_s, self.cost_s)

    @property
    def gap(self) -> float:
        return gap_of(self.cost_s, self.bound_s)

    def __repr__(self) -> str:
        # Its arrays would fill pages.
        return (
            f"PlanResult({len(self.work.uses)} tables, {self.setting.num_ranks} ranks, "
            f"cost_s={self.cost_s:.4g}, bound_s={self.bound_s:.4g})"
        )


def plan(
    tables: Sequence[Table] | Workload | EmbeddingBagCollection | EmbeddingCollection,
    mesh: DeviceMesh | int,
    *,
    hosts: int = 1,
    memory: float | None = None,
    batch: int | Mapping[str, float] | None = None,
    ids_per_bag: float | Mapping[str, float] | None = None,
    repeated: float | Mapping[str, float] | None = None,
    sample: Iterable[Any] | None = None,
    optimizer: str = "rowwise_adagrad",
    dtype: torch.dtype = torch.float32,
    exchange_dtype: torch.dtype | None = None,
    constants: Constants | str = "cpu",
    seconds: float | None = 60.0,
    gap: float = 0.005,
    solver: bool = True,
    tell: Callable[[Progress], None] | None = None,
) -> PlanResult:
    """Choose how to shard each table, so that the slowest rank takes least.

    `mesh` is a mesh of one axis, or a number of ranks. `memory` is that of one rank, in bytes;
    `batch` counts the bags of a feature in a step, over all ranks. Figures that are not given are
    measured from `sample`, or assumed; see `Workload.assumed`. `exchange_dtype` lets the planner
    send rows and gradients in that dtype where it is faster. The search ends when the plan is
    proven to be within `gap` of the best, when no step helps, or after `seconds` of CPU time.

    On a mesh of real processes the first rank plans, and sends the plan to all.

    >>> tables = [Table("user", 1_000_000, 64), Table("item", 200_000, 64), Table("day", 7, 16)]
    >>> found = plan(tables, 4, batch=4096, ids_per_bag=2.0, repeated=0.5)
    >>> sorted(found.plan.entries), found.gap < 0.05
    (['day', 'item', 'user'], True)
    """
    for name, number in (("gap", gap), ("seconds", 0 if seconds is None else seconds)):
        if not is_number(number) or not number >= 0:
            raise ArgumentError(f"{name} is a number from 0 on, found {number!r}.")
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(f"dtype is that of the tables, as torch.float32; found {dtype!r}.")
    if sample is not None and not isinstance(sample, Iterable):
        raise ArgumentError(f"sample gives batches one after another, found {sample!r}.")
    work = as_workload(tables, batch=batch, ids_per_bag=ids_per_bag, repeated=repeated)
    num_ranks = _num_ranks(mesh)
    if sample is not None:
        whole = batch if isinstance(batch, int) else None
        work = with_sample(work, sample, batch=whole, num_ranks=num_ranks)
    setting = make_setting(num_ranks, hosts, constants, optimizer, dtype, work.pooled)
    check_exchange_dtype(exchange_dtype, dtype)
    settings = [setting]
    if exchange_dtype is not None and num_ranks > 1:
        settings.append(replace(setting, exchange_dtype=exchange_dtype))

    search = functools.partial(solve, gap=gap, seconds=seconds, exact=solver, tell=tell)

    def run() -> PlanResult:
        found = _best_of(work, settings, _checked_memory(memory), search)
        return _settled(found, gap, seconds)

    group = _real_group(mesh)
    return run() if group is None else _on_first_rank(run, group)


def as_workload(
    tables: Sequence[Table] | Workload | EmbeddingBagCollection | EmbeddingCollection,
    *,
    batch: int | Mapping[str, float] | None = None,
    ids_per_bag: float | Mapping[str, float] | None = None,
    repeated: float | Mapping[str, float] | None = None,
) -> Workload:
    if isinstance(tables, Workload):
        if any(each is not None for each in (batch, ids_per_bag, repeated)):
            raise ArgumentError("A Workload has its figures; give batch and others to `workload`.")
        return tables
    pooled = not isinstance(tables, EmbeddingCollection)
    if isinstance(tables, EmbeddingBagCollection | EmbeddingCollection):
        tables = tables.tables
    if not isinstance(tables, Iterable):
        raise ArgumentError(f"A plan is for a list of Tables, found {type(tables).__name__}.")
    return workload(tables, batch=batch, ids_per_bag=ids_per_bag, repeated=repeated, pooled=pooled)


def make_setting(
    num_ranks: int,
    hosts: int,
    constants: Constants | str,
    optimizer: str,
    dtype: torch.dtype = torch.float32,
    pooled: bool = True,
) -> Setting:
    if not isinstance(hosts, int) or hosts < 1 or num_ranks % hosts:
        raise ArgumentError(
            f"{num_ranks} ranks cannot be shared evenly by {hosts} hosts; give a number that "
            "divides them."
        )
    return Setting(
        num_ranks, num_ranks // hosts, Constants.of(constants), optimizer, dtype.itemsize, pooled
    )


def _num_ranks(mesh: DeviceMesh | int) -> int:
    if isinstance(mesh, int) and not isinstance(mesh, bool):
        if mesh < 1:
            raise ArgumentError(f"A plan is for at least one rank, found {mesh}.")
        return mesh
    grid = grid_of(mesh)  # type: ignore[arg-type]
    if grid.num_axes != 1:
        raise LayoutError(f"A plan is for a mesh with one axis, found {grid!r}.")
    return grid.num_ranks


def _real_group(mesh: DeviceMesh | int) -> Any | None:
    if isinstance(mesh, int):
        return None
    grid = grid_of(mesh)
    if set(grid.ranks) <= set(grid.world.present):
        return None
    return mesh.get_group()


def _on_first_rank(run: Callable[[], PlanResult], group: Any) -> PlanResult:
    first = dist.get_global_rank(group, 0)
    box: list[Any] = [None]
    if dist.get_rank() == first:
        try:
            box = [run()]
        except ShardwiseError as error:
            box = [error]
    dist.broadcast_object_list(box, src=first, group=group)
    if isinstance(box[0], ShardwiseError):
        raise box[0]
    found: PlanResult = box[0]
    return found


# -- one plan --------------------------------------------------------------------------------


def _best_of(
    work: Workload, settings: Sequence[Setting], limit: float, search: Callable[..., Solution]
) -> PlanResult:
    """The plan with the dtype of exchanges whose bound is lower; the first if they are equal."""
    bounds = [_bound_s(work, each, limit) if len(settings) > 1 else 0.0 for each in settings]
    failed: NoPlanFits | None = None
    for number in sorted(range(len(settings)), key=lambda i: bounds[i]):
        try:
            found = _planned(work, settings[number], limit, search)
        except NoPlanFits as error:
            failed = failed or error
            continue
        others = [bound for i, bound in enumerate(bounds) if i != number]
        if any(use.below for use in work.uses):
            even = replace(work, uses=tuple(replace(use, below=()) for use in work.uses))
            others += [_bound_s(even, each, limit) for each in settings]
        allowed = settings[-1].exchange_dtype
        return replace(found, other_bound_s=min(others, default=np.inf), allowed_dtype=allowed)
    assert failed is not None, "a setting was tried"
    raise failed


def _bound_s(work: Workload, setting: Setting, limit: float) -> float:
    try:
        bound = Bounds(make_problem(work, setting, limit)).best()
    except NoPlanFits:
        return np.inf
    return np.inf if bound is None else bound.seconds


def _planned(
    work: Workload, setting: Setting, limit: float, search: Callable[..., Solution]
) -> PlanResult:
    try:
        problem = make_problem(work, setting, limit)
        baseline = _table_wise(problem, work, setting, limit)
        solution = search(problem, starts=[] if baseline is None else [baseline[1]])
    except NoPlanFits as error:
        raise NoPlanFits(f"{error} {what_would_fit(work, setting, limit)}") from None
    found = plan_of(solution.assignment, work, setting)
    priced = price(found, work, setting)
    table_wise_s = None if baseline is None else baseline[0]
    return PlanResult(found, work, setting, limit, priced, problem, solution, table_wise_s)


def _checked_memory(memory: float | None) -> float:
    if memory is None:
        return UNLIMITED
    if not is_number(memory) or not 0 < memory < np.inf:
        raise ArgumentError(f"memory is a number of bytes above 0, found {memory!r}.")
    return float(memory)


def make_problem(work: Workload, setting: Setting, memory: float) -> Problem:
    """The options of all tables, and what is left of each rank's memory for them."""
    made = table_options(setting, work)
    common = made.common
    left = memory - common[1]
    if left <= 0:
        raise NoPlanFits(
            f"No plan fits into {show_bytes(memory)} per rank: outputs and exchanged ids alone "
            f"take {show_bytes(common[1])}. A smaller batch needs less."
        )
    return Problem(
        names=[use.table.name for use in work.uses],
        options=made.options,
        num_ranks=setting.num_ranks,
        capacity=np.array([left]),
        ranks_per_host=setting.ranks_per_host,
        base_s=setting.base_s + common[0],
        at_once=cores_at_once(setting),
        given_flat=made.flat,
    )


def plan_of(assignment: Assignment, work: Workload, setting: Setting) -> Plan:
    """The plan file's entries for an assignment."""
    entries: dict[str, Entry] = {}
    for number, use in enumerate(work.uses):
        way: SplitKind = assignment.option(number).what
        ranks = sorted(assignment.ranks[number].tolist())
        entry: Entry = way.kind
        if way.kind == "table_wise":
            entry = {"kind": way.kind, "rank": ranks[0]} if ranks else way.kind
        elif way.kind in ("grid", "column_wise") and len(ranks) < setting.num_ranks and ranks:
            entry = {"kind": way.kind, "ranks": ranks}
        entries[use.table.name] = entry
    return Plan(entries, setting.exchange_dtype)


def _table_wise(
    problem: Problem, work: Workload, setting: Setting, memory: float
) -> tuple[float, Assignment] | None:
    """Each table on one rank, where `table_wise` puts it; None if that exceeds memory."""
    places = [
        next((i for i, o in enumerate(each) if o.what.kind == "table_wise"), None)
        for each in problem.options
    ]
    if any(place is None for place in places):
        return None
    holders = Plan({"*": "table_wise"}).holders(work.tables, setting.num_ranks)
    ranks = [np.asarray(r if r is not None else [0], np.int64) for _, r in holders]
    found = Assignment(problem, [int(p) for p in places if p is not None], ranks)
    return (found.cost(), found) if found.fits() else None


# -- of the plans within the gap, the fastest with kernel calls -------------------------------


def _settled(result: PlanResult, gap: float, seconds: float | None) -> PlanResult:
    """Of plans whose cost is within the gap, the one with the least `Price.expected_s`."""
    problem, work, setting = result.problem, result.work, result.setting
    if len(problem.names) * problem.num_ranks > _MOST_TRIED or cores_at_once(setting) is not None:
        return result
    most_s = max(result.cost_s, min(result.bound_s * (1 + gap), result.table_wise_s or np.inf))
    left_s = None if seconds is None else seconds - result.solution.cpu_s
    best, start = result, result.solution.assignment
    for found in Settling(start, work, setting, most_s, left_s).plans():
        made = plan_of(found, work, setting)
        priced = price(made, work, setting)
        if priced.step_s <= most_s and priced.expected_s < best.price.expected_s:
            solution = replace(result.solution, assignment=found, cost_s=found.cost())
            best = replace(result, plan=made, price=priced, solution=solution)
    return best


# -- what would fit --------------------------------------------------------------------------


def what_would_fit(work: Workload, setting: Setting, memory: float) -> str:
    """The least memory, and the smallest number of ranks, with which a plan is found."""
    tried = len(work.uses) * setting.num_ranks <= _MOST_TRIED
    said = [f"{show_bytes(memory)} per rank on {setting.num_ranks} ranks are too little."]
    least = least_memory(work, setting) if tried else least_on_average(work, setting)
    said.append(f"{show_bytes(least)} per rank would {'do' if tried else 'be needed at least'}")
    ranks = fewest_ranks(work, setting, memory)
    if ranks is not None:
        said.append(f"or {'' if tried else 'at least '}{ranks} ranks of {show_bytes(memory)}")
    return f"{said[0]} {', '.join(said[1:])}."


def least_on_average(work: Workload, setting: Setting) -> float:
    """A lower bound on the memory per rank: from means, and from each table's smallest shard."""
    made = table_options(setting, work)
    flat = made.flat
    means = np.minimum.reduceat(flat.mean[:, 1], flat.first[:-1])
    peaks = np.minimum.reduceat(flat.peak[:, 1], flat.first[:-1])
    return float(made.common[1] + max(means.sum(), peaks.max()))


def least_memory(work: Workload, setting: Setting) -> float:
    """Within a hundredth, the memory with which a plan is found."""
    low = least_on_average(work, setting)
    high = low * 1.01
    while not _fits(work, setting, high):
        low, high = high, high * 1.3
    while high > low * 1.01:
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(work, setting, middle) else (middle, high)
    return high


def _fits(work: Workload, setting: Setting, memory: float) -> bool:
    try:
        solve(make_problem(work, setting, memory), gap=1e9, seconds=2.0, exact=False)
    except NoPlanFits:
        return False
    return True


def fewest_ranks(work: Workload, setting: Setting, memory: float) -> int | None:
    """The smallest number of ranks on which a plan is found, or fits on average."""
    hosts = setting.num_ranks // setting.ranks_per_host
    step = setting.ranks_per_host if hosts > 1 else 1
    previous, num = setting.num_ranks, setting.num_ranks * 2

    def fits(ranks: int) -> bool:
        other = _with_ranks(setting, ranks)
        if least_on_average(work, other) > memory:
            return False
        tried = len(work.uses) * ranks <= _MOST_TRIED
        return not tried or _fits(work, other, memory)

    while not fits(num):
        previous, num = num, num * 2
        if num > 1 << 13:
            return None
    while num - previous > step:
        middle = (previous + num) // 2 // step * step
        if middle <= previous:
            break
        previous, num = (previous, middle) if fits(middle) else (middle, num)
    return num


def _with_ranks(setting: Setting, num: int) -> Setting:
    hosts = setting.num_ranks // setting.ranks_per_host
    per_host = setting.ranks_per_host if hosts > 1 and num % setting.ranks_per_host == 0 else num
    return replace(setting, num_ranks=num, ranks_per_host=per_host)
