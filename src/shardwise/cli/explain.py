"""shardwise explain: one simulated step of a user's model."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from shardwise.cli.console import console
from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection
from shardwise.errors import ArgumentError
from shardwise.report import Case, Mesh, StepReport, report_step, write_html
from shardwise.report.memory import optimizer_tensors
from shardwise.report.step import Collective
from shardwise.report.tables import memory_table, outputs_table, parameters_table
from shardwise.simulation.world import simulate
from shardwise.testing.batches import call, loss_of, per_rank, split_batch

_OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


def run_explain(
    target: str,
    plan: str | None,
    mesh: str,
    optimizer: str,
    seed: int,
    as_json: bool,
    html: str | None,
    fully_shard: tuple[str, ...],
    context: tuple[str, ...],
    recompute: tuple[str, ...],
) -> None:
    case = Case(target, plan, seed, groups=fully_shard, context=context, recompute=recompute)
    report = explain_step(case, Mesh.parse(mesh), optimizer)
    if html is not None:
        write_html(report, html)
    if as_json:
        print(report.to_json())
        return
    out = console()
    show(report, out)
    if html is not None:
        out.print(f"The page is in {html}.")


def explain_step(case: Case, mesh: Mesh, optimizer: str) -> StepReport:
    """One step in a simulated world."""
    if optimizer not in _OPTIMIZERS:
        raise ArgumentError(
            f"--optimizer {optimizer} is for --ranks: a simulated step takes "
            f"{', '.join(_OPTIMIZERS)}, and tables with an optimizer= of their own take that."
        )
    with simulate(mesh.num_ranks):
        module, batch = case.build()
        device_mesh = mesh.make()
        sharded = case.shard(module, device_mesh)
        parts = split_batch(batch, sharded.num_parts)
        updated = _updates(sharded.module, optimizer)
        kept = [
            inner.optimizer.state
            for inner in module.modules()
            if isinstance(inner, (EmbeddingBagCollection, EmbeddingCollection))
            and inner.optimizer is not None
        ]

        def forward() -> torch.Tensor:
            return loss_of(call(sharded.module, per_rank(parts, sharded.part_of)))

        def state() -> list[torch.Tensor]:
            in_tables = [t for each in kept for states in each.values() for t in states.values()]
            return [*optimizer_tensors(updated), *in_tables]

        report = report_step(case.target, sharded.module, device_mesh, forward, updated.step, state)
    report.collectives = [_without_own_line(each) for each in report.collectives]
    report.facts = {
        "model": f"{case.target}, {sum(p.numel() for p in module.parameters()):,} parameters",
        "plan": case.plan or "none: data parallel",
        **{what: ", ".join(patterns) for what, patterns in _patterns(case) if patterns},
        "mesh": str(mesh),
        "optimizer": optimizer,
    }
    return report


def _patterns(case: Case) -> list[tuple[str, tuple[str, ...]]]:
    return [
        ("fully sharded", case.groups),
        ("attention over positions", case.context),
        ("computed again in backward", case.recompute),
    ]


def _without_own_line(each: Collective) -> Collective:
    """Without the line of this command, which calls backward."""
    own = each.line is not None and each.line.startswith(f"{Path(sys.argv[0]).name}:")
    return replace(each, line=None) if own else each


def _updates(module: torch.nn.Module, name: str) -> torch.optim.Optimizer:
    """An optimizer for what is not updated in backward."""
    fused = {
        id(p)
        for inner in module.modules()
        if isinstance(inner, (EmbeddingBagCollection, EmbeddingCollection))
        and inner.optimizer is not None
        for p in inner.parameters()
    }
    left = [p for p in module.parameters() if id(p) not in fused]
    return _OPTIMIZERS[name](left, lr=1e-3)


def show(report: StepReport, out: Console) -> None:
    for name, text in report.facts.items():
        out.print(f"{name}: {text}", markup=False)
    out.print()
    tables: list[Table] = [
        parameters_table(report),
        outputs_table(report),
        report.traffic.__rich__(),
        memory_table(report),
    ]
    for table in tables:
        out.print(table)
