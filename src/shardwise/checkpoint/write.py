"""Writing one rank's file, block by block, with a checksum per block.

Note [Checksums by block]
Every piece has a CRC-32 per `BLOCK_BYTES` of it. A reader that needs a part of a piece reads and
checks the blocks around that part only. The sums are in the index, so a file is plain safetensors.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardwise.checkpoint.safetensors import Entry, pack_header

BLOCK_BYTES = 1 << 20
#: The most that is copied at a time: to the CPU, or into one stretch of memory.
SLAB_BYTES = 4 << 20


class Sums:
    """The checksums of a stream of bytes, one per block."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._sum, self._num_bytes = 0, 0

    def add(self, data: memoryview) -> None:
        while data.nbytes:
            part = data[: BLOCK_BYTES - self._num_bytes]
            self._sum = zlib.crc32(part, self._sum)
            self._num_bytes += part.nbytes
            data = data[part.nbytes :]
            if self._num_bytes == BLOCK_BYTES:
                self._close()

    def _close(self) -> None:
        self._done.append(self._sum)
        self._sum, self._num_bytes = 0, 0

    def text(self) -> str:
        """Eight hexadecimal digits per block."""
        if self._num_bytes:
            self._close()
        return "".join(f"{number:08x}" for number in self._done)


class TensorFile:
    """A safetensors file that is being written: the header first, then pieces in any order."""

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

    def write(self, key: str, slabs: Iterator[memoryview]) -> str:
        """Write the bytes of a tensor; the checksums of its blocks."""
        entry: Entry = self._entries[key]
        position, sums = entry.start, Sums()
        for slab in slabs:
            for start in range(0, slab.nbytes, BLOCK_BYTES):
                block = slab[start : start + BLOCK_BYTES]
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
    while data.nbytes:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written


def slabs_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order; no more than a slab is copied at a time."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield bytes_of(tensor)
    elif tensor.dim() == 0 or tensor.numel() * tensor.element_size() <= SLAB_BYTES:
        yield bytes_of(tensor.cpu().contiguous())
    else:
        row_bytes = tensor[0].numel() * tensor.element_size()
        num_rows = SLAB_BYTES // max(row_bytes, 1)
        for start in range(0, len(tensor), max(num_rows, 1)):
            rows = tensor[start : start + max(num_rows, 1)]
            if num_rows:
                yield bytes_of(rows.cpu().contiguous())
            else:
                yield from slabs_of(rows[0])


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder last."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
