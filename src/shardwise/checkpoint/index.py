"""A checkpoint's index: its tensors, and the file and box of each chunk.

`model.safetensors.index.json` has what Hugging Face's sharded checkpoints have: a `weight_map` from
tensors to files, and `metadata`. Under `shardwise` it adds the chunks (key `pieces`) with their
offsets and checksums, and the state that the tensors belong to. A folder or a file without that
part is read too: its tensors are whole, and have no checksums.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.claim import halves
from shardwise.checkpoint.safetensors import (
    BLOCK_BYTES,
    DTYPES,
    bounded_json,
    dtype_name,
    natural_numbers,
    open_regular,
    read_bytes,
    read_header,
    size_of,
    unreadable,
)
from shardwise.checkpoint.tree import Node, check_node
from shardwise.core.box import Box, why_not_tiled
from shardwise.errors import CheckpointError

#: In format 1, the state of optimizers has positions for keys; see `checkpoint.tree`.
FORMAT = "shardwise checkpoint 2"
READ_FORMATS = ("shardwise checkpoint 1", FORMAT)
INDEX_NAME = "model.safetensors.index.json"
WHOLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 256 << 20
#: Lists and tables of plain values; as Python objects, less than 250 MB.
MAX_INDEX_BRACKETS = 1 << 20


@dataclass(frozen=True, slots=True)
class SavedChunk:
    """A saved box of a tensor: its file, its key there, and its checksums, if there are any."""

    file: str
    key: str
    box: Box
    sums: str | None


@dataclass(frozen=True, slots=True)
class SavedTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[SavedChunk, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def saved_whole(
    dtype: torch.dtype, shape: tuple[int, ...], file: str, key: str, sums: str | None = None
) -> SavedTensor:
    """A tensor that was saved in one chunk."""
    return SavedTensor(dtype, shape, (SavedChunk(file, key, Box.whole(shape), sums),))


@dataclass(frozen=True, slots=True)
class SavedFile:
    """The size of a file and the checksum of its header."""

    num_bytes: int
    header_sum: int


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint. `files` is empty if only the tensors are known."""

    folder: Path
    tensors: dict[str, SavedTensor]
    node: Node
    ties: dict[str, str] = field(default_factory=dict)
    files: dict[str, SavedFile] = field(default_factory=dict)
    num_ranks: int | None = None
    #: Checksum of the whole index; ranks that load together compare it.
    digest: int = 0

    def tensor(self, name: str) -> SavedTensor:
        """A tensor of the state, by any of its names."""
        return self.tensors[self.ties.get(name, name)]


def pack_index(
    tensors: Mapping[str, SavedTensor],
    node: Node,
    ties: Mapping[str, str],
    files: Mapping[str, SavedFile],
    num_ranks: int,
) -> bytes:
    """The bytes of an index."""
    content: dict[str, Any] = {
        "metadata": {"total_size": sum(t.num_bytes for t in tensors.values())},
        "weight_map": {name: t.chunks[0].file for name, t in tensors.items()},
        "shardwise": {
            "format": FORMAT,
            "ranks": num_ranks,
            "files": {n: [f.num_bytes, f"{f.header_sum:08x}"] for n, f in files.items()},
            "tensors": {name: _packed(name, t) for name, t in tensors.items()},
            "ties": dict(ties),
            "state": node,
        },
    }
    content["shardwise"]["checksum"] = f"{_checksum(content):08x}"
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def _packed(name: str, tensor: SavedTensor) -> dict[str, Any]:
    return {
        "dtype": dtype_name(tensor.dtype, name),
        "shape": tensor.shape,
        "pieces": [[c.file, c.key, *c.box, c.sums] for c in tensor.chunks],
    }


def _checksum(content: Any) -> int:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return zlib.crc32(text.encode())


def read_index(path: Path) -> Index:
    """The index of a checkpoint: a folder of ours or of Hugging Face's, or one safetensors file."""
    try:
        return _read_index(path)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that is closed
        raise unreadable(path, error) from error


def _read_index(path: Path) -> Index:
    if path.is_dir():
        index = path / INDEX_NAME
        if index.exists():
            return _read_index_file(index)
        if (path / WHOLE_NAME).exists():
            return _index_of_file(path / WHOLE_NAME)
        raise CheckpointError(
            f"{path} is not a checkpoint: it has neither {INDEX_NAME} nor {WHOLE_NAME}."
        )
    if path.name.endswith(".index.json") and path.exists():
        return _read_index_file(path)
    if path.exists():
        return _index_of_file(path)
    left = halves(path)
    hint = f" {left[0]} is of a save that did not finish, or still runs." if left else ""
    raise CheckpointError(f"There is no checkpoint at {path}.{hint}")


def _index_of_file(path: Path) -> Index:
    with open_regular(path) as file:
        header = read_header(file)
    tensors = {
        name: saved_whole(entry.dtype, entry.shape, path.name, name)
        for name, entry in header.entries.items()
    }
    return Index(path.parent, tensors, flat_node(tensors), digest=zlib.crc32(header.raw))


def flat_node(names: Iterable[str]) -> Node:
    """The node of a flat dict of these tensors."""
    return {"dict": [[name, {"tensor": name}] for name in names]}


