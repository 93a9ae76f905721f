"""The safetensors format, and writing one rank's file, block by block, with checksums.

Note [Bounded headers]
A header is untrusted input. Its length is limited to `MAX_HEADER_BYTES` and the size of the file,
its density of brackets to that of tables of tensors, and every number in it to the bytes of the
file. No allocation depends on the claims of a header. Only regular files are read: a FIFO waits for
a writer, and a device may never end.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import stat
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from shardwise.errors import CheckpointError
from shardwise.simulation.world import written

MAX_HEADER_BYTES = 16 << 20
#: No name of a tensor: the format keeps the metadata under it.
RESERVED = "__metadata__"
#: Of the first tensor; readers that map the file rely on it.
_ALIGNMENT = 8

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `start` counts from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Header:
    """The table of a file, and the bytes it was read from."""

    entries: dict[str, TensorEntry]
    raw: bytes


def dtype_name(dtype: torch.dtype, what: str) -> str:
    """The format's name of a dtype."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"{what} is {dtype}, which safetensors files cannot hold; convert it to one of "
            f"{', '.join(sorted(str(d) for d in DTYPE_NAMES))}."
        )
    return DTYPE_NAMES[dtype]


def pack_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
) -> tuple[bytes, dict[str, TensorEntry]]:
    """The bytes before the data, and where each tensor goes, in the given order."""
    if RESERVED in tensors:
        raise CheckpointError(
            f"A safetensors file cannot hold a tensor called {RESERVED!r}: the format uses that "
            "name. Rename the tensor, or convert to a folder."
        )
    table: dict[str, Any] = {RESERVED: {"format": "pt"}}
    relative: dict[str, int] = {}
    position = 0
    # Wide dtypes first: then every tensor is aligned without gaps, which the format forbids.
    for name in sorted(tensors, key=lambda n: -tensors[n][0].itemsize):
        dtype, shape = tensors[name]
        num_bytes = math.prod(shape) * dtype.itemsize
        offsets = [position, position + num_bytes]
        table[name] = {
            "dtype": dtype_name(dtype, name),
            "shape": list(shape),
            "data_offsets": offsets,
        }
        relative[name] = position
        position += num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"A file of {len(tensors)} tensors would have a header of {len(text)} bytes; at most "
            f"{MAX_HEADER_BYTES} are read. Save fewer, larger tensors."
        )
    first = 8 + len(text)
    entries = {n: TensorEntry(*tensors[n], first + relative[n]) for n in tensors}
    return struct.pack("<Q", len(text)) + text, entries


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read it; raises unless it is a regular one."""
    try:
        return open(path, "rb", opener=_descriptor)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _descriptor(path: str, flags: int) -> int:
    # Asked before it is opened, as that alone can start a device, and after, to be sure.
    if stat.S_ISREG(os.stat(path).st_mode):
        number = os.open(path, flags | os.O_NONBLOCK)
        if stat.S_ISREG(os.fstat(number).st_mode):
            return number
        os.close(number)
    raise CheckpointError(f"{path} is not a regular file.")


def unreadable(path: Path | str, error: OSError | ValueError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.")


def size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def read_bytes(file: BinaryIO, count: int) -> bytes:
    """The next `count` bytes; fewer where the file ends."""
    try:
        return file.read(count)
    except OSError as error:
        raise unreadable(file.name, error) from error


def read_header(file: BinaryIO) -> Header:
    """The table of a file, checked against the file's size."""
    path, file_bytes = file.name, size_of(file)
    file.seek(0)
    length_bytes = read_bytes(file, 8)
    if len(length_bytes) < 8:
        raise _damaged(path, f"it has {file_bytes} bytes, too few for a header")
    (length,) = struct.unpack("<Q", length_bytes)
    if length > min(MAX_HEADER_BYTES, file_bytes - 8):
        raise _damaged(
            path,
            f"its header claims {length} bytes, the file has {file_bytes} and at most "
            f"{MAX_HEADER_BYTES} are read",
        )
    raw = read_bytes(file, length)
    if len(raw) != length:
        raise _damaged(path, "it ends inside its header")
    table = bounded_json(raw, path)
    metadata = table.pop(RESERVED, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damaged(path, "its metadata is not a table of texts")
    entries = {name: _entry(path, name, spec, 8 + length) for name, spec in table.items()}
    _check_cover(path, entries, 8 + length, file_bytes)
    return Header(entries, length_bytes + raw)


def bounded_json(raw: bytes, what: str, max_brackets: int = 64) -> dict[str, Any]:
    """The JSON object in `raw`; see Note [Bounded headers].

    It may have `max_brackets` opening brackets, or one in eight characters.
    """
    # A parsed list takes 20 times its two characters: refuse what is mostly brackets.
    num_brackets = raw.count(b"[") + raw.count(b"{")
    if num_brackets > max(max_brackets, len(raw) // 8):
        raise CheckpointError(
            f"{what} is damaged or foreign: no table of tensors has {num_brackets} lists and "
            f"tables in {len(raw)} bytes."
        )
    try:
        with _without_collecting():
            content = json.loads(raw, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is damaged or foreign: {str(error)[:200]}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{what} is damaged or foreign: it holds no JSON object.")
    return content


@contextlib.contextmanager
def _without_collecting() -> Iterator[None]:
    """Inside, Python does not collect garbage: many new lists trigger it repeatedly, in vain."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice in one table")
    return table


def _entry(path: str, name: str, spec: Any, first: int) -> TensorEntry:
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{name!r} does not have a dtype, a shape and data_offsets")
    offsets = spec["data_offsets"]
    if not (natural_numbers(spec["shape"]) and natural_numbers(offsets) and len(offsets) == 2):
        raise _damaged(path, f"the shape or the offsets of {name!r} are not lists of sizes")
    if not isinstance(spec["dtype"], str) or spec["dtype"] not in DTYPES:
        raise _damaged(path, f"{name!r} has the unknown dtype {str(spec['dtype'])[:40]!r}")
    entry = TensorEntry(DTYPES[spec["dtype"]], tuple(spec["shape"]), first + offsets[0])
    if entry.num_bytes != offsets[1] - offsets[0]:
        raise _damaged(path, f"{name!r} has bytes {offsets} for shape {entry.shape}")
    return entry


def natural_numbers(value: Any) -> bool:
    """Whether it is a list of valid sizes: ints that are not negative and fit in 63 bits."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
    )


def _check_cover(
    path: str, entries: Mapping[str, TensorEntry], first: int, file_bytes: int
) -> None:
    """Raise unless tensors follow each other without gaps and fill the file."""
    position = first
    for entry in sorted(entries.values(), key=lambda e: (e.start, e.num_bytes)):
        if entry.start != position:
            raise _damaged(path, "its tensors overlap or leave gaps")
        position += entry.num_bytes
    if position != file_bytes:
        raise _damaged(path, f"its tensors end at byte {position}, the file at {file_bytes}")


def _damaged(path: str, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged or no safetensors file: {why}.")


# -- write ---------------------------------------------------------------------------------------
# Writing one rank's file, block by block, with checksums.
#
# Note [Checksums by block]
# Every chunk has a checksum per `BLOCK_BYTES` of it. A reader that needs a box of a chunk reads and
# checks only the blocks around that box. The sums are in the index, so a file is plain safetensors.
#
# Note [Rows and columns]
# A block is a matrix of 64-bit words, 1024 to a row, padded with zeros. Its checksum is the CRC-32
# of two vectors: the xor of each column, and per row the sum of the words times fixed odd weights,
# modulo 2**64. That is several times as fast as a CRC over all bytes. Damage that one vector misses
# shows in the other: an even number of flips in a column is in several rows, and one changed word
# in a row always changes the row's sum. The remaining risk is a CRC collision, one in four thousand
# million.


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

    def __init__(self, path: Path, header: bytes, entries: Mapping[str, TensorEntry]) -> None:
        """`header` and `entries` are those of `pack_header`."""
        self.header, self._entries = header, entries
        self._file = path.open("xb", buffering=0)
        try:
            _write_all(self._file, memoryview(self.header), 0)
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(entry.num_bytes for entry in self._entries.values())

    def write(self, key: str, buffers: Iterator[memoryview]) -> str:
        """Write the bytes of a tensor; returns the checksums of its blocks."""
        entry = self._entries[key]
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
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def _write_all(file: BinaryIO, data: memoryview, position: int) -> None:
    data = written(data)
    while data.nbytes:
        num_bytes = os.pwrite(file.fileno(), data, position)
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
