"""Explain a plan: what limits it, what the next best options cost, how other plans compare."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwise.comm.collectives import show_bytes
from shardwise.embedding.plan import Plan
from shardwise.planner.packing import Packing
from shardwise.planner.planning import UNLIMITED, PlanResult
from shardwise.planner.price import Price, price
from shardwise.planner.problem import cost_of
from shardwise.planner.workload import Workload

#: How many tables the next best option is searched for.
MOST_EXPLAINED = 200
BAR_WIDTH = 15


@dataclass(frozen=True, slots=True)
class TableChoice:
    """One table of a plan: what was chosen, why, and what the next best would cost."""

    table: str
    label: str
    ranks: tuple[int, ...]
    why: str
    next_label: str | None
    next_cost_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """Another plan for the same tables."""

    name: str
    price: Price
    fits: bool

    def ratio(self, result: PlanResult) -> float:
        """Its cost over that of the plan."""
        return self.price.step_s / result.cost_s


def limits(result: PlanResult) -> list[str]:
    """What keeps the plan from being cheaper, most important first."""
    found: list[str] = []
    priced, bound = result.price, result.solution.bound
    worst = int(priced.seconds.argmax())
    if bound.why == "table" and bound.table >= 0:
        name = result.problem.names[bound.table]
        found.append(f"table {name!r}: every way to shard it puts this much on one rank")
    if result.memory < UNLIMITED and bound.prices.any():
        full = int(priced.memory.argmax())
        share = priced.memory[full] / result.memory
        found.append(f"memory: rank {full} is {share:.0%} full; with less memory, plans cost more")
    total = float(priced.seconds[worst])
    network = float(priced.exchange_s[worst]) / total
    if network > 0.4:
        hosts = result.setting.num_ranks // result.setting.ranks_per_host
        s, c = result.setting, result.setting.constants
        between = s.between * c.owner_byte_between_s
        where = "between hosts" if hosts > 1 and between > s.within * c.owner_byte_s else "of ranks"
        found.append(f"the exchange {where}: {network:.0%} of the time of rank {worst}")
    compute = float(priced.compute_s[worst]) / total
    if compute > 0.4:
        found.append(f"lookups and updates: {compute:.0%} of the time of rank {worst}")
    fixed = (priced.asking_s + result.setting.base_s) / total
    if fixed > 0.4:
        found.append(f"work that is the same in every plan: {fixed:.0%} of the step")
    mean = float(priced.seconds.mean()) / total
    if not found or mean < 0.9:
        found.append(f"balance: on average a rank takes {mean:.0%} of the slowest, rank {worst}")
    return found


def choices(result: PlanResult, most: int = MOST_EXPLAINED) -> list[TableChoice]:
    """The tables that load ranks most, each with its next best option."""
    problem, solution = result.problem, result.solution
    assignment = solution.assignment
    packing = Packing.of(assignment, solution.cost_s)
    flat = problem.flat
    chosen = flat.first[:-1] + np.asarray(assignment.chosen)
    order = np.argsort(-flat.mean[chosen, 0], kind="stable")[:most]
    return [_choice(result, packing, int(table)) for table in order]


def _choice(result: PlanResult, packing: Packing, table: int) -> TableChoice:
    problem, assignment = result.problem, result.solution.assignment
    mine, ranks = assignment.chosen[table], assignment.ranks[table]
    options = problem.options[table]
    packing.take(table)
    costs: dict[int, float] = {}
    for number, option in enumerate(options):
        where = packing.place(option)
        if number == mine or where is None:
            continue
        loads = packing.loads.copy()
        option.add_to(loads, where)
        if (loads[:, 1:] <= problem.capacity * (1 + 1e-9)).all():
            costs[number] = cost_of(problem, loads)
    packing.put(table, mine, ranks)
    best = min(costs, key=lambda n: (costs[n], n)) if costs else None
    held = tuple(sorted(ranks.tolist()))
    return TableChoice(
        problem.names[table],
        options[mine].label,
        held,
        _reason(result, table, costs),
        None if best is None else options[best].label,
        None if best is None else costs[best],
    )


def _reason(result: PlanResult, table: int, costs: dict[int, float]) -> str:
    problem = result.problem
    options = problem.options[table]
    chosen = options[result.solution.assignment.chosen[table]]
    kind = chosen.what.kind
    whole = next((i for i, o in enumerate(options) if o.what.kind == "table_wise"), None)
    if kind == "table_wise":
        return "whole: a split would send more"
    if kind == "data_parallel":
        return "on every rank: an exchange would cost more"
    if whole is None:
        return "split: other kinds were ruled out"
    shards = options[whole].shards
    assert shards is not None, "a whole table is one shard"
    if (shards[0, 1:] > problem.capacity).any():
        return "split: on one rank it would exceed the memory"
    if shards[0, 0] + problem.base_s > result.solution.cost_s:
        return "split: on one rank it alone would take longer than the plan"
    if whole not in costs:
        return "split: no rank has memory for all of it beside the others"
    return "split: balances the ranks"


def compare(result: PlanResult, plan: Plan, name: str) -> Comparison:
    """The price of another plan; an error if it is for other tables."""
    priced = price(plan, result.work, result.setting)
    return Comparison(name, priced, bool((priced.memory <= result.memory * (1 + 1e-9)).all()))


# -- as text ---------------------------------------------------------------------------------


def describe_result(result: PlanResult) -> str:
    """The cost, the bound and the gap; what was assumed; what limits."""
    s = result.setting
    hosts = s.num_ranks // s.ranks_per_host
    where = f"{s.num_ranks} ranks" + (f" on {hosts} hosts" if hosts > 1 else "")
    kinds: dict[str, int] = {}
    for number in range(len(result.work.uses)):
        kind = result.solution.assignment.option(number).what.kind
        kinds[kind] = kinds.get(kind, 0) + 1
    listed = ", ".join(f"{num} {kind}" for kind, num in sorted(kinds.items()))
    lines = [
        f"{len(result.work.uses)} tables on {where}: {listed}",
        f"cost {1e3 * result.cost_s:.4g} ms a step, lower bound {1e3 * result.bound_s:.4g} ms, "
        f"gap {_percent(result.gap)} ({result.solution.solver}, "
        f"{result.solution.cpu_s:.2g} CPU seconds, constants of {s.constants.name})",
    ]
    lines.append(_table_wise_line(result))
    sent = result.plan.exchange_dtype
    if sent is not None:
        lines.append(f"rows and gradients are sent as {str(sent).removeprefix('torch.')}")
    elif result.allowed_dtype is not None:
        lines.append("rows and gradients are sent unrounded: rounding would take longer")
    lines += [f"limited by {each}" for each in limits(result)]
    lines += assumed_lines(result.work)
    return "\n".join(lines)


def _percent(gap: float) -> str:
    """
    >>> _percent(2e-16), _percent(0.0123), _percent(2.1)
    ('0%', '1.2%', '210%')
    """
    return f"{100 * gap:.0f}%" if gap < 1e-7 or gap >= 0.1 else f"{100 * gap:.2g}%"


def _table_wise_line(result: PlanResult) -> str:
    """How the plan compares with `table_wise`, and what rules that out."""
    whole = Plan({"*": "table_wise"}, result.plan.exchange_dtype)
    other = compare(result, whole, "table_wise")
    said = f"every table on one rank: {1e3 * other.price.step_s:.4g} ms"
    reasons = [] if other.fits else ["does not fit into memory"]
    without = [u.table.name for u in result.work.uses if u.kinds and "table_wise" not in u.kinds]
    if without:
        reasons.append(f"was ruled out for {without[0]!r}" + (" and others" if without[1:] else ""))
    said += f", which {' and '.join(reasons)}" if reasons else ""
    return f"{said}; this plan takes {1 / other.ratio(result):.2f} of it"


def assumed_lines(work: Workload) -> list[str]:
    total = len(work.uses)
    return [
        f"assumed, since nobody gave it: {name} of {'all' if num == total else num} tables"
        for name, num in work.assumed().items()
    ]


def bars(priced: Price, memory: float, most: int = 16) -> str:
    """A line per rank: memory, compute and traffic, each against the largest of all ranks."""
    seconds, held, sent = priced.seconds, priced.memory, priced.sent
    order = np.arange(len(seconds))
    if len(seconds) > most:
        # The slowest and the fullest.
        picked = [*np.argsort(-seconds)[: most // 2], *np.argsort(-held)[: most // 2]]
        order = np.asarray(sorted({int(r) for r in picked}))
    room = memory if memory < UNLIMITED else float(held.max())
    width = BAR_WIDTH
    lines = [
        f"rank  {f'memory of {show_bytes(room)}':<{width + 9}}"
        f"{f'seconds of {1e3 * seconds.max():.3g} ms':<{width + 9}}"
        f"sent of {show_bytes(sent.max())}"
    ]
    for rank in order.tolist():
        cells = [
            (held[rank] / room, show_bytes(held[rank])),
            (seconds[rank] / seconds.max(), f"{1e3 * seconds[rank]:.3g} ms"),
            (sent[rank] / max(sent.max(), 1e-30), show_bytes(sent[rank])),
        ]
        text = "".join(f"{_bar(share):<{width}} {label:<8}" for share, label in cells)
        lines.append(f"{rank:4}  {text.rstrip()}")
    if len(order) < len(seconds):
        lines.append(f"({len(order)} of {len(seconds)} ranks: the slowest and the fullest)")
    return "\n".join(lines)


def _bar(share: float) -> str:
    """
    >>> _bar(0.5)
    '██████'
    """
    return "█" * round(min(max(share, 0.0), 1.0) * (BAR_WIDTH - 2))


def to_dict(result: PlanResult, comparisons: list[Comparison]) -> dict[str, Any]:
    """All figures as plain data."""
    priced = result.price
    return {
        "cost_s": result.cost_s,
        "bound_s": result.bound_s,
        "gap": result.gap,
        "table_wise_s": result.table_wise_s,
        "cpu_s": result.solution.cpu_s,
        "solver": result.solution.solver,
        "limits": limits(result),
        "assumed": result.work.assumed(),
        "constants": result.setting.constants.name,
        "exchange_dtype": None
        if result.plan.exchange_dtype is None
        else str(result.plan.exchange_dtype).removeprefix("torch."),
        "plan": {k: v if isinstance(v, str) else dict(v) for k, v in result.plan.entries.items()},
        "ranks": {
            "seconds": priced.seconds.tolist(),
            "memory": priced.memory.tolist(),
            "sent": priced.sent.tolist(),
        },
        "history": [
            {"seconds": p.seconds, "cost_s": float(p.cost_s), "gap": float(p.gap), "by": p.by}
            for p in result.solution.history
        ],
        "choices": [
            {
                "table": c.table, "chosen": c.label, "ranks": list(c.ranks), "why": c.why,
                "next": c.next_label, "next_cost_s": c.next_cost_s,
            }
            for c in choices(result)
        ],
        "compared": [
            {"plan": c.name, "cost_s": c.price.step_s, "ratio": c.ratio(result), "fits": c.fits}
            for c in comparisons
        ],
    }  # fmt: skip


def to_json(result: PlanResult, comparisons: list[Comparison]) -> str:
    return json.dumps(to_dict(result, comparisons), indent=2)
