"""Faults at a chosen moment of a simulated world.

Note [Moments]
A moment is a collective, a step in which the ranks of a checkpoint meet, or a block written to a
checkpoint's file; they are counted from 0 as the world runs, so a fault comes at the same point
every time. A fault that cannot come at its moment comes at the next one at which it can: a disk
has no messages to drop. Nothing waits: time that a fault takes is only counted. After a rank was
killed or a message was lost the groups of the world are broken, as they are in processes: whatever
the ranks do together raises `CollectiveError`. Compiled code runs no moments.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.world import current_world, in_simulated_world
from shardwise.errors import ArgumentError, CollectiveError
from shardwise.simulation.local_tensor import LocalTensor, from_ranks

#: How long a simulated collective waits for a rank, as under `launch`.
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank ends: the others lose it at moment `at`, and it cleans up nothing."""

    rank: int
    at: int


@dataclass(frozen=True, slots=True)
class Drop:
    """What a rank sends at moment `at` never arrives, so that the others time out."""

    rank: int
    at: int


@dataclass(frozen=True, slots=True)
class Delay:
    """A rank comes so many seconds late; beyond the timeout of 120 s, the others give up."""

    rank: int
    at: int
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One bit of what a rank sends or writes at moment `at` is flipped; `bit` says which one."""

    rank: int
    at: int
    bit: int = 0


@dataclass(frozen=True, slots=True)
class FullDisk:
    """Checkpoints can write so many bytes; then there is no space left."""

    after_bytes: int = 0


SimulatedFault = Kill | Drop | Delay | Corrupt | FullDisk


def draw_fault(seed: int, num_ranks: int, num_moments: int) -> SimulatedFault:
    """A fault of any kind at any of the moments; the same for the same arguments.

    >>> draw_fault(3, num_ranks=4, num_moments=10)
    Kill(rank=2, at=3)
    """
    draw = random.Random(f"{seed} {num_ranks} {num_moments}")
    rank, at = draw.randrange(num_ranks), draw.randrange(max(num_moments, 1))
    kinds: list[SimulatedFault] = [
        Kill(rank, at),
        Drop(rank, at),
        Delay(rank, at, draw.choice([0.5, TIMEOUT_S / 2, 2 * TIMEOUT_S])),
        Corrupt(rank, at, draw.randrange(1 << 12)),
        FullDisk(draw.randrange(1 << draw.randrange(1, 20))),
    ]
    return draw.choice(kinds)


class FaultInjector:
    """The faults of one simulated world, and what has come of them."""

    def __init__(self, faults: Sequence[SimulatedFault], num_ranks: int) -> None:
        for fault in faults:
            if not isinstance(fault, SimulatedFault):
                raise ArgumentError(
                    f"simulate(faults=...) takes Kill, Drop, Delay, Corrupt and FullDisk of "
                    f"shardwise.testing, found {fault!r}."
                )
            if not isinstance(fault, FullDisk) and not 0 <= fault.rank < num_ranks:
                raise ArgumentError(f"{fault} names no rank of a world of {num_ranks}.")
        self._timed = [fault for fault in faults if not isinstance(fault, FullDisk)]
        room = [fault.after_bytes for fault in faults if isinstance(fault, FullDisk)]
        self._room_bytes = min(room) if room else None
        #: Why nothing can be sent any more.
        self._broken: str | None = None
        self.killed: set[int] = set()
        self.num_moments = 0
        self.waited_s = 0.0

    # -- moments -----------------------------------------------------------------------------

    def collective(self, x: LocalTensor) -> LocalTensor:
        """What the ranks send in a collective; raises if it fails."""
        if type(x._parts[0]) is not torch.Tensor:
            return x  # traced by a compiler
        for fault in self._due(Kill, Drop, Delay, Corrupt):
            if isinstance(fault, Corrupt):
                x = _corrupted(x, fault)
            else:
                self._lose(fault)
        self._raise_if_broken()
        return x

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """What the ranks of a checkpoint send each other in a step; raises if it fails."""
        sent = list(messages)
        for fault in self._due(Kill, Drop, Delay, Corrupt):
            if isinstance(fault, Corrupt):
                sent[fault.rank] = _flipped(sent[fault.rank], fault.bit)
            else:
                self._lose(fault)
        self._raise_if_broken()
        return sent

    def write(self, data: memoryview) -> memoryview:
        """What is written to a checkpoint's file instead of `data`; raises if it fails."""
        for fault in self._due(Kill, Corrupt):
            if isinstance(fault, Corrupt):
                data = memoryview(_flipped(bytes(data), fault.bit))
            else:
                self._lose(fault)
        self._raise_if_broken()
        if self._room_bytes is not None:
            self._room_bytes -= data.nbytes
            if self._room_bytes < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return data

    def _due(self, *kinds: type) -> list[Any]:
        now = self.num_moments
        self.num_moments += 1
        due = [f for f in self._timed if f.at <= now and isinstance(f, kinds)]
        self._timed = [f for f in self._timed if f not in due]
        return due

    def _lose(self, fault: Kill | Drop | Delay) -> None:
        if isinstance(fault, Kill):
            self.killed.add(fault.rank)
            self._broken = f"rank {fault.rank} was killed"
        elif isinstance(fault, Delay):
            self.waited_s += min(fault.seconds, TIMEOUT_S)
            if fault.seconds > TIMEOUT_S:
                self._broken = f"rank {fault.rank} did not come within {TIMEOUT_S:g} s"
        else:
            self.waited_s += TIMEOUT_S
            self._broken = f"a message of rank {fault.rank} did not arrive within {TIMEOUT_S:g} s"

    def _raise_if_broken(self) -> None:
        if self._broken is not None:
            raise CollectiveError(
                f"The ranks have lost each other: {self._broken}. End all processes, and start "
                "again from a checkpoint."
            )


def _flipped(data: bytes, bit: int) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


def _corrupted(x: LocalTensor, fault: Corrupt) -> LocalTensor:
    if fault.rank not in x.ranks:
        return x
    parts = [x.on_rank(rank) for rank in x.ranks]
    place = x.ranks.index(fault.rank)
    damaged = parts[place].clone(memory_format=torch.contiguous_format)
    if damaged.numel():
        raw = damaged.view(-1).view(torch.uint8)
        raw[fault.bit // 8 % len(raw)] ^= 1 if damaged.dtype is torch.bool else 1 << fault.bit % 8
    parts[place] = damaged
    return from_ranks(x._roster.world, x.ranks, parts, x._sized)


def written(data: memoryview) -> memoryview:
    """What reaches the disk of `data`; all of it, but for faults of a simulated world."""
    faults = current_world().faults if in_simulated_world() else None
    return data if faults is None else faults.write(data)
