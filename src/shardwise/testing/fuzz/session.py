"""Many programs one after another: those of one mesh share a simulated world."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shardwise.simulation.world import simulate
from shardwise.testing.fuzz.generate import MESHES, generate, mesh_of
from shardwise.testing.fuzz.play import ProgramOutcome, play
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.result import Result
from shardwise.testing.fuzz.script import script
from shardwise.testing.fuzz.shrink import play_alone, play_forked, shrink
from shardwise.testing.fuzz.worlds import Sharded

#: Programs of one world; a fresh one keeps its caches from growing.
OF_ONE_WORLD = 100
#: Failures of one kind that are made smaller.
MOST_SHRUNK = 3

Meshes = tuple[tuple[int, ...], ...]


def by_mesh(seeds: Sequence[int], meshes: Meshes = MESHES) -> list[int]:
    """The seeds in an order in which worlds are seldom changed."""
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
    """One program in a world of its own; `forked` survives what ends the process."""
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
        # In a world of its own it may not fail: then only the whole program is known to.
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