def _read_index_file(path: Path) -> Index:
    with open_regular(path) as file:
        num_bytes = size_of(file)
        if num_bytes > MAX_INDEX_BYTES:
            raise _damaged(path, f"it has {num_bytes} bytes, at most {MAX_INDEX_BYTES} are read")
        raw = read_bytes(file, num_bytes)
    content = bounded_json(raw, str(path), MAX_INDEX_BRACKETS)
    digest = zlib.crc32(raw)
    if "shardwise" not in content:
        return _foreign_index(path, content, digest)
    ours = content["shardwise"]
    if not isinstance(ours, dict) or ours.get("format") not in READ_FORMATS:
        found = str(ours.get("format") if isinstance(ours, dict) else ours)[:60]
        raise CheckpointError(f"{path} is in the format {found!r}; this version reads {FORMAT!r}.")
    saved = ours.pop("checksum", None)
    try:
        if saved != f"{_checksum(content):08x}":
            raise _damaged(path, "its checksum does not fit its content")
        return _our_index(path, ours, digest)
    except RecursionError as error:
        raise _damaged(path, "it is nested too deeply") from error


def _our_index(path: Path, ours: dict[str, Any], digest: int) -> Index:
    tables = [ours.get(key) for key in ("files", "tensors", "ties")]
    ranks = ours.get("ranks")
    if (
        not all(isinstance(t, dict) for t in tables)
        or type(ranks) is not int
        or "state" not in ours
    ):
        raise _damaged(path, "it lacks one of files, tensors, ties, ranks and state")
    files = {name: _saved_file(path, name, row) for name, row in ours["files"].items()}
    tensors = {name: _saved_tensor(path, name, row, files) for name, row in ours["tensors"].items()}
    for name, other in ours["ties"].items():
        if not isinstance(other, str) or other not in tensors:
            raise _damaged(path, f"{name!r} is tied to {str(other)[:60]!r}, which is not there")
    check_node(ours["state"], str(path), tensors.keys() | ours["ties"].keys())
    return Index(path.parent, tensors, ours["state"], ours["ties"], files, ranks, digest)


def _saved_file(path: Path, name: str, row: Any) -> SavedFile:
    _check_file_name(path, name)
    if not (isinstance(row, list) and len(row) == 2 and natural_numbers(row[:1])):
        raise _damaged(path, f"the entry of file {name!r} is not [bytes, checksum]")
    return SavedFile(row[0], _hexadecimal(path, row[1], 1)[0])


def _saved_tensor(path: Path, name: str, row: Any, files: Mapping[str, Any]) -> SavedTensor:
    if not isinstance(row, dict) or set(row) != {"dtype", "shape", "pieces"}:
        raise _damaged(path, f"{name!r} does not have a dtype, a shape and pieces")
    known = isinstance(row["dtype"], str) and row["dtype"] in DTYPES
    if not known or not natural_numbers(row["shape"]):
        raise _damaged(path, f"{name!r} has no valid dtype or shape")
    if not isinstance(row["pieces"], list) or not row["pieces"]:
        raise _damaged(path, f"{name!r} has no pieces")
    dtype, shape = DTYPES[row["dtype"]], tuple(row["shape"])
    chunks = tuple(_saved_chunk(path, name, dtype, len(shape), p, files) for p in row["pieces"])
    why = why_not_tiled([chunk.box for chunk in chunks], shape)
    if why is not None:
        raise _damaged(path, f"the pieces of {name!r} do not make it up: {why}")
    return SavedTensor(dtype, shape, chunks)


def _saved_chunk(
    path: Path, name: str, dtype: torch.dtype, ndim: int, row: Any, files: Mapping[str, Any]
) -> SavedChunk:
    if not isinstance(row, list) or len(row) != 5:
        raise _damaged(path, f"a piece of {name!r} is not [file, key, offset, shape, sums]")
    file, key, offset, shape, sums = row
    sizes_fit = all(natural_numbers(sizes) and len(sizes) == ndim for sizes in (offset, shape))
    if not (isinstance(key, str) and isinstance(file, str) and file in files and sizes_fit):
        raise _damaged(path, f"a piece of {name!r} is not valid: {str(row)[:80]}")
    box = Box(tuple(offset), tuple(shape))
    num_blocks = -(-box.volume * dtype.itemsize // BLOCK_BYTES)
    _hexadecimal(path, sums, num_blocks)
    return SavedChunk(file, key, box, sums)


def _hexadecimal(path: Path, text: Any, count: int) -> list[int]:
    try:
        if isinstance(text, str) and len(text) == 8 * count:
            return [int(text[i : i + 8], 16) for i in range(0, len(text), 8)]
    except ValueError:
        pass
    raise _damaged(path, f"{str(text)[:60]!r} is not {count} checksums")


def _foreign_index(path: Path, content: dict[str, Any], digest: int) -> Index:
    """An index without the `shardwise` part: the headers of the files describe the tensors."""
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(
            f"{path} is not an index of a checkpoint: it has no weight_map of files."
        )
    headers = {}
    for file in sorted(set(weight_map.values())):
        _check_file_name(path, file)
        with open_regular(path.parent / file) as opened:
            headers[file] = read_header(opened).entries
    tensors = {}
    for name, file in weight_map.items():
        entry = headers[file].get(name)
        if entry is None:
            raise _damaged(path, f"it says that {name!r} is in {file!r}, which does not have it")
        tensors[name] = saved_whole(entry.dtype, entry.shape, file, name)
    return Index(path.parent, tensors, flat_node(tensors), digest=digest)


def _check_file_name(path: Path, name: str) -> None:
    """Raise unless a file that the index names is in the checkpoint's folder."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise _damaged(path, f"it names the file {name[:60]!r}, which is not in its folder")


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {why}.")
