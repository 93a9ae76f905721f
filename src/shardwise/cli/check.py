"""shardwise check: compare a sharded model with one device."""

from __future__ import annotations

import json
from dataclasses import asdict

from shardwise.cli.console import console
from shardwise.errors import ArgumentError
from shardwise.report import (
    Case,
    Mesh,
    Parity,
    TrainingParity,
    check_in_processes,
    check_simulated,
    check_training,
)
from shardwise.report.tables import parity_table, training_table


def run_check(
    target: str,
    plan: str | None,
    ranks: str,
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
    for each in parse_meshes(mesh or ranks):
        parity = compare(case, each, tolerance)
        runs: list[TrainingParity] = []
        if mesh:
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
    kinds: dict[str, int] = {}
    for each in parity.differences:
        kinds[each.what] = kinds.get(each.what, 0) + 1
    compared = ", ".join(f"{count} {what}" for what, count in kinds.items())
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
        {**asdict(each), "agrees": each.within(parity.tolerance)} for each in parity.differences
    ]
    said: dict[str, object] = {
        "mesh": str(parity.mesh),
        "agrees": parity.agrees,
        "differences": differences,
    }
    if runs:
        said["training"] = [
            {"options": run.options, "verdict": run.kind, "text": run.text} for run in runs
        ]
    return said
