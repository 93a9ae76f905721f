"""Records of calls, and the search for the first call in which ranks differ; see Note [Journals].

Ranks exchange digests and accounts through the store of their rendezvous: it works even after a
collective has failed, and while ranks are in different collectives.

Note [Rounds]
In round j of a comparison each rank writes to the rank 2^j after it: its digest, and whether all
digests that it knows were the same. After log2(ranks) rounds each rank has heard from every other,
so all of them reach the same verdict in the same round. A rank sends and reads one message per
round, however many ranks there are, and reads it a step later: nobody waits, and no thread is
woken. On one host messages go through shared memory, otherwise through the store. A collective of a
few bytes costs more than either, mostly in the threads of its backend.

A rank that has sent round n has read round n - 1, and hears of all ranks within log2(ranks) rounds.
So no rank is more rounds behind than that, and a few slots per rank are enough.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise._torch.c10d import default_store
from shardwise.core.layout import Layout
from shardwise.core.world import post, posted
from shardwise.errors import RankMismatchError
from shardwise.simulation.roster import spans

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
        self._digest, self._same = 0, True
        #: Where others write to this rank, and this rank to others; None: not by shared memory.
        self._mailbox = make_mailbox()
        self._others: dict[int, Mailbox | None] = {}
        address = self._mailbox.address if self._mailbox is not None else ""
        self._store.set(f"{self._topic}/{rank}/address", address)

    def begin(self, digest: int) -> None:
        """Send the digest; `advance` reads what the others sent."""
        self._digest, self._same = digest, True
        self._send()

    def advance(self) -> bool | None:
        """Read this round's message; returns the verdict, or None if another round has begun."""
        found = self._mailbox.get(self._number + 1) if self._mailbox is not None else None
        digest, same = self._wait() if found is None else found
        self._same &= bool(same) and digest == self._digest
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

    def _send(self) -> None:
        to = (self._rank + (1 << self._number % self._num_rounds)) % self._num_ranks
        mailbox = self._others[to] if to in self._others else self._mailbox_of(to)
        if mailbox is not None:
            mailbox.put(self._number + 1, self._digest, self._same)
        else:
            text = f"{self._number} {self._digest} {self._same:d}"
            self._store.set(self._slot(to), text)

    def _mailbox_of(self, rank: int) -> Mailbox | None:
        address = f"{self._topic}/{rank}/address"
        if not self._store.check([address]):  # it has not entered the mode yet
            return None
        found = self._others[rank] = open_mailbox(self._store.get(address).decode())
        return found

    def _wait(self) -> tuple[int, int]:
        """The message of this round, from the mailbox or the store."""
        slot, until_s = self._slot(self._rank), time.monotonic() + self._wait_s
        while True:
            # Reads in one round trip, also where nothing was written yet.
            number, *stored = self._store.compare_set(slot, _NOTHING, _NOTHING).split()
            if number == b"%d" % self._number:
                return int(stored[0]), int(stored[1])
            found = self._mailbox.get(self._number + 1) if self._mailbox is not None else None
            if found is not None:
                return found
            if self._store.check([f"{self._topic}/alarm"]):
                return 0, False
            if time.monotonic() > until_s:
                raise RuntimeError(f"Timed out waiting {self._wait_s:g} s for another rank.")
            time.sleep(_EVERY_S)


@dataclass(frozen=True)
class Account:
    """The calls of a rank since the last comparison that it has read."""

    #: How many calls came before, on which all ranks agreed; the last of them.
    start: int
    before: str | None
    #: The kinds of calls as code and text, and the calls as indices of these.
    kinds: list[tuple[int, str]]
    calls: list[int]
    #: Why nothing will follow; None while the rank still runs.
    end: str | None
    #: The comparison that was not read yet: its number, its place, the state of the generators.
    sent: tuple[int, str, int] | None

    def code(self, number: int) -> int | str | None:
        """A code that differs between different calls; None if it is not known."""
        place = number - self.start
        if place < len(self.calls):
            return self.kinds[self.calls[place]][0]
        return "end" if place == len(self.calls) and self.end is not None else None

    def text(self, number: int) -> str | None:
        place = number - self.start
        if place == len(self.calls):
            return f"nothing more before {self.end}"
        return self.kinds[self.calls[place]][1] if place >= 0 else self.before


def exchange_accounts(
    mine: Account, topic: str, num_ranks: int, wait_s: float
) -> dict[int, Account]:
    """The accounts of the ranks that answer in time; of this rank, the first that it gave."""
    post(json.dumps(asdict(mine)), topic)
    texts = posted(num_ranks, wait_s, topic)
    return {rank: Account(**json.loads(texts[rank])) for rank in sorted(texts)}


def first_difference(accounts: dict[int, Account]) -> RankMismatchError | None:
    """The error to raise on all ranks; None if their accounts agree as far as they go."""
    if len(accounts) < 2:
        return None
    start = max(account.start for account in accounts.values())
    end = max(account.start + len(account.calls) for account in accounts.values())
    for number in range(start, end + 1):
        codes = {rank: account.code(number) for rank, account in accounts.items()}
        known = [rank for rank, code in codes.items() if code is not None]
        if len({codes[rank] for rank in known}) > 1:
            texts = _around_difference([str(accounts[rank].text(number)) for rank in known])
            return RankMismatchError(
                f"The ranks do not run the same program. Call {number:,} is the first that "
                f"differs: {_by_rank(dict(zip(known, texts, strict=True)))}."
                f"{_ran_before(accounts[known[0]], number)}"
            )
    return _other_generators(accounts)


