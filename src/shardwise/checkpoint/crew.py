"""The ranks that save or load together, and the pieces of a tensor that each of them holds."""

from __future__ import annotations

import pickle
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise._torch.c10d import group_timeout
from shardwise.comm.agreement import Fault, joint_error
from shardwise.comm.collectives import doing_now, is_lost, lost, what_ranks_did
from shardwise.core.box import Box
from shardwise.core.placements import Replicate, short
from shardwise.core.world import World, current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import CheckpointError, CollectiveError, ShardwiseError
from shardwise.simulation.ranks import agreed, on_rank, present, rank_values, roster_of

T = TypeVar("T")

#: One group per world: a save in the background must not interleave with other collectives.
_groups: weakref.WeakKeyDictionary[World, Any] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Crew:
    """`present` are the ranks of this process; `group` is None if those are all ranks."""

    size: int
    present: tuple[int, ...]
    group: Any
    #: Of a simulated world; see simulation.faults.
    faults: Any = None

    @property
    def leads(self) -> bool:
        """Whether this process does the steps that only one process may do."""
        return self.present[0] == 0 and (self.faults is None or 0 not in self.faults.killed)

    def exchange(self, mine: Sequence[T], what: str) -> list[T]:
        """All-gather: one value per rank present becomes one value per rank.

        `what` names the step. Ranks in different steps, such as one that saves while another
        loads, all raise.
        """
        if self.group is None and self.faults is None:
            return list(mine)
        found: list[Any] = [None] * self.size
        try:
            if self.faults is not None:
                found = [(what, m) for m in self.faults.exchange(list(map(_packed, mine)))]
            else:
                dist.all_gather_object(found, (what, _packed(mine[0])), group=self.group)
        except RuntimeError as error:
            did = what_ranks_did(doing_now(f"a checkpoint ({what})"))
            raise CheckpointError(
                f"Rank {self.present[0]} lost the others during a checkpoint: {error} {did}"
            ) from error
        if len({said for said, _ in found}) > 1:
            faults = {rank: Fault(said, CollectiveError) for rank, (said, _) in enumerate(found)}
            raise joint_error("The ranks are not in the same checkpoint. ", faults, self.size)
        return [_unpacked(rank, message) for rank, (_, message) in enumerate(found)]

    def together(self, step: Callable[[], Sequence[T]], what: str | None = None) -> list[T]:
        """Run a step and all-gather its results; if it fails on any rank, raise on all."""
        cause: BaseException | None = None
        mine: Sequence[Any]
        try:
            mine = step()
        except KeyboardInterrupt:  # of all ranks, nearly always
            raise
        except BaseException as error:  # of any kind: the other ranks wait for this one
            cause = error
            mine = [Fault(_text(error), CheckpointError)] * len(self.present)
        found = self.exchange(mine, what or _words(step))
        faults = {rank: each for rank, each in enumerate(found) if isinstance(each, Fault)}
        if cause is not None and not isinstance(cause, Exception):
            raise cause  # such as sys.exit(): this rank ends, and the others know why
        if faults:
            raise joint_error("", faults, self.size) from cause
        return found

    def alike(self, step: Callable[[], T]) -> list[T]:
        """`together` for a step that has one result for all ranks present."""
        return self.together(lambda: [step()] * len(self.present), _words(step))

    def once(self, step: Callable[[], Any]) -> None:
        """Run a step on rank 0; if it fails, raise on all ranks."""
        self.together(lambda: [step() if self.leads else None] * len(self.present), _words(step))


def _packed(value: Any) -> bytes:
    data = pickle.dumps(value)
    return zlib.crc32(data).to_bytes(4, "little") + data


def _unpacked(rank: int, message: bytes) -> Any:
    data = message[4:]
    if zlib.crc32(data).to_bytes(4, "little") != message[:4]:
        raise CollectiveError(
            f"What rank {rank} sent for a checkpoint arrived damaged. Nothing was published: save "
            "or load again."
        )
    return pickle.loads(data)


