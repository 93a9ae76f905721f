"""A plan of tables as one HTML file: bars per rank, choices, and other plans."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape

from shardwise.comm.collectives import show_bytes
from shardwise.planner.explaining import Comparison, choices, describe_result, to_json
from shardwise.planner.planning import PlanResult
from shardwise.planner.price import Price
from shardwise.report.html import html_table, page, table_row, write_page

#: The largest number of ranks with bars.
MOST_RANKS = 256


def write_plan_page(
    result: PlanResult, comparisons: Sequence[Comparison], path: str | os.PathLike[str]
) -> None:
    """Write the page, whole or not at all."""
    write_page(plan_page(result, comparisons), path)


def plan_page(result: PlanResult, comparisons: Sequence[Comparison]) -> str:
    num_tables = len(result.work.uses)
    head = f"<h1>A plan of {num_tables} tables on {result.setting.num_ranks} ranks</h1>\n"
    facts = "".join(f"<p>{escape(line)}</p>" for line in describe_result(result).splitlines())
    figures = _bars("This plan", result.price) + _choices(result) + _compared(result, comparisons)
    data = to_json(result, list(comparisons))
    return page(f"A plan of {num_tables} tables", head + facts + figures, data)


def _bars(title: str, priced: Price) -> str:
    kinds = (
        ("memory", priced.memory, "parameters", show_bytes),
        ("seconds", priced.seconds, "forward", lambda s: f"{1e3 * s:.3g} ms"),
        ("sent", priced.sent, "gradients", show_bytes),
    )
    sections = []
    for name, values, colour, text in kinds:
        most = float(values.max()) or 1.0
        rows = "".join(
            f'<div class="rank"><span>rank {rank}</span><div class="bar"><i data-rank="{rank}" '
            f'data-kind="{name}" data-value="{value:.9g}" style="width:{100 * value / most:.3f}%;'
            f'background:var(--{colour})"></i></div><span>{text(value)}</span></div>'
            for rank, value in enumerate(values[:MOST_RANKS].tolist())
        )
        sections.append(f"<h2>{escape(title)}: {name} of each rank</h2>{rows}")
    return "".join(sections)


def _choices(result: PlanResult) -> str:
    names = ("table", "chosen", "ranks", "why", "next best", "cost with it")
    rows = []
    for each in choices(result):
        ranks = ", ".join(map(str, each.ranks[:8])) + "…" * (len(each.ranks) > 8)
        cost = "" if each.next_cost_s is None else f"{1e3 * each.next_cost_s:.4g} ms"
        cells = (each.table, each.label, ranks, each.why, each.next_label or "", cost)
        rows.append(table_row(cells, 1))
    return f"<h2>Tables</h2>{html_table(names, rows, 1)}"


def _compared(result: PlanResult, comparisons: Sequence[Comparison]) -> str:
    if not comparisons:
        return ""
    found = ["<h2>Other plans</h2>"]
    for each in comparisons:
        fits = "" if each.fits else "; does not fit into memory"
        found.append(
            f"<p>{escape(each.name)}: {1e3 * each.price.step_s:.4g} ms, {each.ratio(result):.2f} "
            f"of this plan{fits}</p>"
        )
        found.append(_bars(each.name, each.price))
    return "".join(found)
