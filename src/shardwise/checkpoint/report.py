"""What a checkpoint holds, and whether any of it is damaged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.crew import Crew
from shardwise.checkpoint.index import Index, SavedTensor, read_index
from shardwise.checkpoint.read import Reader, ReadRequest
from shardwise.checkpoint.safetensors import open_regular
from shardwise.checkpoint.tree import decode
from shardwise.errors import CheckpointError


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
    """What `verify` finds: how much was read, and what is damaged (nothing, when all is well)."""

    num_bytes: int
    faults: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.faults


def inspect(path: str | os.PathLike[str]) -> CheckpointReport:
    """What a checkpoint holds. Reads the index and the headers, no tensor."""
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
    number = open_regular(index.folder / name)
    try:
        return os.fstat(number).st_size
    finally:
        os.close(number)


def _report(name: str, tensor: SavedTensor) -> TensorReport:
    pieces = tuple((p.file, *p.box) for p in tensor.chunks)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorReport(name, dtype, tensor.shape, tensor.num_bytes, pieces)


def verify(path: str | os.PathLike[str]) -> Verdict:
    """Read every byte of a checkpoint and name everything that is damaged; raises nothing."""
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
