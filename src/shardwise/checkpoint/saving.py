"""Saving: every rank writes the chunks assigned to it, and rank 0 publishes the checkpoint.

Replicas of a shard are written once, by one of the ranks that hold them, balanced in bytes.

Note [Whole or not at all]
A checkpoint is written to a folder with a unique name. When the files of all ranks are synced, rank
0 adds the index, reads it back, and renames the folder; until then there is no checkpoint of the
final name. A save that fails on one rank fails on all, and its folder is removed. Meanwhile rank 0
claims the name (Note [One writer per name]); the next save of a name removes the leftovers of a
killed one.

Note [Saves at the end of a program]
At exit, a process waits for its background saves, at most `EXIT_WAIT_S`. If one is not done by then
or has failed, and nobody has called `result()`, the process says so and ends with exit status 1.
Under `launch`, a rank is done when its saves are, and fails with them.

Note [State beside a module]
A module may keep state outside its state dict, such as a collection's fused optimizer. Its
`__checkpoint_beside__()` lists those tensors. A state with optimizers is meant for resuming; if
such tensors are missing in it, saving warns.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.claim import Claim, half_name
from shardwise.checkpoint.crew import Crew, current_crew, pieces_of, reduced
from shardwise.checkpoint.index import (
    INDEX_NAME,
    SavedChunk,
    SavedFile,
    SavedTensor,
    pack_index,
    read_index,
)
from shardwise.checkpoint.safetensors import (
    RESERVED,
    TensorFile,
    buffers_of,
    pack_header,
    sync_folder,
    write_synced,
)
from shardwise.checkpoint.tree import Node, Tree, joined, merge
from shardwise.core.box import Box, why_not_tiled
from shardwise.errors import CheckpointError, CheckpointWarning, printable
from shardwise.launch import before_done


@dataclass(frozen=True, slots=True)
class HeldBoxes:
    """A global tensor, and the boxes of it that one rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class ChunkToWrite:
    """A box of a tensor that one rank writes."""

    name: str
    dtype: torch.dtype
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.volume * self.dtype.itemsize


def assign_chunks(held: Sequence[Mapping[str, HeldBoxes]]) -> list[list[ChunkToWrite]]:
    """The chunks that each rank writes; the same on every rank, as all have the same input."""
    # The ranks that hold each box, as keys: a rank may hold a box twice.
    holders: dict[str, dict[Box, dict[int, None]]] = {}
    wholes: dict[str, tuple[int, HeldBoxes]] = {}
    for rank, table in enumerate(held):
        for name, mine in table.items():
            first_rank, first = wholes.setdefault(name, (rank, mine))
            if (first.shape, first.dtype) != (mine.shape, mine.dtype):
                raise CheckpointError(
                    f"Ranks disagree on {name}: {first.dtype} of shape {first.shape} on rank "
                    f"{first_rank}, {mine.dtype} of shape {mine.shape} on rank {rank}."
                )
            boxes = holders.setdefault(name, {})
            for box in mine.boxes:
                boxes.setdefault(box, {})[rank] = None
    chunks = []
    for name, boxes in holders.items():
        whole = wholes[name][1]
        why = why_not_tiled(list(boxes), whole.shape)
        if why is not None:
            raise CheckpointError(f"The ranks do not hold {name} as pieces of one tensor: {why}.")
        # A tensor without elements has one chunk too, which keeps its dtype.
        full = [box for box in boxes if box.volume] or list(boxes)[:1]
        chunks += [(ChunkToWrite(name, whole.dtype, box), list(boxes[box])) for box in full]
    return _balanced(chunks, len(held))


def _balanced(
    chunks: Sequence[tuple[ChunkToWrite, list[int]]], num_ranks: int
) -> list[list[ChunkToWrite]]:
    loads = [0] * num_ranks
    mine: list[list[tuple[int, ChunkToWrite]]] = [[] for _ in range(num_ranks)]
    # Chunks with one holder first, then the largest: replicated ones fill the gaps.
    order = sorted(
        range(len(chunks)), key=lambda i: (len(chunks[i][1]) > 1, -chunks[i][0].num_bytes, i)
    )
    for i in order:
        chunk, ranks = chunks[i]
        writer = min(ranks, key=lambda r: (loads[r], r))
        loads[writer] += chunk.num_bytes
        mine[writer].append((i, chunk))
    return [[chunk for _, chunk in sorted(row, key=lambda pair: pair[0])] for row in mine]


