"""Reading parts of saved tensors: the stretches of a file that hold them, checked, then copied."""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from shardwise.checkpoint.index import Index, SavedPiece, SavedTensor
from shardwise.checkpoint.safetensors import TensorEntry, read_header
from shardwise.checkpoint.write import BLOCK_BYTES, SLAB_BYTES, block_sum, bytes_of
from shardwise.core.box import Box
from shardwise.errors import CheckpointError

#: Rows up to this length are read whole although only a part is needed: fewer, longer reads.
_WHOLE_ROW_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A block of a saved tensor, and the memory it is wanted in."""

    name: str
    saved: SavedTensor
    box: Box
    target: torch.Tensor


class Reader:
    """The files of a checkpoint, opened when they are first needed."""

    def __init__(self, index: Index) -> None:
        self.index = index
        #: How many bytes were read from files, headers aside.
        self.num_bytes = 0
        self._files: dict[str, int] = {}
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        for number in self._files.values():
            os.close(number)
        self._files.clear()

    def check(self, requests: Sequence[ReadRequest]) -> None:
        """Raise unless every byte that the requests need is there and fits its checksum."""
        blocks: dict[SavedPiece, set[int]] = {}
        names: dict[SavedPiece, str] = {}
        for request in requests:
            for piece, part in _parts(request):
                entry = self._entry(piece, request)
                names[piece] = request.name
                touched = blocks.setdefault(piece, set())
                for start, length, _ in stretches(part, piece.box, entry.dtype.itemsize):
                    touched.update(range(start // BLOCK_BYTES, -(-(start + length) // BLOCK_BYTES)))
        for piece, touched in blocks.items():
            if piece.sums is not None:
                self._check_blocks(piece, sorted(touched), names[piece])

    def fill(self, requests: Sequence[ReadRequest]) -> None:
        """Copy what is asked for into its memory."""
        for request in requests:
            for piece, part in _parts(request):
                entry = self._entry(piece, request)
                for start, length, box in stretches(part, piece.box, entry.dtype.itemsize):
                    self._copy(request, piece, entry, part, start, length, box)

    # -- files -------------------------------------------------------------------------------

    def path(self, file: str) -> Path:
        return self.index.folder / file

    def _entry(self, piece: SavedPiece, request: ReadRequest) -> TensorEntry:
        if piece.file not in self._entries:
            self._entries[piece.file] = self._open(piece.file)
        entry = self._entries[piece.file].get(piece.key)
        if entry is None or (entry.dtype, entry.shape) != (request.saved.dtype, piece.box.sizes):
            raise CheckpointError(
                f"{self.path(piece.file)} is damaged: it has no {piece.key!r} of shape "
                f"{piece.box.sizes} and {request.saved.dtype}, which is a piece of {request.name}."
            )
        return entry

    def _open(self, file: str) -> dict[str, TensorEntry]:
        path = self.path(file)
        known = self.index.files.get(file)
        if known is not None and path.exists() and path.stat().st_size != known.num_bytes:
            raise CheckpointError(
                f"{path} is damaged: it has {path.stat().st_size} bytes, and had "
                f"{known.num_bytes} when it was saved."
            )
        header = read_header(path)
        if known is not None and zlib.crc32(header.raw) != known.header_sum:
            raise CheckpointError(f"{path} is damaged: its header is not the one that was saved.")
        self._files[file] = os.open(path, os.O_RDONLY)
        return header.entries

    def _read(self, file: str, position: int, into: memoryview) -> None:
        self.num_bytes += into.nbytes
        while into.nbytes:
            count = os.preadv(self._files[file], [into], position)
            if not count:
                raise CheckpointError(f"{self.path(file)} is damaged: it ends at byte {position}.")
            into, position = into[count:], position + count

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    # -- checking and copying ----------------------------------------------------------------

    def _check_blocks(self, piece: SavedPiece, blocks: Sequence[int], name: str) -> None:
        entry = self._entries[piece.file][piece.key]
        assert piece.sums is not None, "there is nothing to check a piece without checksums with"
        for block in blocks:
            start = block * BLOCK_BYTES
            view = bytes_of(self._buffer(min(BLOCK_BYTES, entry.num_bytes - start)))
            self._read(piece.file, entry.start + start, view)
            if block_sum(view) != int(piece.sums[8 * block : 8 * block + 8], 16):
                raise CheckpointError(
                    f"{self.path(piece.file)} is damaged: bytes {entry.start + start} to "
                    f"{entry.start + start + view.nbytes}, of {name}, do not fit their checksum."
                )

    def _copy(
        self,
        request: ReadRequest,
        piece: SavedPiece,
        entry: TensorEntry,
        part: Box,
        start: int,
        length: int,
        box: Box,
    ) -> None:
        wanted = box.intersect(part)
        assert wanted is not None, "a stretch holds some of what it is read for"
        spot = request.target[wanted.within(request.box).slices]
        position = entry.start + start
        direct = wanted == box and spot.dtype == entry.dtype and spot.is_contiguous()
        if direct and spot.device.type == "cpu":
            self._read(piece.file, position, bytes_of(spot))
            return
        buffer = self._buffer(length)
        self._read(piece.file, position, bytes_of(buffer))
        read = buffer.view(entry.dtype).view(box.sizes)
        spot.copy_(read[wanted.within(box).slices])


def _parts(request: ReadRequest) -> Iterator[tuple[SavedPiece, Box]]:
    """The saved pieces that a request touches, and the block that it takes from each."""
    for piece in request.saved.pieces:
        part = piece.box.intersect(request.box) if request.box.volume else None
        if part is not None:
            yield piece, part


def stretches(part: Box, outer: Box, itemsize: int) -> Iterator[tuple[int, int, Box]]:
    """Blocks of `outer` that lie in one stretch of its memory and together hold `part`.

    Each comes as the first byte, the number of bytes, and the block; none is much longer than a
    slab. A block may be wider than `part` where rows are short.

    >>> [box for *_, box in stretches(Box((1, 1), (2, 2)), Box.whole((4, 4)), 4)]
    [Box(offsets=(1, 0), sizes=(2, 4))]
    """
    for box in _stretches(part, outer, itemsize, 0):
        yield box.position_in(outer) * itemsize, box.volume * itemsize, box


def _stretches(part: Box, outer: Box, itemsize: int, dim: int) -> Iterator[Box]:
    if dim == len(part.sizes):
        yield part
        return
    row_bytes = math.prod(outer.sizes[dim + 1 :]) * itemsize
    whole_rows = part.sizes[dim + 1 :] == outer.sizes[dim + 1 :]
    read_whole = row_bytes <= (SLAB_BYTES if whole_rows else _WHOLE_ROW_BYTES)
    num_rows = max(SLAB_BYTES // row_bytes, 1) if read_whole else 1
    for start in range(0, part.sizes[dim], num_rows):
        count = min(num_rows, part.sizes[dim] - start)
        rows = part.along(dim, start, count)
        if read_whole:
            yield Box(
                (*rows.offsets[: dim + 1], *outer.offsets[dim + 1 :]),
                (*rows.sizes[: dim + 1], *outer.sizes[dim + 1 :]),
            )
        else:
            yield from _stretches(rows, outer, itemsize, dim + 1)
