"""Whether all ranks hold the same digest, found by short messages in the store.

Note [Rounds]
In round j of a comparison each rank writes to the rank 2^j after it: its digest, and whether all
digests that it knows of were the same. After log2(ranks) rounds each rank has heard of every other,
so all of them come to one verdict in the same round. A rank sends and reads one message per round,
however many ranks there are, and reads it a step later: nobody waits, and no thread is woken. A
collective of a few bytes costs four times as much, most of it in the threads of its backend.

A rank that has sent round n has read round n - 1, and hears of all ranks within log2(ranks) rounds.
So no rank is more rounds behind than that, and a few slots per rank are enough.
"""

from __future__ import annotations

import time

from shardwise._torch.c10d import default_store

_SLOTS = 64
_NOTHING = "-"
_EVERY_S = 0.0005


class DigestComparison:
    """Compares digests of the ranks, one after the other; see Note [Rounds]."""

    def __init__(self, topic: str, rank: int, num_ranks: int, wait_s: float) -> None:
        self._store = default_store()
        self._topic, self._rank, self._num_ranks = f"shardwise/{topic}", rank, num_ranks
        self._wait_s = wait_s
        self._num_rounds = (num_ranks - 1).bit_length()
        #: The rounds so far, in all comparisons.
        self._number = 0
        self._digest, self._same = b"", True

    def begin(self, digest: bytes) -> None:
        """Send the digest; `advance` reads what the others sent."""
        self._digest, self._same = digest, True
        self._send()

    def advance(self) -> bool | None:
        """Read the message of this round: the verdict, or None where another round has begun."""
        same, digest = self._read()
        self._same &= same and digest == self._digest
        self._number += 1
        if self._number % self._num_rounds == 0:
            return self._same
        self._send()
        return None

    def alarm(self) -> None:
        """Tell ranks that wait for a message that this rank will send none."""
        self._store.set(f"{self._topic}/alarm", "")

    def _slot(self, rank: int) -> str:
        return f"{self._topic}/{rank}/{self._number % _SLOTS}"

    def _head(self, same: bool) -> bytes:
        return self._number.to_bytes(8, "little") + bytes([same])

    def _send(self) -> None:
        to = (self._rank + (1 << self._number % self._num_rounds)) % self._num_ranks
        self._store.set(self._slot(to), self._head(self._same) + self._digest)

    def _read(self) -> tuple[bool, bytes]:
        slot, until_s = self._slot(self._rank), time.monotonic() + self._wait_s
        while True:
            # Reads in one round trip, also where nothing was written yet.
            found = self._store.compare_set(slot, _NOTHING, _NOTHING)
            if found[:8] == self._head(True)[:8]:
                return bool(found[8]), found[9:]
            if self._store.check([f"{self._topic}/alarm"]):
                return False, b""
            if time.monotonic() > until_s:
                raise RuntimeError(f"Timed out waiting {self._wait_s:g} s for another rank.")
            time.sleep(_EVERY_S)