#: How many bytes a rank copies, at most, so that an asynchronous save can return.
COPY_BYTES = 1 << 30
#: How long a process that ends waits for its saves in the background.
EXIT_WAIT_S = 600.0


@dataclass(frozen=True, slots=True)
class _RankState:
    """A rank's tensors to save, and the path; exchanged before anything is written."""

    path: str
    #: That of rank 0 is used: no other save has it.
    token: str
    held: dict[str, HeldBoxes]
    node: Node
    ties: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Written:
    """The file that a rank has written, if it had anything to write, and its chunks."""

    files: dict[str, SavedFile]
    chunks: list[tuple[str, SavedChunk]]


def save(state: Any, path: str | os.PathLike[str]) -> None:
    """Save a module, an optimizer, a tensor, or a dict of them and of plain values, to a folder.

    Every rank calls it. Each shard is written by one of the ranks that hold it, into one
    safetensors file per rank; plain tensors and values must be the same on all ranks. The folder
    must not exist.

    >>> import shardwise, shardwise.checkpoint, tempfile, torch
    >>> with shardwise.simulate(2), tempfile.TemporaryDirectory() as folder:
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     x = shardwise.distribute_tensor(torch.arange(6), mesh, [shardwise.Shard(0)])
    ...     shardwise.checkpoint.save({"x": x, "step": 3}, f"{folder}/first")
    ...     y = shardwise.zeros(6, dtype=torch.int64, device_mesh=mesh)
    ...     shardwise.checkpoint.load({"x": y, "step": 0}, f"{folder}/first")["step"]
    ...     y.to_local().agreed()
    3
    tensor([0, 1, 2, 3, 4, 5])
    """
    _Job(state, path).finish()


def save_async(state: Any, path: str | os.PathLike[str], *, copy_bytes: int = COPY_BYTES) -> Saving:
    """Like `save`, but return as soon as the state may change again.

    A rank copies at most `copy_bytes` of its data, and writes the rest before this returns. One
    save runs at a time: the next save or load waits for it. The end of the program waits too, at
    most ten minutes; if nobody has read the error of a failed save, the exit status is then 1.
    """
    return Saving(_Job(state, path), copy_bytes)


