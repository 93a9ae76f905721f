"""Training runs in a world: a simulated one, or processes that talk through gloo.

What is played is anything that pickles, with a function that makes a training run of it. One world
plays many. A run that fails in processes may leave ranks waiting for each other: its set of
processes is ended, and the next runs get another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.launch import launch
from shardwise.simulation.world import simulate
from shardwise.testing.steps.judge import Judgement, judge
from shardwise.testing.steps.training import Training, TrainingOutcome, play

#: How long a rank waits for the others; much longer than a run takes.
WAIT_S = 30.0

Subject = TypeVar("Subject")
Make = Callable[[Subject], Training]


def judge_simulated(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """What becomes of each in one process that plays all ranks."""
    trainings = [make(subject) for subject in subjects]
    with TemporaryDirectory() as folder:
        homes = [Path(folder, str(number)) for number in range(len(subjects))]
        with simulate(num_ranks):
            outcomes = [play(t, home) for t, home in zip(trainings, homes, strict=True)]
        return [judge(*each) for each in zip(trainings, outcomes, homes, strict=True)]


def judge_in_processes(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """What becomes of each in so many processes; `make` has to be importable."""
    judgements: list[Judgement] = []
    while len(judgements) < len(subjects):
        judgements += _judge_some(make, subjects[len(judgements) :], num_ranks)
    return judgements


def _judge_some(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """What becomes of the first ones: of all, or up to one that ended the processes."""
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
            if any(outcome.failed for outcome in ordered):
                break
        return judgements


def _play_all(
    note: Callable[[Any], None], make: Make[Any], subjects: list[Any], folder: str
) -> None:
    """On each rank: play until one fails."""
    torch.set_num_threads(1)
    # Ranks that are done with a run meet in a group of their own, not amid others' collectives.
    meeting = dist.new_group(backend="gloo")
    for number, subject in enumerate(subjects):
        (outcome,) = play(make(subject), Path(folder, str(number)))
        note((number, outcome))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, (outcome.refused, bool(outcome.failed)), group=meeting)
        if len({refused for refused, _ in states}) > 1 or any(failed for _, failed in states):
            return
