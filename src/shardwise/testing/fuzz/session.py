"""Many programs one after another: those of one mesh share a simulated world."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from shardwise.simulation.world import simulate
from shardwise.testing.fuzz.generate import MESHES, generate, mesh_of
from shardwise.testing.fuzz.play import ProgramOutcome, Result, play
from shardwise.testing.fuzz.program import Program
from shardwise.testing.fuzz.shrink import play_alone, play_forked, shrink
from shardwise.testing.fuzz.worlds import Sharded

# A program as a script that runs on its own and prints what both worlds hold.

_HEAD = """\
import copy

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.testing.fuzz import OneDevice, Sharded
"""


def script(program: Program, outcome: ProgramOutcome) -> str:
    """The text of the script, with what was found as a comment at its top."""
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
