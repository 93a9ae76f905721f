"""Writing one rank's file, block by block, with checksums.

Note [Checksums by block]
Every chunk has a checksum per `BLOCK_BYTES` of it. A reader that needs a box of a chunk reads and
checks only the blocks around that box. The sums are in the index, so a file is plain safetensors.

Note [Rows and columns]
A block is a matrix of 64-bit words, 1024 to a row, padded with zeros. Its checksum is the CRC-32 of
two vectors: the xor of each column, and per row the sum of the words times fixed odd weights,
modulo 2**64. That is several times as fast as a CRC over all bytes. Damage that one vector does not
show, the other does: an even number of flips in a column is in several rows, and one changed word
in a row always changes the row's sum. What is left is the chance of a CRC collision, one in four
thousand million.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.safetensors import TensorEntry, pack_header
from shardwise.simulation.faults import written

BLOCK_BYTES = 1 << 20
#: The most that is copied at a time, to the CPU or into contiguous memory.
BUFFER_BYTES = 4 << 20
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


class TensorFile:
    """A safetensors file that is being written: the header first, then chunks in any order."""

    def __init__(
        self,
        path: Path,
        tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
        metadata: Mapping[str, str],
    ) -> None:
        self.path = path
        self.header, self._entries = pack_header(tensors, metadata)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            _write_all(self._file, memoryview(self.header), 0)
        except BaseException:
            os.close(self._file)
            raise

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(entry.num_bytes for entry in self._entries.values())

    def write(self, key: str, buffers: Iterator[memoryview]) -> str:
        """Write the bytes of a tensor; returns the checksums of its blocks."""
        entry: TensorEntry = self._entries[key]
        position, sums = entry.start, Sums()
        for buffer in buffers:
            for start in range(0, buffer.nbytes, BLOCK_BYTES):
                block = buffer[start : start + BLOCK_BYTES]
                sums.add(block)  # while it is in the cache
                _write_all(self._file, block, position)
                position += block.nbytes
        assert position == entry.start + entry.num_bytes, f"{key} was written in part"
        return sums.text()

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        self.close()


def _write_all(file: int, data: memoryview, position: int) -> None:
    data = written(data)
    while data.nbytes:
        num_bytes = os.pwrite(file, data, position)
        data, position = data[num_bytes:], position + num_bytes


def buffers_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order; at most `BUFFER_BYTES` are copied at a time."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield bytes_of(tensor)
    elif tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= BUFFER_BYTES:
        yield bytes_of(tensor.cpu().contiguous())
    else:
        row_bytes = tensor[0].numel() * tensor.element_size()
        num_rows = BUFFER_BYTES // max(row_bytes, 1)
        for start in range(0, len(tensor), max(num_rows, 1)):
            rows = tensor[start : start + max(num_rows, 1)]
            if num_rows:
                yield bytes_of(rows.cpu().contiguous())
            else:
                yield from buffers_of(rows[0])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(written(memoryview(data)))
        file.flush()
        os.fsync(file.fileno())
