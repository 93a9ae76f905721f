"""Many programs one after another, their results and scripts."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.simulation.world import simulate
from shardwise.testing.fuzz.generate import MESHES, generate, mesh_of
from shardwise.testing.fuzz.play import FAILURES, OUTCOMES, ProgramOutcome, play
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.shrink import play_alone, play_forked, shrink
from shardwise.testing.fuzz.worlds import Sharded


@dataclass
class Result:
    """How the program with this seed ended, and its script where it was shrunk."""

    seed: int
    mesh: tuple[int, ...]
    num_items: int
    kind: str
    aspect: str = ""
    note: str = ""
    script: str = ""


_HEAD = """\
import copy

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.testing.fuzz.worlds import OneDevice, Sharded
"""


def script(program: Program, outcome: ProgramOutcome) -> str:
    """A script that prints what both worlds hold; it runs with the repository on its path."""
    lines = [f"    {line}" for line in program.text.splitlines()]
    shown = f"w.read({outcome.slot})" if outcome.slot else '"no error"'
    return f"""\
# {outcome.kind}: {outcome.note}
{_HEAD}

def program(w):
    torch.manual_seed({program.seed})
{chr(10).join(lines)}
    return {shown}


print("one device:", program(OneDevice()))
with shardwise.simulate({math.prod(program.mesh)}):
    print("sharded:   ", program(Sharded({program.mesh})))
"""


#: Programs that share a simulated world; a new one now and then keeps caches small.
OF_ONE_WORLD = 100
#: Failures of one kind that are shrunk.
MOST_SHRUNK = 3

Meshes = tuple[tuple[int, ...], ...]


def by_mesh(seeds: Sequence[int], meshes: Meshes = MESHES) -> list[int]:
    """The seeds ordered by mesh, since programs of one mesh share a world."""
    return sorted(seeds, key=lambda seed: (mesh_of(seed, meshes), seed))


def play_seeds(
    seeds: Sequence[int], meshes: Meshes = MESHES, most_shrunk: int = MOST_SHRUNK
) -> Iterator[Result]:
    """Play in the given order."""
    shrunk: Counter[tuple[str, str]] = Counter()
    for mesh, same in itertools.groupby(seeds, key=lambda seed: mesh_of(seed, meshes)):
        for batch in _batches(list(same)):
            with simulate(math.prod(mesh)):
                world = Sharded(mesh)
                for seed in batch:
                    program = generate(seed, meshes)
                    outcome = play(program, world)
                    key = (outcome.kind, outcome.aspect)
                    shrunk[key] += outcome.failed
                    yield _result(program, outcome, shrunk[key] <= most_shrunk)


def replay(seed: int, meshes: Meshes = MESHES, forked: bool = False) -> Result:
    """One program in a world of its own; with `forked`, in a process of its own."""
    program = generate(seed, meshes)
    return _result(program, (play_forked if forked else play_alone)(program), True, forked)


def _batches(seeds: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(seeds), OF_ONE_WORLD):
        yield seeds[start : start + OF_ONE_WORLD]


def _result(
    program: Program, outcome: ProgramOutcome, smaller: bool, forked: bool = False
) -> Result:
    text = ""
    if outcome.failed and smaller:
        play_one = play_forked if forked else play_alone
        # Alone in a world it may not fail: then the whole program is shown.
        small = shrink(program, outcome, play_one) if play_one(program).failed else None
        text = script(*small) if small else script(program, outcome)
    return Result(
        program.seed,
        program.mesh,
        len(program.items),
        outcome.kind,
        outcome.aspect,
        outcome.note,
        text,
    )


def counts(results: Sequence[Result]) -> dict[str, int]:
    """Programs by outcome, the worst first."""
    found = Counter(result.kind for result in results)
    return {kind: found[kind] for kind in OUTCOMES}


def summary(results: Sequence[Result]) -> str:
    """Counts, and the most frequent reasons of what was refused or is undefined."""
    steps = sum(result.num_items for result in results)
    told = ", ".join(f"{num} {kind}" for kind, num in counts(results).items())
    lines = [f"{len(results)} programs, {steps} leaves and steps: {told}"]
    for kind in ("refused", "undefined"):
        texts = Counter(result.aspect for result in results if result.kind == kind)
        lines += [f"  {kind} {num:5} times: {text}" for text, num in texts.most_common(20)]
    return "\n".join(lines)


def failures(results: Sequence[Result]) -> list[Result]:
    """The failures, those with a script first, similar ones together."""
    found = [result for result in results if result.kind in FAILURES]
    order = {kind: place for place, kind in enumerate(OUTCOMES)}
    return sorted(found, key=lambda r: (not r.script, order[r.kind], r.aspect, r.seed))


def told(result: Result) -> str:
    """A failure as text, with its script or the command that makes it."""
    head = f"=== seed {result.seed}, mesh {result.mesh}: {result.kind}: {result.note}"
    again = f"    python -m shardwise.testing.fuzz --replay {result.seed}"
    return f"{head}\n{result.script or again}"


def as_json(results: Sequence[Result], settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "settings": settings,
        "counts": counts(results),
        "failures": [asdict(result) for result in failures(results)],
        "refused": [asdict(result) for result in results if result.kind == "refused"],
        "undefined": [asdict(result) for result in results if result.kind == "undefined"],
    }
