"""Reading checkpoints: boxes of tensors, reports of what is saved, conversion to whole tensors."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from shardwise.checkpoint.claim import Claim, half_name
from shardwise.checkpoint.crew import Crew
from shardwise.checkpoint.index import (
    INDEX_NAME,
    Index,
    SavedChunk,
    SavedFile,
    SavedTensor,
    flat_node,
    pack_index,
    read_index,
    saved_whole,
)
from shardwise.checkpoint.safetensors import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    RESERVED,
    TensorEntry,
    TensorFile,
    block_sum,
    bytes_of,
    open_regular,
    pack_header,
    read_header,
    size_of,
    sync_folder,
    unreadable,
    write_synced,
)
from shardwise.checkpoint.tree import decode
from shardwise.core.box import Box
from shardwise.errors import CheckpointError

#: Rows up to this length are read whole even if only some columns are needed: fewer, longer reads.
_WHOLE_ROW_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A box of a saved tensor, and the memory to read it into."""

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
        self._files: dict[str, BinaryIO] = {}
        self._entries: dict[str, dict[str, TensorEntry]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def check(self, requests: Sequence[ReadRequest]) -> None:
        """Raise unless every byte that the requests need is present and matches its checksum."""
        blocks: dict[SavedChunk, set[int]] = {}
        names: dict[SavedChunk, str] = {}
        for request, chunk, entry, part in self._touched(requests):
            names[chunk] = request.name
            touched = blocks.setdefault(chunk, set())
            for start, length, _ in contiguous_boxes(part, chunk.box, entry.dtype.itemsize):
                touched.update(range(start // BLOCK_BYTES, -(-(start + length) // BLOCK_BYTES)))
        for chunk, touched in blocks.items():
            if chunk.sums is not None:
                self._check_blocks(chunk, sorted(touched), names[chunk])

    def fill(self, requests: Sequence[ReadRequest]) -> None:
        """Read each request into its memory."""
        for request, chunk, entry, part in self._touched(requests):
            for start, length, box in contiguous_boxes(part, chunk.box, entry.dtype.itemsize):
                self._copy(request, chunk, entry, part, start, length, box)

    def _touched(
        self, requests: Sequence[ReadRequest]
    ) -> Iterator[tuple[ReadRequest, SavedChunk, TensorEntry, Box]]:
        """The saved chunks that each request touches, and the box that it takes from each."""
        for request in requests:
            for chunk in request.saved.chunks if request.box.volume else ():
                part = chunk.box.intersect(request.box)
                if part is not None:
                    yield request, chunk, self._entry(chunk, request), part

    # -- files -------------------------------------------------------------------------------

    def _entry(self, chunk: SavedChunk, request: ReadRequest) -> TensorEntry:
        if chunk.file not in self._entries:
            self._entries[chunk.file] = self._open(chunk.file)
        entry = self._entries[chunk.file].get(chunk.key)
        if entry is None or (entry.dtype, entry.shape) != (request.saved.dtype, chunk.box.sizes):
            raise CheckpointError(
                f"{self._files[chunk.file].name} is damaged: it has no {chunk.key!r} of shape "
                f"{chunk.box.sizes} and {request.saved.dtype}, which is a piece of {request.name}."
            )
        return entry

    def _open(self, name: str) -> dict[str, TensorEntry]:
        known = self.index.files.get(name)
        if name not in self._files:
            self._files[name] = open_regular(self.index.folder / name)
        file = self._files[name]
        num_bytes = size_of(file)
        if known is not None and num_bytes != known.num_bytes:
            raise CheckpointError(
                f"{file.name} is damaged: it has {num_bytes} bytes, and had {known.num_bytes} when "
                "it was saved."
            )
        header = read_header(file)
        if known is not None and zlib.crc32(header.raw) != known.header_sum:
            raise CheckpointError(
                f"{file.name} is damaged: its header is not the one that was saved."
            )
        return header.entries

    def _read(self, name: str, position: int, into: memoryview) -> None:
        self.num_bytes += into.nbytes
        file = self._files[name]
        while into.nbytes:
            try:
                count = os.preadv(file.fileno(), [into], position)
            except OSError as error:
                raise unreadable(file.name, error) from error
            if not count:
                raise CheckpointError(f"{file.name} is damaged: it ends at byte {position}.")
            into, position = into[count:], position + count

    def _buffer(self, num_bytes: int) -> torch.Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    # -- checking and copying ----------------------------------------------------------------

    def _check_blocks(self, chunk: SavedChunk, blocks: Sequence[int], name: str) -> None:
        entry = self._entries[chunk.file][chunk.key]
        assert chunk.sums is not None, "a chunk without checksums cannot be checked"
        for block in blocks:
            start = block * BLOCK_BYTES
            view = bytes_of(self._buffer(min(BLOCK_BYTES, entry.num_bytes - start)))
            self._read(chunk.file, entry.start + start, view)
            if block_sum(view) != int(chunk.sums[8 * block : 8 * block + 8], 16):
                raise CheckpointError(
                    f"{self._files[chunk.file].name} is damaged: bytes {entry.start + start} to "
                    f"{entry.start + start + view.nbytes}, of {name}, do not fit their checksum."
                )

    def _copy(
        self,
        request: ReadRequest,
        chunk: SavedChunk,
        entry: TensorEntry,
        part: Box,
        start: int,
        length: int,
        box: Box,
    ) -> None:
        wanted = box.intersect(part)
        assert wanted is not None, "a contiguous read holds some of what it is for"
        target = request.target[wanted.within(request.box).slices]
        position = entry.start + start
        direct = wanted == box and target.dtype == entry.dtype and target.is_contiguous()
        if direct and target.device.type == "cpu":
            self._read(chunk.file, position, bytes_of(target))
            return
        buffer = self._buffer(length)
        self._read(chunk.file, position, bytes_of(buffer))
        read = buffer.view(entry.dtype).view(box.sizes)
        target.copy_(read[wanted.within(box).slices])


def contiguous_boxes(part: Box, outer: Box, itemsize: int) -> Iterator[tuple[int, int, Box]]:
    """Boxes that are contiguous in the memory of `outer` and together hold `part`.

    Each comes as the first byte, the number of bytes, and the box; none is much longer than
    `BUFFER_BYTES`. A box may be wider than `part` where rows are short.

    >>> [box for *_, box in contiguous_boxes(Box((1, 1), (2, 2)), Box.whole((4, 4)), 4)]
    [Box(offsets=(1, 0), sizes=(2, 4))]
    """
    for box in _contiguous_boxes(part, outer, itemsize, 0):
        yield box.position_in(outer) * itemsize, box.volume * itemsize, box


def _contiguous_boxes(part: Box, outer: Box, itemsize: int, dim: int) -> Iterator[Box]:
    if dim == len(part.sizes):
        yield part
        return
    row_bytes = math.prod(outer.sizes[dim + 1 :]) * itemsize
    whole_rows = part.sizes[dim + 1 :] == outer.sizes[dim + 1 :]
    read_whole = row_bytes <= (BUFFER_BYTES if whole_rows else _WHOLE_ROW_BYTES)
    num_rows = max(BUFFER_BYTES // row_bytes, 1) if read_whole else 1
    for start in range(0, part.sizes[dim], num_rows):
        count = min(num_rows, part.sizes[dim] - start)
        rows = part.along(dim, start, count)
        if read_whole:
            yield Box(
                (*rows.offsets[: dim + 1], *outer.offsets[dim + 1 :]),
                (*rows.sizes[: dim + 1], *outer.sizes[dim + 1 :]),
            )
        else:
            yield from _contiguous_boxes(rows, outer, itemsize, dim + 1)


# -- report --------------------------------------------------------------------------------------
# What a checkpoint holds, and whether any of it is damaged.


@dataclass(frozen=True, slots=True)
class TensorReport:
    """One tensor of a checkpoint, and its pieces: the chunks it was saved in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    #: The file, the offset and the shape of each piece.
    pieces: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """What `inspect` finds."""

    path: str
    #: How many ranks saved it; None for a checkpoint that shardwise did not write.
    num_ranks: int | None
    num_bytes: int
    #: Bytes of each file.
    files: dict[str, int]
    tensors: tuple[TensorReport, ...]
    #: Tied names: name -> the name that the tensor is saved under.
    ties: dict[str, str]
    #: The saved state, with the name of each tensor in its place.
    state: Any
    has_checksums: bool


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of `verify`: how much was read, and what is damaged (empty if all is well)."""

    num_bytes: int
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def inspect(path: str | os.PathLike[str]) -> CheckpointReport:
    """Report the contents of a checkpoint. Reads the index and the headers, no tensor."""
    index = read_index(Path(path))
    names = sorted({chunk.file for t in index.tensors.values() for chunk in t.chunks})
    return CheckpointReport(
        path=str(path),
        num_ranks=index.num_ranks,
        num_bytes=sum(t.num_bytes for t in index.tensors.values()),
        files={name: _size(index, name) for name in names},
        tensors=tuple(_report(name, t) for name, t in index.tensors.items()),
        ties=dict(index.ties),
        state=decode(index.node, lambda name: f"<tensor {name}>"),
        has_checksums=bool(index.files),
    )


def _size(index: Index, name: str) -> int:
    with open_regular(index.folder / name) as file:
        return size_of(file)


def _report(name: str, tensor: SavedTensor) -> TensorReport:
    pieces = tuple((p.file, *p.box) for p in tensor.chunks)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorReport(name, dtype, tensor.shape, tensor.num_bytes, pieces)


def verify(path: str | os.PathLike[str]) -> Verdict:
    """Read every byte of a checkpoint and report all damage; raises nothing."""
    return _verdict(Path(path), 0, 1)


def verify_together(path: Path, crew: Crew) -> tuple[str, ...]:
    """What is damaged, on every rank; each rank reads its share of the chunks."""

    def read_share() -> list[tuple[str, ...]]:
        return [_verdict(path, rank, crew.size).faults for rank in crew.present]

    return tuple(dict.fromkeys(fault for faults in crew.together(read_share) for fault in faults))


def _verdict(path: Path, place: int, num_shares: int) -> Verdict:
    """The verdict on one share of the chunks."""
    faults: dict[str, None] = {}
    try:
        index = read_index(path)
    except CheckpointError as error:
        return Verdict(0, (str(error),))
    chunks = [(name, t, chunk) for name, t in index.tensors.items() for chunk in t.chunks]
    with Reader(index) as reader:
        for name, tensor, chunk in chunks[place::num_shares]:
            one = SavedTensor(tensor.dtype, tensor.shape, (chunk,))
            # A check uses boxes only; no memory is needed.
            request = ReadRequest(name, one, chunk.box, torch.empty(0))
            try:
                reader.check([request])
            except CheckpointError as error:
                faults[str(error)] = None
        return Verdict(reader.num_bytes, tuple(faults))


# -- conversion: every tensor one chunk ----------------------------------------------------------


MAX_FILE_BYTES = 5 << 30


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    prefix: str = "",
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Rewrite a checkpoint with every tensor whole, in one process and in little memory.

    `source` is a checkpoint of shardwise, a folder of Hugging Face's, or one safetensors file.
    A `target` that ends in `.safetensors` is one file, which holds tensors only; anything else is
    a folder of files of at most `max_file_bytes` (or one tensor) each, with an index that keeps
    plain values and adds checksums. `prefix` selects the tensors whose names begin so and
    strips it, such as `"model."` of a checkpoint with an optimizer; plain values are dropped.
    """
    index = _picked(read_index(Path(source).absolute()), prefix)
    path = Path(target).absolute()
    half = path.parent / half_name(path.name, secrets.token_hex(6))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        claim = Claim(path)
        try:
            if path.exists():
                raise CheckpointError(f"{path} exists already: remove it, or choose another name.")
            claim.remove_halves()
            with Reader(index) as reader:
                if path.suffix == ".safetensors":
                    _write_file(reader, half, {name: name for name in index.tensors})
                else:
                    _write_folder(reader, half, max_file_bytes)
            half.rename(path)
            sync_folder(path.parent)
        finally:
            if half.is_dir():
                shutil.rmtree(half, ignore_errors=True)
            else:
                half.unlink(missing_ok=True)
            claim.release()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}.") from error


def _picked(index: Index, prefix: str) -> Index:
    if not prefix:
        return index
    names = [n for n in (*index.tensors, *index.ties) if n.startswith(prefix) and n != prefix]
    if not names:
        raise CheckpointError(
            f"No tensor in {index.folder} has a name that begins with {prefix!r}."
        )
    # A tie may lead outside of the selection: then the tensor is kept under this name.
    short = {n: n[len(prefix) :] for n in names}
    tensors: dict[str, SavedTensor] = {}
    ties: dict[str, str] = {}
    for name in names:
        owner = index.ties.get(name, name)
        if owner != name and owner in short:
            ties[short[name]] = short[owner]
        else:
            tensors[short[name]] = index.tensors[owner]
    return Index(index.folder, tensors, flat_node(short.values()), ties, index.files)


def _write_folder(reader: Reader, half: Path, max_file_bytes: int) -> None:
    half.mkdir()
    index = reader.index
    groups = _grouped(index, max_file_bytes)
    tensors, files = {}, {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        keys = {name: f"{name}[]" if name == RESERVED else name for name in names}
        sums, files[file] = _write_file(reader, half / file, keys)
        for name in names:
            saved = index.tensors[name]
            tensors[name] = saved_whole(saved.dtype, saved.shape, file, keys[name], sums[name])
    data = pack_index(tensors, index.node, index.ties, files, 1)
    write_synced(half / INDEX_NAME, data)
    sync_folder(half)
    read_index(half)  # raises if nobody could load it


def _grouped(index: Index, max_file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = []
    room = 0
    for name, tensor in index.tensors.items():
        if not groups or tensor.num_bytes > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append(name)
        room -= tensor.num_bytes
    return groups


def _write_file(
    reader: Reader, path: Path, keys: Mapping[str, str]
) -> tuple[dict[str, str], SavedFile]:
    """Write tensors under the given keys; returns the checksums of each."""
    saved = reader.index.tensors
    table = {key: (saved[name].dtype, saved[name].shape) for name, key in keys.items()}
    with contextlib.closing(TensorFile(path, *pack_header(table))) as file:
        sums = {name: file.write(key, _whole_rows(reader, name)) for name, key in keys.items()}
        file.sync()
        return sums, SavedFile(file.num_bytes, zlib.crc32(file.header))


def _whole_rows(reader: Reader, name: str) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, some rows at a time, checked."""
    saved = reader.index.tensors[name]
    for box in _row_boxes(Box.whole(saved.shape), saved.dtype.itemsize):
        rows = torch.empty(box.sizes, dtype=saved.dtype)
        request = [ReadRequest(name, saved, box, rows)]
        reader.check(request)
        reader.fill(request)
        yield bytes_of(rows)


def _row_boxes(whole: Box, itemsize: int) -> Iterator[Box]:
    """Boxes of whole rows, in order, of about `BUFFER_BYTES`."""
    if not whole.sizes or whole.volume * itemsize <= BUFFER_BYTES:
        yield whole
        return
    total = whole.sizes[0]
    num_rows = max(BUFFER_BYTES * total // (whole.volume * itemsize), 1)
    for start in range(0, total, num_rows):
        yield whole.along(0, start, min(num_rows, total - start))
