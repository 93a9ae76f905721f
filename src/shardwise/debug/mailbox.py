"""Mailbox: short messages between the ranks of one host, in memory that they share.

To write or read one takes a microsecond, and wakes nobody; a message through the store takes two
wake-ups of its thread. Ranks that cannot share memory (on other hosts, in other containers, on
other systems than Linux) have no mailbox for each other.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path

#: The number of a message, what it says, and a checksum of both.
_MESSAGE = struct.Struct("=4q")
_SLOTS = 64
_NUM_BYTES = _SLOTS * _MESSAGE.size


class Mailbox:
    """Numbered messages to one rank; the latest of each slot is kept."""

    def __init__(self, memory: mmap.mmap, address: str = "") -> None:
        self._memory = memory
        #: What another process needs to write here.
        self.address = address

    def put(self, number: int, digest: int, same: int) -> None:
        """Write message `number`."""
        at = number % _SLOTS * _MESSAGE.size
        checksum = hash((number, digest, same))
        _MESSAGE.pack_into(self._memory, at, number, digest, same, checksum)

    def get(self, number: int) -> tuple[int, int] | None:
        """The message, or None while it is not there, or not all of it."""
        at = number % _SLOTS * _MESSAGE.size
        *found, checksum = _MESSAGE.unpack_from(self._memory, at)
        whole = found[0] == number and hash(tuple(found)) == checksum
        return (found[1], found[2]) if whole else None


def make_mailbox() -> Mailbox | None:
    """A mailbox for this process; None where memory cannot be shared."""
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
    """The mailbox of another process; None where it is out of reach."""
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
