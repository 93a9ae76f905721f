"""Convert checkpoints so that every tensor is one chunk, as other tools read them."""

from __future__ import annotations

import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from shardwise.checkpoint.claim import Claim, half_name
from shardwise.checkpoint.index import (
    INDEX_NAME,
    Index,
    SavedChunk,
    SavedFile,
    SavedTensor,
    pack_index,
    read_index,
)
from shardwise.checkpoint.read import Reader, ReadRequest
from shardwise.checkpoint.safetensors import (
    BUFFER_BYTES,
    RESERVED,
    TensorFile,
    bytes_of,
    sync_folder,
    write_synced,
)
from shardwise.core.box import Box
from shardwise.errors import CheckpointError

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
    node = {"dict": [[n, {"tensor": n}] for n in short.values()]}
    return Index(index.folder, tensors, node, ties, index.files)


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
            whole = Box.whole(saved.shape)
            chunk = SavedChunk(file, keys[name], whole, sums[name])
            tensors[name] = SavedTensor(saved.dtype, saved.shape, (chunk,))
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
    with TensorFile(path, table, {"format": "pt"}) as file:
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
