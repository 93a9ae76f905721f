"""Verdicts: a training run is right, refused or wrong.

Runs happen in a simulated world, or in processes that talk through gloo. One world plays many.
A run that fails in processes may leave ranks waiting for each other: the processes are ended, and
the next runs get new ones. What is played is anything that pickles, with a function that makes a
training run of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise import checkpoint
from shardwise.errors import ShardwiseError
from shardwise.launch import launch
from shardwise.simulation.world import simulate
from shardwise.testing.compare import Difference, Values, differences
from shardwise.testing.loop import plain_loss
from shardwise.testing.training import (
    Training,
    TrainingOutcome,
    play,
    play_alone,
)


@dataclass(frozen=True)
class Judgement:
    """`kind` is "ok", "refused" or "wrong"; `text` says why, and `compared` what was compared."""

    kind: str
    text: str = ""
    compared: tuple[Difference, ...] = ()


def judge(training: Training, outcomes: list[TrainingOutcome], folder: Path) -> Judgement:
    """Compare the outcomes of all ranks, and what they saved in the folder, with one device."""
    if any(outcome.failed for outcome in outcomes):
        return Judgement("wrong", _first(outcomes, "failed"))
    if any(outcome.refused for outcome in outcomes):
        text = _first(outcomes, "refused")
        if not _agree(outcome.refused for outcome in outcomes):
            return Judgement("wrong", f"refused on some ranks, or for other reasons: {text}")
        return Judgement("refused", text)
    alone = play_alone(training)
    found = [
        (f"on rank {rank}: ", each)
        for rank, (one, many) in enumerate(zip(alone, outcomes, strict=True))
        for what in ("parameters", "buffers", "left")
        for each in differences(what, getattr(one, what), getattr(many, what))
    ]
    if "save" in training.options:
        try:
            found += [("", each) for each in _loaded(training, outcomes[0].parameters, folder)]
        except Exception as error:
            return Judgement("wrong", f"loading by one device: {type(error).__name__}: {error}")
    if "autocast" in training.options:
        rounding = _rounding(training, alone[0])
        every = [each for _, each in found]
        found = [(where, _roughly(each, every, rounding)) for where, each in found]
    faults = [f"{where}{_said(each)}" for where, each in found if not each.within(training.bound)]
    compared = tuple(each for _, each in found)
    return Judgement("wrong" if faults else "ok", "; ".join(faults[:4]), compared)


def _agree(refusals: Iterable[str]) -> bool:
    """Whether all ranks refuse for one reason; each names the ranks of its own part of a mesh."""
    return len({re.sub(r"\[[\d, ]+\]", "[...]", text) for text in refusals}) == 1


def _rounding(training: Training, alone: TrainingOutcome) -> dict[str, float]:
    """By parameter: three times what bfloat16 changes on one device."""
    exact = play_alone(replace(training, options=training.options - {"autocast"}))[0]
    return {
        each.name: 3 * each.largest
        for each in differences("parameters", exact.parameters, alone.parameters)
    }


def _roughly(
    each: Difference, found: Sequence[Difference], rounding: Mapping[str, float]
) -> Difference:
    """The difference without the rounding, relative to at least a tenth of the largest: terms of a
    sum in bfloat16 may be much larger than the sum."""
    largest = max(other.scale for other in found if other.what == each.what)
    gap = max(0.0, each.largest - rounding.get(each.name, 0.0))
    return replace(each, largest=gap, scale=max(each.scale, largest / 10))


def _first(outcomes: list[TrainingOutcome], what: str) -> str:
    said = [getattr(o, what) for o in outcomes if getattr(o, what)]
    # A rank that fails closes its connections, so others fail too; its own error is the cause.
    return next((text for text in said if "gloo/transport" not in text), said[0])


def _said(each: Difference) -> str:
    if each.remark:
        return f"{each.what} {each.name} {each.remark}"
    return f"{each.what} {each.name} off by {100 * each.largest / (each.scale or 1):.2g}%"


def _loaded(training: Training, expected: Values, folder: Path) -> Iterator[Difference]:
    """Load on one device what all ranks saved: compare the parameters and the loss."""
    module, steps, _ = training.begin()
    module.eval()
    parameters = dict(module.named_parameters(remove_duplicate=False))
    first = {name: p.detach().clone() for name, p in parameters.items()}
    checkpoint.load({"model": module}, folder / "saved")
    changes = {name: p.detach() - first[name] for name, p in parameters.items()}
    yield from differences("loaded", expected, changes)
    found = {"the loss": plain_loss(module, steps[0][0]).detach()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first[name] + expected[name])
    yield from differences("loaded", {"the loss": plain_loss(module, steps[0][0]).detach()}, found)


#: How long a rank waits for the others, in seconds; much longer than a run takes.
WAIT_S = 30.0

Subject = TypeVar("Subject")
Make = Callable[[Subject], Training]


def judge_simulated(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """Judge each in one process that plays all ranks."""
    trainings = [make(subject) for subject in subjects]
    with TemporaryDirectory() as folder:
        homes = [Path(folder, str(number)) for number in range(len(subjects))]
        with simulate(num_ranks):
            outcomes = [play(t, home) for t, home in zip(trainings, homes, strict=True)]
        return [judge(*each) for each in zip(trainings, outcomes, homes, strict=True)]


def judge_in_processes(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """Judge each in `num_ranks` processes; `make` has to be importable."""
    judgements: list[Judgement] = []
    while len(judgements) < len(subjects):
        judgements += _judge_some(make, subjects[len(judgements) :], num_ranks)
    return judgements


def _judge_some(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """Judge all, or the first ones up to one that ended the processes."""
    heard: dict[int, dict[int, TrainingOutcome]] = {}

    def on_note(rank: int, said: tuple[int, TrainingOutcome]) -> None:
        heard.setdefault(said[0], {})[rank] = said[1]

    with TemporaryDirectory() as folder:
        ending = "the processes ended"
        try:
            launch(
                _play_all,
                num_ranks,
                make,
                list(subjects),
                folder,
                on_note=on_note,
                collective_timeout_s=WAIT_S,
            )
        except (ShardwiseError, RuntimeError) as error:
            ending = f"{type(error).__name__}: {error}"
        judgements = []
        for number, subject in enumerate(subjects):
            outcomes = heard.get(number, {})
            if len(outcomes) < num_ranks:
                failed = [o.failed for o in outcomes.values() if o.failed]
                judgements.append(Judgement("wrong", failed[0] if failed else ending))
                break
            ordered = [outcomes[rank] for rank in range(num_ranks)]
            judgements.append(judge(make(subject), ordered, Path(folder, str(number))))
            if any(o.failed for o in ordered) or not _agree(o.refused for o in ordered):
                break
        return judgements


def _play_all(
    note: Callable[[Any], None], make: Make[Any], subjects: list[Any], folder: str
) -> None:
    """On each rank: play until one fails."""
    torch.set_num_threads(1)
    # A group of its own keeps this exchange apart from the runs' collectives.
    meeting = dist.new_group(backend="gloo")
    for number, subject in enumerate(subjects):
        (outcome,) = play(make(subject), Path(folder, str(number)))
        note((number, outcome))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, (outcome.refused, bool(outcome.failed)), group=meeting)
        if any(failed for _, failed in states) or not _agree(refused for refused, _ in states):
            return
