"""Writing one rank's file, block by block; see Note [Checksums by block]."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardwise.checkpoint.safetensors import TensorEntry, pack_header
from shardwise.checkpoint.sums import BLOCK_BYTES, Sums

#: The most that is copied at a time: to the CPU, or into one stretch of memory.
SLAB_BYTES = 4 << 20


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
        entry: TensorEntry = self._entries[key]
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