_DOING = {
    "saving": "saves",
    "loading": "loads",
    "series": "looks at the checkpoints of a folder",
    "read": "verifies",
}


def _words(step: Callable[..., Any]) -> str:
    """The step of a rank as text: the function that it calls, in words."""
    module = step.__module__.rpartition(".")[2]
    return f"it {_DOING.get(module, module)} ({step.__name__.strip('_').replace('_', ' ')})"


def _text(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception as worse:  # an exception of somebody else, whose text fails
        said = f"(its text raises {type(worse).__name__})"
    if (isinstance(error, ShardwiseError) or type(error) is RuntimeError) and said:
        return said
    return f"{kind}: {said}" if said else kind


def current_crew() -> Crew:
    """The crew of the current world; without torch.distributed, this process alone."""
    if not dist.is_available() or not dist.is_initialized():
        return Crew(1, (0,), None)
    world = current_world()
    if len(world.present) == world.size:
        return Crew(world.size, world.present, None, world.faults)
    if world not in _groups:
        timeout = group_timeout(dist.GroupMember.WORLD)
        try:
            _groups[world] = dist.new_group(backend="gloo", timeout=timeout)
        except RuntimeError as error:
            if is_lost(error):
                raise lost(error, "the start of the first checkpoint") from error
            raise
    return Crew(world.size, (world.rank,), _groups[world])


# Note [Pieces]
# To a checkpoint a tensor is a set of pieces: a rank, an offset in the global tensor, and a plain
# tensor that shares its memory. An object with a shape and a dtype takes part through a method
# `__checkpoint_pieces__()` that returns a list of (rank, offset, tensor), with any number of pieces
# per rank and any tiling. In a simulated world the pieces of all ranks are present.


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor on one rank; `tensor` shares its memory."""

    rank: int
    offset: tuple[int, ...]
    tensor: torch.Tensor

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.tensor.shape))


def pieces_of(value: Any, name: str, present: Sequence[int]) -> list[Piece]:
    """The pieces of a tensor on the ranks present; a plain tensor is whole on each of them."""
    own = getattr(value, "__checkpoint_pieces__", None)
    if own is not None:
        return [Piece(rank, tuple(offset), part.detach()) for rank, offset, part in own()]
    if isinstance(value, DTensor):
        return _of_dtensor(value, name)
    plain = value.detach()
    roster = roster_of(plain)
    ranks = present if roster is None else roster.ranks
    held = [(rank, on_rank(plain, rank)) for rank in ranks]
    plain = agreed(plain)
    if plain.layout is not torch.strided or plain.is_meta:
        raise CheckpointError(
            f"{name} is not a dense tensor with memory: {plain.layout}, on {plain.device}."
        )
    return [Piece(rank, (0,) * plain.dim(), part) for rank, part in held]


def is_partial(value: Any) -> bool:
    """Whether ranks hold terms of a sum, not shards."""
    return type(value) is DTensor and any(p.is_partial() for p in value.placements)


def reduced(value: Any) -> Any:
    """The tensor with Partial placements reduced, which optimizer state may get from gradients."""
    if not is_partial(value):
        return value
    placements = [Replicate() if p.is_partial() else p for p in value.placements]
    return value.detach().redistribute(placements=placements, order=value._layout.order)


def _of_dtensor(value: DTensor, name: str) -> list[Piece]:
    layout = value._layout
    if any(p.is_partial() for p in layout.placements):
        raise CheckpointError(
            f"{name} is {short(layout.placements)}: its ranks hold terms of a sum, not parts. "
            "redistribute() it to Shard or Replicate first."
        )
    if value.is_meta:
        raise CheckpointError(f"{name} is on the meta device and has no values.")
    whole: Any = value.detach()
    parts = rank_values(layout.grid, whole.to_local())
    return [
        Piece(rank, layout.box(coordinate)[0], part)
        for rank, (coordinate, part) in zip(present(layout.grid), parts, strict=True)
    ]
