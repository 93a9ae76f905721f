"""What each rank was doing when a collective failed.

A rank whose collective fails writes what it did to the store, waits a moment for the others, and
reads what they wrote: so the error of each rank names what the others did instead. A launched rank
also writes that it has returned.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shardwise._torch.frames import line_outside
from shardwise.comm.watch import watch
from shardwise.core.doing import heard, tell
from shardwise.core.world import current_world
from shardwise.errors import CollectiveError
from shardwise.simulation.roster import spans

#: How long a rank waits for the others to say what they did; they time out at about the same time.
GRACE_S = 2.0
#: Each says more about what this rank does; see debug.journal.
describers: list[Callable[[], str]] = []
#: Each raises where it knows better why the ranks have lost each other; see debug.journal.
judges: list[Callable[[], None]] = []


def is_lost(error: Exception) -> bool:
    """Whether an error is that of a backend: a rank that is gone, or that does not come."""
    return type(error) is RuntimeError or isinstance(error, dist.DistError)


def doing_now(what: str) -> str:
    """What this rank does, for which op, and at which line of the program."""
    cause, line = watch.cause, line_outside()
    words = [what]
    words += [f"for {cause.op}"] if cause is not None else []
    words += [f"at {line}"] if line is not None else []
    return ", ".join([" ".join(words), *(describe() for describe in describers)])


def what_ranks_did(mine: str) -> str:
    """A sentence that names what each rank did, as far as it says so in time."""
    world = current_world()
    if len(world.present) == world.size:
        return ""
    tell(f"was in {mine}"[:4000])
    for judge in judges:
        judge()
    said = heard(world.size, GRACE_S)
    ranks: dict[str, list[int]] = {}
    for rank in range(world.size):
        ranks.setdefault(said.get(rank, ""), []).append(rank)
    silent = ranks.pop("", [])
    parts = [f"{_ranks(having)} {text}" for text, having in ranks.items()]
    if silent:
        parts.append(f"{_ranks(silent)} said nothing: still computing, waiting elsewhere, or ended")
    return f"What the ranks did: {'; '.join(parts)}."


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def lost(error: Exception, what: str) -> CollectiveError:
    """The error of a rank whose collective failed; `what` names the collective."""
    mine = doing_now(what)
    return CollectiveError(
        f"{mine} failed on rank {dist.get_rank()}: {error} {what_ranks_did(mine)} The ranks are "
        "out of step: end all processes, and start again from a checkpoint."
    )