class Saving:
    """A save that goes on in the background."""

    def __init__(self, job: _Job, copy_bytes: int) -> None:
        self._job = job
        self._error: BaseException | None = None
        job.start(copy_bytes)
        # A daemon: else Python would wait for it without a limit.
        self._thread = threading.Thread(target=self._run, name="shardwise-save", daemon=True)
        _watch_exit()
        _in_flight.append(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._job.finish()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> None:
        """Wait until the checkpoint is complete, or raise the error of the save."""
        self._thread.join()
        if self in _in_flight:
            _in_flight.remove(self)
        if self._error is not None:
            raise self._error

    def why_not_saved(self, until_s: float) -> str | None:
        """Wait; return why the checkpoint does not exist, or None if it does."""
        if not self.done:
            seconds = max(until_s - time.monotonic(), 0)
            print(f"Waiting at most {seconds:.0f} s for {self._job.path}.", file=sys.stderr)
            self._thread.join(seconds)
        if not self.done:
            return f"{self._job.path} was not saved within {EXIT_WAIT_S:.0f} s."
        return None if self._error is None else f"{self._job.path} was not saved: {self._error}"


_in_flight: list[Saving] = []
#: The process that waits for its saves when it ends; a fork is another one.
_watched: set[int] = set()


def _watch_exit() -> None:
    if os.getpid() not in _watched:
        _watched.add(os.getpid())
        atexit.register(_finish_at_exit)
        # Processes of multiprocessing end without atexit.
        util.Finalize(None, _finish_at_exit, exitpriority=100)


def _finish_at_exit() -> None:
    """See Note [Saves at the end of a program]."""
    until_s = time.monotonic() + EXIT_WAIT_S
    faults = [saving.why_not_saved(until_s) for saving in _in_flight]
    _in_flight.clear()
    if any(faults):
        for fault in filter(None, faults):
            print(f"Error: {printable(fault)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def wait_for_saves() -> None:
    """Wait for saves in the background; raise their errors unless `result()` already did."""
    while _in_flight:
        _in_flight[0].result()


before_done.append(wait_for_saves)


def _left_out(tree: Tree, saved: Iterable[torch.Tensor]) -> list[str]:
    """The modules with state that is not being saved; see Note [State beside a module]."""
    if not tree.optimizers:
        return []
    memory = {tensor.untyped_storage().data_ptr() for tensor in saved}
    return [
        joined(name, path) if path else name
        for name, root in tree.modules.items()
        for path, module in root.named_modules()
        if hasattr(module, "__checkpoint_beside__")
        and any(
            beside.numel() and beside.untyped_storage().data_ptr() not in memory
            for beside in module.__checkpoint_beside__()
        )
    ]


class _Job:
    """One save of the ranks of this process."""

    def __init__(self, state: Any, path: str | os.PathLike[str]) -> None:
        self.crew: Crew = current_crew()
        self.path = Path()
        self._claim: Claim | None = None
        self._values: dict[tuple[int, str, Box], torch.Tensor] = {}
        self._files: list[_RankFile] = []
        self._left_out: list[str] = []

        def describe() -> list[_RankState]:
            wait_for_saves()
            # The background thread must not depend on the current folder.
            self.path = Path(path).absolute()
            return self._rank_states(state, os.fspath(path))

        states = self.crew.together(describe)
        for name in self._left_out if self.crew.leads else ():
            warnings.warn(
                f"{name} has an optimizer whose state is not saved: a run that resumes from "
                f"{self.path.name} starts without it. Save {name}.optimizer too.",
                CheckpointWarning,
                stacklevel=3,
            )
        for rank, one in enumerate(states):
            if one.path != states[0].path:
                raise CheckpointError(
                    f"Ranks 0 and {rank} save to different places: {states[0].path} and {one.path}."
                )
        self.half = self.path.parent / half_name(self.path.name, states[0].token)
        self._node, self._ties = states[0].node, states[0].ties
        self._wholes: dict[str, HeldBoxes] = {}
        for one in states:
            self._node = merge(self._node, one.node)
            self._ties = {**self._ties, **one.ties}
            self._wholes.update(one.held)
        self.chunks = assign_chunks([one.held for one in states])
        try:
            self.crew.once(self._make_folder)
        except BaseException:
            self._drop()
            raise

    # -- before writing ----------------------------------------------------------------------

    def _rank_states(self, state: Any, path: str) -> list[_RankState]:
        tree = Tree(state)
        held: list[dict[str, HeldBoxes]] = [{} for _ in self.crew.present]
        for name, value in tree.tensors.items():
            boxes: dict[int, list[Box]] = {rank: [] for rank in self.crew.present}
            for piece in pieces_of(reduced(value), name, self.crew.present):
                if piece.rank in boxes:
                    boxes[piece.rank].append(piece.box)
                    self._values[piece.rank, name, piece.box] = piece.tensor
            for place, mine in enumerate(boxes.values()):
                held[place][name] = HeldBoxes(tuple(value.shape), value.dtype, tuple(mine))
        self._left_out = _left_out(tree, self._values.values())
        token = secrets.token_hex(6)
        return [_RankState(path, token, table, tree.node, tree.ties) for table in held]

    def _make_folder(self) -> None:
        if self.path.exists():
            raise CheckpointError(
                f"{self.path} exists already: remove it, or save under another name."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._claim = Claim(self.path)
        if self.path.exists():
            raise self._saved_meanwhile()
        self._claim.remove_halves()
        self.half.mkdir()

    def _saved_meanwhile(self) -> CheckpointError:
        return CheckpointError(f"{self.path} was saved by another job meanwhile.")

    # -- writing -----------------------------------------------------------------------------

    def start(self, copy_bytes: int) -> None:
        """Copy up to `copy_bytes` and write the rest, so that the state may change."""

        def begin() -> None:
            if copy_bytes < 0:
                raise CheckpointError(f"copy_bytes is a number of bytes, found {copy_bytes}.")
            left = copy_bytes
            for file in self._rank_files():
                left -= file.write_beyond(left)

        try:
            self.crew.alike(begin)
        except BaseException:
            self._drop()
            raise
        self._values.clear()

    def finish(self) -> None:
        """Write what is left, and publish the checkpoint."""

        def write() -> list[_Written]:
            return [file.write_rest() for file in self._rank_files()]

        def publish() -> None:
            self._publish(written)

        try:
            written = self.crew.together(write)
            self.crew.once(publish)
        except BaseException:
            self._drop()
            raise

    def _rank_files(self) -> list[_RankFile]:
        if not self._files:
            self._files = [_RankFile(self, rank) for rank in self.crew.present]
        return self._files

    def _drop(self) -> None:
        for file in self._files:
            file.close()
        if self.crew.leads:
            shutil.rmtree(self.half, ignore_errors=True)
        if self._claim is not None:
            self._claim.release()

    def _publish(self, written: Sequence[_Written]) -> None:
        files: dict[str, SavedFile] = {}
        chunks: dict[str, list[SavedChunk]] = {}
        for one in written:
            files.update(one.files)
            for name, chunk in one.chunks:
                chunks.setdefault(name, []).append(chunk)
        tensors = {
            name: SavedTensor(whole.dtype, whole.shape, tuple(chunks[name]))
            for name, whole in self._wholes.items()
        }
        data = pack_index(tensors, self._node, self._ties, files, self.crew.size)
        write_synced(self.half / INDEX_NAME, data)
        sync_folder(self.half)
        self._read_back(tensors, files)
        if self.path.exists():
            raise self._saved_meanwhile()
        try:
            self.half.rename(self.path)
        except OSError as error:
            raise (self._saved_meanwhile() if self.path.exists() else error) from error
        sync_folder(self.path.parent)
        if self._claim is not None:
            self._claim.release()

    def _read_back(
        self, tensors: Mapping[str, SavedTensor], files: Mapping[str, SavedFile]
    ) -> None:
        """Raise unless `load` can read back what was written."""
        try:
            found = read_index(self.half)
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.path} was not saved, as it could not be loaded: {error}"
            ) from error
        sizes = {name: (self.half / name).stat().st_size for name in files}
        if (
            (found.tensors, found.node, found.ties) != (tensors, self._node, self._ties)
            or found.files != files
            or sizes != {name: file.num_bytes for name, file in files.items()}
        ):
            raise CheckpointError(
                f"{self.path} was not saved: what was read back is not what was written."
            )


class _RankFile:
    """The file of one rank: some chunks may be written before others.

    It is opened for the first chunk, as the ranks of a simulated world may be many.
    """

    def __init__(self, job: _Job, rank: int) -> None:
        self._chunks = job.chunks[rank]
        self._keys = _keys(self._chunks)
        self._values = [job._values[rank, chunk.name, chunk.box] for chunk in self._chunks]
        writers = [r for r, chunks in enumerate(job.chunks) if chunks]
        # A rank without chunks has no file.
        number = writers.index(rank) + 1 if self._chunks else 0
        self._path = job.half / f"model-{number:05d}-of-{len(writers):05d}.safetensors"
        chunks = zip(self._keys, self._chunks, strict=True)
        self._packed = pack_header({key: (c.dtype, c.box.sizes) for key, c in chunks})
        self._file: TensorFile | None = None
        self._done: list[tuple[str, SavedChunk]] = []

    def write_beyond(self, copy_bytes: int) -> int:
        """Write chunks until at most `copy_bytes` are left; copy those and return their bytes."""
        left = sum(chunk.num_bytes for chunk in self._chunks)
        while left > copy_bytes:
            left -= self._chunks[len(self._done)].num_bytes
            self._write_next()
        for place in range(len(self._done), len(self._chunks)):
            self._values[place] = torch.clone(self._values[place].to("cpu"))
        return left

    def _write_next(self) -> None:
        if self._file is None:
            self._file = TensorFile(self._path, *self._packed)
        place = len(self._done)
        chunk, key = self._chunks[place], self._keys[place]
        sums = self._file.write(key, buffers_of(self._values[place]))
        self._values[place] = torch.empty(0)  # a copy is not needed any more
        self._done.append((chunk.name, SavedChunk(self._path.name, key, chunk.box, sums)))

    def write_rest(self) -> _Written:
        while len(self._done) < len(self._chunks):
            self._write_next()
        if self._file is None:
            return _Written({}, [])
        self._file.sync()
        self._file.close()
        saved = SavedFile(self._file.num_bytes, zlib.crc32(self._file.header))
        return _Written({self._path.name: saved}, self._done)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _keys(chunks: Sequence[ChunkToWrite]) -> list[str]:
    """The keys of chunks in a file: the name, with the offset if a tensor has several there."""
    counts = Counter(chunk.name for chunk in chunks)
    keys = []
    for chunk in chunks:
        offset = ",".join(map(str, chunk.box.offsets))
        as_is = counts[chunk.name] == 1 and chunk.name != RESERVED
        keys.append(chunk.name if as_is else f"{chunk.name}[{offset}]")
    if len(set(keys)) != len(keys):
        raise CheckpointError("Two pieces of a file have one key: a name ends like an offset.")
    return keys
