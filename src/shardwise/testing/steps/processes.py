"""Cases in processes that talk through gloo: one set of processes plays many.

A case that fails may leave ranks waiting for each other: its set of processes is ended, and the
next cases get another.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError
from shardwise.launch import launch
from shardwise.testing.steps.case import Case
from shardwise.testing.steps.subject import training_of
from shardwise.testing.steps.training import Outcome, play
from shardwise.testing.steps.verdict import Verdict, verdict_of

#: How long a rank waits for the others; much longer than a case takes.
WAIT_S = 30.0


def prove_in_processes(
    cases: list[Case], report: Callable[[Verdict], None] = lambda _: None
) -> list[Verdict]:
    """The verdicts of cases, in as many processes as each has ranks."""
    verdicts: list[Verdict] = []
    for size in sorted({case.mesh.num_ranks for case in cases}):
        left = [case for case in cases if case.mesh.num_ranks == size]
        while left:
            played = _play_some(left, size)
            for verdict in played:
                report(verdict)
            verdicts += played
            left = left[len(played) :]
    return verdicts


def _play_some(cases: list[Case], num_ranks: int) -> list[Verdict]:
    """Verdicts of the first cases: of all, or up to one that ended the processes."""
    heard: dict[int, dict[int, Outcome]] = {}

    def on_note(rank: int, said: tuple[int, Outcome]) -> None:
        heard.setdefault(said[0], {})[rank] = said[1]

    with TemporaryDirectory() as folder:
        ending = "the processes ended"
        try:
            texts = [str(case) for case in cases]
            launch(
                _play_all, num_ranks, texts, folder, on_note=on_note, collective_timeout_s=WAIT_S
            )
        except (ShardwiseError, RuntimeError) as error:
            ending = f"{type(error).__name__}: {error}"
        verdicts = []
        for number, case in enumerate(cases):
            outcomes = heard.get(number, {})
            if len(outcomes) < num_ranks:
                failed = [o.failed for o in outcomes.values() if o.failed]
                verdicts.append(Verdict(case, "wrong", failed[0] if failed else ending))
                break
            ordered = [outcomes[rank] for rank in range(num_ranks)]
            verdicts.append(verdict_of(case, ordered, Path(folder, str(number))))
            if any(outcome.failed for outcome in ordered):
                break
        return verdicts


def _play_all(note: Callable[[Any], None], texts: list[str], folder: str) -> None:
    """On each rank: play the cases until one fails."""
    torch.set_num_threads(1)
    # Ranks that are done with a case meet in a group of their own, not amid others' collectives.
    meeting = dist.new_group(backend="gloo")
    for number, text in enumerate(texts):
        (outcome,) = play(training_of(Case.parse(text)), Path(folder, str(number)))
        note((number, outcome))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, (outcome.refused, bool(outcome.failed)), group=meeting)
        if len({refused for refused, _ in states}) > 1 or any(failed for _, failed in states):
            return
