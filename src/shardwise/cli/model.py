"""shardwise explain and check: one step of a user's model, and a comparison with one device."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from shardwise._torch.functions import tree_map
from shardwise.cli.console import console
from shardwise.core.world import current_world
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.report import (
    Case,
    Mesh,
    Parity,
    StepReport,
    TrainingParity,
    check_in_processes,
    check_simulated,
    check_training,
    report_step,
    write_html,
)
from shardwise.report.case import section_of
from shardwise.report.step import Collective, optimizer_tensors
from shardwise.report.tables import (
    memory_table,
    outputs_table,
    parameters_table,
    parity_table,
    training_table,
)
from shardwise.simulation.world import play_one_rank, simulate
from shardwise.testing.loop import (
    call,
    collections_in,
    loss_of,
    part_of_batch,
    per_rank,
    sparse_parameters,
    split_batch,
)

_OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
}


def is_of_tables(target: str, plan: str | None) -> bool:
    """Whether the command is about a plan of tables, of a file or of a model."""
    return Path(target).suffix in (".toml", ".json") or (
        plan is not None and section_of(plan) == "tables"
    )


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
    ranks: int | None = None,
    batch: int | None = None,
) -> None:
    if optimizer not in _OPTIMIZERS:
        raise ArgumentError(
            f"--optimizer {optimizer} is for a priced plan of tables: a step of a model takes "
            f"{', '.join(_OPTIMIZERS)}, and tables with an optimizer= of their own take that."
        )
    case = Case(target, plan, seed, groups=fully_shard, context=context, recompute=recompute)
    parsed = Mesh.parse(mesh)
    if ranks is None:
        report = explain_step(case, parsed, optimizer)
    elif ranks != parsed.num_ranks:
        raise ArgumentError(f"--ranks asks for {ranks} ranks, and the mesh {parsed} has others.")
    else:
        report = explain_layouts(case, parsed, optimizer, batch)
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
    with simulate(mesh.num_ranks):
        return _take_step(case, mesh, optimizer)


def explain_layouts(case: Case, mesh: Mesh, optimizer: str, batch: int | None = None) -> StepReport:
    """One step of the first and of the last rank, from layouts alone: nothing is allocated.

    These ranks hold the largest and the smallest shards. `batch` is the number of examples of a
    step, if it differs from that of the case's batch.
    """
    reports = []
    for rank in dict.fromkeys((0, mesh.num_ranks - 1)):
        with play_one_rank(rank, mesh.num_ranks):
            reports.append(_take_step(case, mesh, optimizer, rank, batch))
    report, *others = reports
    for other in others:
        report.ranks += other.ranks
        report.memory += other.memory
        report.parameters = [
            replace(
                mine,
                parts=mine.parts + theirs.parts,
                bytes_per_rank=mine.bytes_per_rank + theirs.bytes_per_rank,
            )
            for mine, theirs in zip(report.parameters, other.parameters, strict=True)
        ]
    return report


def _take_step(
    case: Case, mesh: Mesh, optimizer: str, rank: int | None = None, batch_size: int | None = None
) -> StepReport:
    """A step of all ranks, or of one in a world without values."""
    module, batch = case.build()
    if batch_size is not None:
        batch = _of_size(batch, batch_size)
    if any(parameter.is_meta for parameter in module.parameters()):
        current_world().has_values = False
    device_mesh = mesh.make()
    sharded = case.shard(module, device_mesh)
    if rank is None:
        mine = per_rank(split_batch(batch, sharded.num_parts), sharded.part_of)
    else:
        mine = part_of_batch(batch, sharded.part_of(rank), sharded.num_parts)
    del batch
    dense, sparse = _parameters_to_step(sharded.module)
    if sparse and rank is not None:
        raise UnsupportedError(
            "A sparse gradient has a row for each id of a batch, which layouts do not have: leave "
            "--ranks out to simulate a step, or make the tables with sparse=False."
        )
    optimizers = _optimizers(optimizer, dense, sparse)

    def forward() -> torch.Tensor:
        return loss_of(call(sharded.module, mine))

    def state() -> list[torch.Tensor]:
        own = [t for each in optimizers for t in optimizer_tensors(each)]
        fused = [each.optimizer.state for each in _updated_in_backward(module)]
        return own + [t for of in fused for states in of.values() for t in states.values()]

    def update() -> None:
        # The number of steps is on the host; torch 2.11 makes it on the default device.
        with torch.device("cpu"):
            for each in optimizers:
                each.step()

    report = report_step(case.target, sharded.module, device_mesh, forward, update, state)
    report.collectives = [_without_own_line(each) for each in report.collectives]
    report.facts = {
        "model": f"{case.target}, {sum(p.numel() for p in module.parameters()):,} parameters",
        "plan": case.plan or "none: data parallel",
        "fully sharded": ", ".join(case.groups),
        "attention over positions": ", ".join(case.context),
        "computed again in backward": ", ".join(case.recompute),
        "mesh": str(mesh),
        "optimizer": ", ".join(type(each).__name__ for each in optimizers) or "that of the tables",
    }
    report.facts = {what: text for what, text in report.facts.items() if text}
    return report


def _updated_in_backward(module: torch.nn.Module) -> list[Any]:
    """The collections with an optimizer of their own."""
    return [each for each in collections_in(module).values() if each.optimizer is not None]


Parameters = list[torch.nn.Parameter]


def _parameters_to_step(module: torch.nn.Module) -> tuple[Parameters, Parameters]:
    """The parameters that are not updated in backward, with dense and with sparse gradients."""
    updated = {id(p) for each in _updated_in_backward(module) for p in each.parameters()}
    left = [p for p in module.parameters() if id(p) not in updated]
    sparse = {id(p) for p in sparse_parameters(module)}
    return [p for p in left if id(p) not in sparse], [p for p in left if id(p) in sparse]


def _optimizers(name: str, dense: Parameters, sparse: Parameters) -> list[torch.optim.Optimizer]:
    """The optimizer of this name; SparseAdam takes sparse gradients, which Adam refuses."""
    kinds: list[Any] = [(_OPTIMIZERS[name], dense + sparse)]
    if name in ("adam", "adamw"):
        kinds = [(_OPTIMIZERS[name], dense), (torch.optim.SparseAdam, sparse)]
    return [kind(own, lr=1e-3) for kind, own in kinds if own]


def _of_size(batch: Any, size: int) -> Any:
    """A batch of this many examples, without values."""

    def sized(leaf: Any) -> Any:
        batched = isinstance(leaf, torch.Tensor) and leaf.dim()
        return leaf.new_empty((size, *leaf.shape[1:])) if batched else leaf

    return tree_map(sized, batch)


def _without_own_line(each: Collective) -> Collective:
    """Without the line of this command, which calls backward."""
    own = each.line is not None and each.line.startswith(f"{Path(sys.argv[0]).name}:")
    return replace(each, line=None) if own else each


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


def run_check(
    target: str,
    plan: str | None,
    ranks: str | None,
    mesh: str | None,
    data: str,
    options: str,
    processes: bool,
    tolerance: float,
    seed: int,
    as_json: bool,
    fully_shard: tuple[str, ...],
    context: tuple[str, ...],
    recompute: tuple[str, ...],
) -> int:
    """0 when everything agrees, 1 when something differs, 2 when something was refused."""
    patterns = {"groups": fully_shard, "context": context, "recompute": recompute}
    case = Case(target, plan, seed, data, **patterns)
    chosen = [word.strip() for word in options.split(",") if word.strip()]
    if chosen and not mesh:
        raise ArgumentError("--options are those of training steps, which --mesh asks for.")
    compare = check_in_processes if processes else check_simulated
    out = console()
    kinds = set()
    results = []
    trained = parse_meshes(mesh) if mesh else []
    compared = parse_meshes(ranks or "1,2,4") if ranks or not mesh else []
    for number, each in enumerate([*compared, *trained]):
        parity = compare(case, each, tolerance)
        runs: list[TrainingParity] = []
        if number >= len(compared):
            runs = check_training(case, each, chosen, tolerance=tolerance, processes=processes)
        kinds |= {"ok" if parity.agrees else "wrong", *(run.kind for run in runs)}
        results.append(_as_dict(parity, runs))
        if not as_json:
            out.print(summary(parity, processes))
            if not parity.agrees:
                out.print(parity_table(parity))
            if runs:
                out.print(training_table(runs))
    if as_json:
        print(json.dumps(results, indent=2))
    return 1 if "wrong" in kinds else 2 if "refused" in kinds else 0


def summary(parity: Parity, processes: bool) -> str:
    kinds = Counter(each.what for each in parity.differences)
    words = {"random": "random draws"}
    compared = ", ".join(
        f"{count} {words.get(what, what).removesuffix('s' if count == 1 else '')}"
        for what, count in kinds.items()
    )
    num = parity.mesh.num_ranks
    one, several = ("process", "processes") if processes else ("simulated rank", "simulated ranks")
    world = f"{num} {one if num == 1 else several}"
    verdict = "agrees with one device" if parity.agrees else "differs from one device"
    return f"{world} ({parity.mesh}): {verdict}; compared {compared}"


def parse_meshes(text: str) -> list[Mesh]:
    """
    >>> [str(mesh) for mesh in parse_meshes("1,4")]
    ['tp=1', 'tp=4']
    >>> [str(mesh) for mesh in parse_meshes("dp=2,tp=2; tp=4")]
    ['dp=2, tp=2', 'tp=4']
    """
    parts = text.split(";") if "=" in text else text.split(",")
    meshes = [Mesh.parse(part.strip()) for part in parts if part.strip()]
    if not meshes:
        raise ArgumentError(f"--ranks is a list of numbers such as 1,2,4; found {text!r}.")
    return meshes


def _as_dict(parity: Parity, runs: list[TrainingParity]) -> dict[str, object]:
    differences = [
        {
            **asdict(each),
            "largest": each.largest if math.isfinite(each.largest) else None,  # no NaN in JSON
            "agrees": each.within(parity.tolerance),
        }
        for each in parity.differences
    ]
    content: dict[str, object] = {
        "mesh": str(parity.mesh),
        "agrees": parity.agrees,
        "differences": differences,
    }
    if runs:
        content["training"] = [
            {"options": run.options, "verdict": run.kind, "text": run.text} for run in runs
        ]
    return content
