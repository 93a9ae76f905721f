"""Verdicts: a case right, refused or wrong, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shardwise import checkpoint
from shardwise.comm.simulate import simulate
from shardwise.testing.batches import call
from shardwise.testing.differences import Difference, differences
from shardwise.testing.steps.case import Case
from shardwise.testing.steps.play import Outcome, build, play, play_alone

#: How far a parameter may be off, of how far it went: in double precision, and under autocast.
BOUND = 1e-8
AUTOCAST_BOUND = 0.08
#: Cases that share a simulated world, in which plans of calls are found once.
CASES_PER_WORLD = 60


@dataclass(frozen=True)
class Verdict:
    case: Case
    kind: str
    text: str = ""

    def __str__(self) -> str:
        said = f"\n    {self.text}" if self.text else ""
        return f'{self.kind}: --replay "{self.case}"{said}'


def bound_of(case: Case) -> float:
    return AUTOCAST_BOUND if "autocast" in case.options else BOUND


def judge(case: Case, outcomes: list[Outcome], folder: Path) -> Verdict:
    """What all ranks hold, beside one device."""
    if any(outcome.failed for outcome in outcomes):
        return Verdict(case, "wrong", _first(outcomes, "failed"))
    refusals = {outcome.refused for outcome in outcomes}
    if refusals != {""}:
        text = _first(outcomes, "refused")
        if "" in refusals or len(refusals) > 1:
            return Verdict(case, "wrong", f"refused on some ranks, or for other reasons: {text}")
        return Verdict(case, "refused", text)
    alone = play_alone(case)
    faults = []
    for rank, (one, many) in enumerate(zip(alone, outcomes, strict=True)):
        found = [f"on rank {rank}: {text}" for text in _faults(case, one, many)]
        if found:
            faults = found
            break
    if not faults and "save" in case.options:
        faults = _faults_of_loaded(case, alone[0], folder)
    return Verdict(case, "wrong", "; ".join(faults[:4])) if faults else Verdict(case, "ok")


def _first(outcomes: list[Outcome], what: str) -> str:
    said = [getattr(o, what) for o in outcomes if getattr(o, what)]
    # A rank that fails takes its connections with it; what it says itself is the cause.
    return next((text for text in said if "gloo/transport" not in text), said[0])


def _faults(case: Case, one: Outcome, many: Outcome) -> list[str]:
    found: list[Difference] = []
    for what in ("parameters", "buffers", "left"):
        found += differences(what, getattr(one, what), getattr(many, what))
    return [_said(each) for each in found if not each.within(bound_of(case))]


def _said(each: Difference) -> str:
    if each.remark:
        return f"{each.what} {each.name} {each.remark}"
    return f"{each.what} {each.name} off by {100 * each.largest / (each.scale or 1):.2g}%"


def _faults_of_loaded(case: Case, alone: Outcome, folder: Path) -> list[str]:
    """What all ranks saved, loaded by one device: its parameters, and the loss that it has."""
    module, batches = build(case)
    first = {
        name: p.detach().clone() for name, p in module.named_parameters(remove_duplicate=False)
    }
    checkpoint.load({"model": module}, folder / "saved")
    parameters = dict(module.named_parameters(remove_duplicate=False))
    loaded = {name: p.detach() - first[name] for name, p in parameters.items()}
    found = list(differences("loaded", alone.parameters, loaded))
    faults = [_said(each) for each in found if not each.within(bound_of(case))]
    module.eval()
    loss = call(module, batches[0][0]).detach()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first[name] + alone.parameters[name])
    expected = call(module, batches[0][0]).detach()
    if not faults and (loss - expected).abs() > bound_of(case) * expected.abs():
        faults.append(
            f"the loss of what was loaded is {float(loss):.6g}, not {float(expected):.6g}"
        )
    return faults


def prove(
    cases: Iterable[Case], report: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """The verdicts of cases that are played in simulated worlds."""
    verdicts = []
    with TemporaryDirectory() as folder:
        for number, group in enumerate(_worlds(cases)):
            made = []
            with simulate(group[0].mesh.num_ranks):
                for index, case in enumerate(group):
                    home = Path(folder, f"{number}-{index}")
                    made.append((case, play(case, home), home))
            for case, outcomes, home in made:
                verdicts.append(judge(case, outcomes, home))
                report(verdicts[-1])
    return verdicts


def _worlds(cases: Iterable[Case]) -> Iterator[list[Case]]:
    """Cases of as many ranks together, a limited number at a time."""
    by_size: dict[int, list[Case]] = {}
    for case in cases:
        by_size.setdefault(case.mesh.num_ranks, []).append(case)
    for size in sorted(by_size):
        alike = by_size[size]
        for start in range(0, len(alike), CASES_PER_WORLD):
            yield alike[start : start + CASES_PER_WORLD]
