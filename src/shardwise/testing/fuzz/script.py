"""A program as a script that runs on its own and prints what both worlds hold."""

from __future__ import annotations

import math

from shardwise.testing.fuzz.play import ProgramOutcome
from shardwise.testing.fuzz.program import Program

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
