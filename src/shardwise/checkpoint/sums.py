"""Checksums of blocks, several times as fast as a CRC over all bytes.

Note [Checksums by block]
Every piece has a checksum per `BLOCK_BYTES` of it. A reader that needs a part of a piece reads and
checks the blocks around that part only. The sums are in the index, so a file is plain safetensors.

Note [Rows and columns]
A block is a matrix of 64-bit words, 1024 to a row, filled up with zeros. Its checksum is the CRC-32
of two vectors: the xor of each column, and per row the sum of the words times fixed odd weights,
modulo 2**64. A damage that one of the two does not see, the other does: an even number of flips in
a column lies in several rows, and one word that changes in a row always changes the row's sum. What
is left to chance is that of the CRC, one in four thousand million.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 20
_ROW_WORDS = 1024
_ROW_BYTES = 8 * _ROW_WORDS


@functools.cache
def _weights() -> Any:
    """Odd numbers without a pattern: the generator splitmix64, counted from 1."""
    with np.errstate(over="ignore"):
        z = np.arange(1, _ROW_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return (z | np.uint64(1)).view(np.int64)


def block_sum(data: memoryview) -> int:
    """The checksum of at most one block; see Note [Rows and columns].

    >>> hex(block_sum(memoryview(b"shardwise")))
    '0xa6feaf9e'
    """
    whole_rows = data.nbytes // _ROW_BYTES * _ROW_BYTES
    if whole_rows != data.nbytes:
        padded = bytearray(whole_rows + _ROW_BYTES)
        padded[: data.nbytes] = data
        data = memoryview(padded)
    words = np.frombuffer(data, dtype="<i8").reshape(-1, _ROW_WORDS)
    columns = np.bitwise_xor.reduce(words, axis=0)
    rows = np.einsum("ij,j->i", words, _weights())  # for integers, faster than `@`
    return zlib.crc32(rows.tobytes(), zlib.crc32(columns.tobytes()))


class Sums:
    """The checksums of a stream of bytes, one per block."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._open = bytearray()

    def add(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: BLOCK_BYTES - len(self._open)]
            data = data[part.nbytes :]
            if part.nbytes == BLOCK_BYTES:
                self._done.append(block_sum(part))
                continue
            self._open += part
            if len(self._open) == BLOCK_BYTES:
                self._close()

    def _close(self) -> None:
        self._done.append(block_sum(memoryview(self._open)))
        self._open = bytearray()

    def text(self) -> str:
        """Eight hexadecimal digits per block."""
        if self._open:
            self._close()
        return "".join(f"{number:08x}" for number in self._done)