def _other_generators(accounts: dict[int, Account]) -> RankMismatchError | None:
    sent = {rank: a.sent for rank, a in accounts.items() if a.sent is not None}
    last = min((number for number, _, _ in sent.values()), default=0)
    states = {rank: state for rank, (number, _, state) in sent.items() if number == last}
    if len(set(states.values())) < 2:
        return None
    rank = next(iter(states))
    shown = _by_rank({rank: f"state {state & 0xFFFF:04x}" for rank, state in states.items()})
    account, (_, at, _) = accounts[rank], sent[rank]
    return RankMismatchError(
        f"The random generators are in different states at {at}: {shown}."
        f"{_ran_before(account, account.start + len(account.calls))} Seed all ranks alike, and "
        "draw what only one rank needs from a torch.Generator of its own."
    )


def _ran_before(account: Account, number: int) -> str:
    before = account.text(number - 1)
    return f" All of them ran, before that: {_cut(before)}." if before is not None else ""


#: A step names all parameters of an optimizer.
_MAX_CHARS = 600


def _cut(text: str, begin: int = 0) -> str:
    if len(text) <= _MAX_CHARS:
        return text
    return f"{'…' * (begin > 0)}{text[begin : begin + _MAX_CHARS]}…"


def _around_difference(texts: Sequence[str]) -> list[str]:
    """Long texts, cut to begin shortly before the first character in which they differ."""
    pairs = enumerate(zip(*texts, strict=False))
    first = next((place for place, chars in pairs if len(set(chars)) > 1), 0)
    return [_cut(text, max(0, first - 100)) for text in texts]


def _by_rank(texts: dict[int, str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(having) > 1 else ''} {spans(having)}: {text}"
        for text, having in ranks.items()
    )


# -- mailbox -------------------------------------------------------------------------------------
# Mailbox: short messages between the ranks of one host, in memory that they share.
#
# Writing or reading one takes a microsecond, and wakes nobody; a message through the store wakes
# its thread twice. Ranks that cannot share memory (on other hosts, in other containers, or not on
# Linux) have no mailbox for each other.


#: The number of a message, what it says, and a checksum of both.
_MESSAGE = struct.Struct("=4q")
_MAIL_SLOTS = 64
_NUM_BYTES = _MAIL_SLOTS * _MESSAGE.size


class Mailbox:
    """Numbered messages to one rank; the latest of each slot is kept."""

    def __init__(self, memory: mmap.mmap, address: str = "") -> None:
        self._memory = memory
        #: What another process needs to write here.
        self.address = address

    def put(self, number: int, digest: int, same: int) -> None:
        """Write message `number`."""
        at = number % _MAIL_SLOTS * _MESSAGE.size
        checksum = hash((number, digest, same))
        _MESSAGE.pack_into(self._memory, at, number, digest, same, checksum)

    def get(self, number: int) -> tuple[int, int] | None:
        """The message, or None if it has not arrived completely."""
        at = number % _MAIL_SLOTS * _MESSAGE.size
        *found, checksum = _MESSAGE.unpack_from(self._memory, at)
        whole = found[0] == number and hash(tuple(found)) == checksum
        return (found[1], found[2]) if whole else None


def make_mailbox() -> Mailbox | None:
    """A mailbox for this process; None if memory cannot be shared."""
    try:
        host = _host()
        number = os.memfd_create("shardwise-mailbox")
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(number, _NUM_BYTES)
        memory = mmap.mmap(number, _NUM_BYTES)
    except OSError:
        os.close(number)
        return None
    return _Own(memory, f"{host} {os.getpid()} {number}", number)


def open_mailbox(address: str) -> Mailbox | None:
    """The mailbox of another process; None if it is out of reach."""
    try:
        host, process, number = address.split()
        if host != _host():
            return None
        path = f"/proc/{int(process)}/fd/{int(number)}"
        opened = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _NUM_BYTES:
            return None
        return Mailbox(mmap.mmap(opened, _NUM_BYTES))
    except OSError:
        return None
    finally:
        os.close(opened)


class _Own(Mailbox):
    """The descriptor stays open, as others open the memory through it."""

    def __init__(self, memory: mmap.mmap, address: str, number: int) -> None:
        super().__init__(memory, address)
        self._number = number

    def __del__(self) -> None:
        os.close(self._number)


def _host() -> str:
    """Equal in processes that know each other by their process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


# -- records -------------------------------------------------------------------------------------
# Noted: one recorded call of `agree`, and its text; see Note [Journals].


@dataclass(slots=True, eq=False)
class Noted:
    """One call: its key, its code, what it is, and the line of the program that first made it."""

    key: list[Any] | None
    code: int
    text: str
    line: str | None

    def __str__(self) -> str:
        return f"{self.text} at {self.line}" if self.line is not None else self.text


#: Stands for a missing record.
NOTHING = Noted(None, 0, "nothing", None)


def code_of(text: str) -> int:
    hashed = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)


#: Types of arguments that are written into a record as they are.
PLAIN = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


def call_text(func: Any, key: Sequence[Any]) -> str:
    name = str(func) if hasattr(func, "_schema") else func.__qualname__
    return f"{name}({listed(key[1:])})"


def listed(parts: Sequence[Any]) -> str:
    """The parts of a key as text."""
    words: list[str] = []
    before: Any = None
    for part in parts:
        if type(part) is int and isinstance(before, Layout):
            words[-1] += f" ({_which_text(part)})"
        elif isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
            words.append(f"{part[0]}={listed(part[1:])}")
        elif isinstance(part, tuple):
            words.append(f"({listed(part)})")
        else:
            words.append(repr(part) if isinstance(part, (str, Layout)) else str(part))
        before = part
    return ", ".join(words)


def _which_text(number: int) -> str:
    if number < 0:
        return f"tensor {-number:,}"
    return "the last tensor" if number == 1 else f"{number:,} tensors back"
