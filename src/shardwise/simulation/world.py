"""A simulated world: one process that runs all ranks, or one rank without values; its faults.

`torch.distributed` reports a world of the given size, with this process as rank 0. Meshes and
submeshes are made as usual, and every DTensor made inside holds a LocalTensor. On exit, the state
of torch.distributed is restored, whether or not it was initialised.

The process group serves a user's own `torch.distributed.all_reduce` and the like. Results are
computed as for the functional collectives, then written once to each tensor that ranks share. A
plain tensor is the same on every rank, so its sum over four ranks is four times itself; results
that differ between ranks cannot be written to it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from shardwise._torch.c10d import FakeWork, HashStore, fresh_c10d, groups_of, silent_group
from shardwise.core.world import World, current_world, enter_world, in_simulated_world, leave_world
from shardwise.errors import ArgumentError, CollectiveError, UnsupportedError
from shardwise.simulation.collectives import (
    Exchange,
    as_local,
    check_equal_splits,
    check_length,
    copied_from,
    gathered,
    listeners,
    reduce_parts,
    reduced,
    run_groups,
    scattered,
    transposed,
    write,
)
from shardwise.simulation.composites import run_composites
from shardwise.simulation.local_tensor import LocalTensor, from_ranks

# torch's stubs declare all methods abstract, but a Python group need not have all of them.
_Group: Any = dist.ProcessGroup

_REDUCE_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


class SimulatedGroup(_Group):
    """The process group of all ranks of a group, and of the groups parallel to it, at once."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    # Called by C++, where Python reads `group_name`.
    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return "shardwise_simulated"

    def barrier(self, opts: Any = None) -> Any:
        return FakeWork()

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._rewrite("allreduce_", tensors, reduced(_reduce_op(opts)))

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        name, root = _reduce_op(opts), opts.rootRank

        def exchange(parts: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return [reduce_parts(parts, name) if i == root else p for i, p in enumerate(parts)]

        return self._rewrite("reduce_", tensors, exchange)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._rewrite("broadcast_", tensors, copied_from(opts.rootRank))

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, kind: str = "allgather_"
    ) -> Any:
        for targets, x in zip(outputs, inputs, strict=True):
            rows = self._run(kind, as_local(x), lambda p: [torch.stack(list(p))] * len(p))
            _write_rows(targets, rows)
        return FakeWork()

    def _allgather_base(self, output: Any, x: Any, opts: Any = None) -> Any:
        return self._write("_allgather_base_", output, as_local(x), gathered)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        exchange = scattered(_reduce_op(opts))
        for target, tensors in zip(outputs, inputs, strict=True):
            self._write("reduce_scatter_", target, _stacked(tensors), exchange)
        return FakeWork()

    def _reduce_scatter_base(self, output: Any, x: Any, opts: Any = None) -> Any:
        exchange = scattered(_reduce_op(opts))
        return self._write("_reduce_scatter_base_", output, as_local(x), exchange)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        _write_rows(outputs, self._run("alltoall_", _stacked(inputs), transposed))
        return FakeWork()

    def alltoall_base(
        self, output: Any, x: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        check_equal_splits(input_splits, output_splits)
        return self._write("alltoall_base_", output, as_local(x), transposed)

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        # One list per rank here, where allgather takes one per tensor.
        return self.allgather(zip(*outputs, strict=True), inputs, opts, kind="allgather_coalesced_")

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, x in zip(outputs, inputs, strict=True):
            self._allgather_base(output, x, opts)
        return FakeWork()

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, x in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, x, opts)
        return FakeWork()

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """This process acts as the root, so it returns what the root receives."""
        self._check_root("gather", "dst", outputs, opts)
        return self.allgather(outputs, inputs, opts, kind="gather_")

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        self._check_root("scatter", "src", inputs, opts)
        for target, tensors in zip(outputs, inputs, strict=True):
            self._write("scatter_", target, _stacked(tensors), lambda p: p[opts.rootRank].unbind(0))
        return FakeWork()

    def _check_root(self, name: str, argument: str, lists: Any, opts: Any) -> None:
        if not lists or opts.rootRank != self.rank():
            raise UnsupportedError(
                f"{name}({argument}={opts.rootRank}) in a simulated world: only the root gives a "
                f"list, and this process acts as rank {self.rank()}. Use {argument}={self.rank()}, "
                "or a collective that is the same on every rank (all_gather, all_to_all)."
            )

    # Their names in torch 2.13.
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            "A simulated world has no messages between two ranks: one process cannot both send "
            "and wait. Use all_to_all, all_gather or broadcast."
        )

    send = recv = recv_anysource = _refuse

    def _rewrite(self, kind: str, tensors: Any, exchange: Exchange) -> Any:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            self._write(kind, tensor, as_local(tensor), exchange)
        return FakeWork()

    def _write(self, kind: str, target: Any, x: LocalTensor, exchange: Exchange) -> Any:
        write(target, self._run(kind, x, exchange))
        return FakeWork()

    def _run(self, kind: str, x: LocalTensor, exchange: Exchange) -> LocalTensor:
        for listener in listeners:
            listener(kind, x, self._name)
        return run_groups(x, self._name, exchange)


def _reduce_op(opts: Any) -> str:
    asked = getattr(opts, "reduceOp", dist.ReduceOp.SUM)
    for op, name in _REDUCE_OPS.items():
        if asked == op:
            return name
    raise UnsupportedError(
        f"{asked} is not supported in a simulated world; use sum, avg, product, "
        "max, min or a bitwise one."
    )


def _write_rows(targets: Sequence[torch.Tensor], rows: LocalTensor) -> None:
    check_length(targets, rows.shape[0])
    for number, target in enumerate(targets):
        row = rows.select(0, number)
        assert isinstance(row, LocalTensor), "a row of a LocalTensor is one"
        write(target, row)


def _stacked(tensors: Sequence[torch.Tensor]) -> LocalTensor:
    """A list of tensors per rank, stacked."""
    locals_ = [as_local(t) for t in tensors]
    ranks, world = locals_[0].ranks, locals_[0]._roster.world
    return from_ranks(world, ranks, [torch.stack([t.on_rank(r) for t in locals_]) for r in ranks])


P = ParamSpec("P")
R = TypeVar("R")


class simulate:
    """Simulate `world_size` ranks in this process; a context manager and a decorator.

    `faults` lists the faults to inject, and when: `Kill`, `Drop`, `Delay`, `Corrupt` and `FullDisk`
    of `shardwise.testing`. With a list, even an empty one, `num_moments` counts the moments.

    >>> import shardwise, torch
    >>> with shardwise.simulate(4):
    ...     mesh = shardwise.init_device_mesh("cpu", (4,))
    ...     x = shardwise.distribute_tensor(torch.arange(6), mesh, [shardwise.Shard(0)])
    ...     x.to_local()
    LocalTensor(
      rank 0: tensor([0, 1])
      rank 1: tensor([2, 3])
      rank 2: tensor([4, 5])
      rank 3: tensor([], dtype=torch.int64)
    )
    """

    def __init__(self, world_size: int, *, faults: Sequence[SimulatedFault] | None = None) -> None:
        if not isinstance(world_size, int) or isinstance(world_size, bool) or world_size < 1:
            raise ArgumentError(f"simulate() takes a number of ranks, found {world_size!r}.")
        self.world_size = world_size
        self._faults = faults
        self._injector = None if faults is None else FaultInjector(faults, world_size)
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> simulate:
        run_composites()
        entered = contextlib.ExitStack()
        world = entered.enter_context(
            _world("shardwise_simulated", SimulatedGroup, 0, self.world_size, simulated=True)
        )
        if self._faults is not None:
            self._injector = world.faults = FaultInjector(self._faults, self.world_size)
        self._entered.append(entered)
        return self

    @property
    def num_moments(self) -> int:
        """How many moments for faults the world has passed; 0 without `faults`."""
        return 0 if self._injector is None else self._injector.num_moments

    def __exit__(self, *exc: Any) -> None:
        self._entered.pop().close()

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(fn)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return fn(*args, **kwargs)

        return run


@contextlib.contextmanager
def _world(
    backend: str, make_group: Callable[..., Any], rank: int, size: int, *, simulated: bool
) -> Iterator[World]:
    """Enter a new world, with groups `make_group(rank, size, name)` of this backend."""

    def make(options: Any, backend_options: Any) -> Any:
        return make_group(options.group_rank, options.group_size, options.group_id)

    if backend not in dist.Backend.backend_list:
        dist.Backend.register_backend(backend, make, extended_api=True, devices=["cpu", "cuda"])
    with fresh_c10d(), groups_of(backend):
        dist.init_process_group(backend, store=HashStore(), rank=rank, world_size=size)
        world = enter_world(dist.GroupMember.WORLD, simulated=simulated)
        try:
            yield world
        finally:
            leave_world(world)


# -- one rank ------------------------------------------------------------------------------------
# One rank of a world of any size, played without values: shapes, layouts and collectives alone.
#
# The time of `simulate` grows with the number of ranks, since it plays all of them. Here this
# process is one rank, and its tensors are on the meta device: collectives return shapes, so nothing
# is sent or computed. Only the messages with which ranks compare requests before they shard have
# values: every other rank answers as this one does.


@contextlib.contextmanager
def play_one_rank(rank: int, world_size: int) -> Iterator[World]:
    """This process as one rank of a world in which tensors have no values."""
    with _world("shardwise_one_rank", _silent_group, rank, world_size, simulated=False) as world:
        world.has_values = False
        with torch.device("meta"):
            yield world


def _silent_group(rank: int, size: int, name: str) -> Any:
    return silent_group(rank, size)


# -- faults --------------------------------------------------------------------------------------
# Note [Moments]
# A moment is a collective, a step in which the ranks of a checkpoint meet, or a block written to a
# checkpoint's file; they are counted from 0 as the world runs, so a fault comes at the same point
# every time. A fault that does not apply at its moment comes at the next moment at which it does: a
# disk has no messages to drop. Nothing waits: time that a fault takes is only counted. After a rank
# was killed or a message was lost, the groups of the world are broken, as in processes: everything
# the ranks do together raises `CollectiveError`. Compiled code has no moments.


#: How long a simulated collective waits for a rank, as under `launch`.
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Kill:
    """A rank dies at moment `at`, without cleaning up."""

    rank: int
    at: int


@dataclass(frozen=True, slots=True)
class Drop:
    """What a rank sends at moment `at` never arrives, so that the others time out."""

    rank: int
    at: int


@dataclass(frozen=True, slots=True)
class Delay:
    """A rank comes `seconds` late; beyond the timeout of 120 s, the others give up."""

    rank: int
    at: int
    seconds: float = 1.0


@dataclass(frozen=True, slots=True)
class Corrupt:
    """One bit of what a rank sends or writes at moment `at` is flipped; `bit` says which one."""

    rank: int
    at: int
    bit: int = 0


@dataclass(frozen=True, slots=True)
class FullDisk:
    """Checkpoints can write `after_bytes` bytes; then no space is left on the disk."""

    after_bytes: int = 0


SimulatedFault = Kill | Drop | Delay | Corrupt | FullDisk


def draw_fault(seed: int, num_ranks: int, num_moments: int) -> SimulatedFault:
    """A fault of any kind at any of the moments; the same for the same arguments.

    >>> draw_fault(3, num_ranks=4, num_moments=10)
    Kill(rank=2, at=3)
    """
    draw = random.Random(f"{seed} {num_ranks} {num_moments}")
    rank, at = draw.randrange(num_ranks), draw.randrange(max(num_moments, 1))
    kinds: list[SimulatedFault] = [
        Kill(rank, at),
        Drop(rank, at),
        Delay(rank, at, draw.choice([0.5, TIMEOUT_S / 2, 2 * TIMEOUT_S])),
        Corrupt(rank, at, draw.randrange(1 << 12)),
        FullDisk(draw.randrange(1 << draw.randrange(1, 20))),
    ]
    return draw.choice(kinds)


_Sent = TypeVar("_Sent")


class FaultInjector:
    """The faults of one simulated world, and their effects so far."""

    def __init__(self, faults: Sequence[SimulatedFault], num_ranks: int) -> None:
        if isinstance(faults, SimulatedFault) or not all(
            isinstance(fault, SimulatedFault) for fault in faults
        ):
            raise ArgumentError(
                "simulate(faults=...) takes Kill, Drop, Delay, Corrupt and FullDisk of "
                f"shardwise.testing in a list, found {faults!r}."
            )
        for fault in faults:
            if not isinstance(fault, FullDisk) and not 0 <= fault.rank < num_ranks:
                raise ArgumentError(f"{fault} names no rank of a world of {num_ranks}.")
        self._timed = [fault for fault in faults if not isinstance(fault, FullDisk)]
        room = [fault.after_bytes for fault in faults if isinstance(fault, FullDisk)]
        self._room_bytes = min(room) if room else None
        #: Why nothing can be sent any more.
        self._broken: str | None = None
        self.killed: set[int] = set()
        self.num_moments = 0
        self.waited_s = 0.0

    # -- moments -----------------------------------------------------------------------------

    def collective(self, x: LocalTensor) -> LocalTensor:
        """What the ranks send in a collective; raises if it fails."""
        if type(x._parts[0]) is not torch.Tensor:
            return x  # traced by a compiler
        return self._after_moment(x, _corrupted, Kill, Drop, Delay)

    def exchange(self, messages: Sequence[bytes]) -> list[bytes]:
        """What the ranks of a checkpoint send each other in a step; raises if it fails."""

        def corrupted(sent: list[bytes], fault: Corrupt) -> list[bytes]:
            sent[fault.rank] = _flipped(sent[fault.rank], fault.bit)
            return sent

        return self._after_moment(list(messages), corrupted, Kill, Drop, Delay)

    def write(self, data: memoryview) -> memoryview:
        """The bytes that reach a checkpoint's file instead of `data`; raises if the write fails."""

        def corrupted(data: memoryview, fault: Corrupt) -> memoryview:
            return memoryview(_flipped(bytes(data), fault.bit))

        data = self._after_moment(data, corrupted, Kill)
        if self._room_bytes is not None:
            self._room_bytes -= data.nbytes
            if self._room_bytes < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return data

    def _after_moment(
        self, sent: _Sent, corrupted: Callable[[_Sent, Corrupt], _Sent], *kinds: type
    ) -> _Sent:
        """What arrives of `sent` after the due faults of these kinds, and of `Corrupt`."""
        for fault in self._due(Corrupt, *kinds):
            if isinstance(fault, Corrupt):
                sent = corrupted(sent, fault)
            else:
                self._lose(fault)
        if self._broken is not None:
            raise CollectiveError(
                f"The ranks have lost each other: {self._broken}. End all processes, and start "
                "again from a checkpoint."
            )
        return sent

    def _due(self, *kinds: type) -> list[Any]:
        now = self.num_moments
        self.num_moments += 1
        due = [f for f in self._timed if f.at <= now and isinstance(f, kinds)]
        self._timed = [f for f in self._timed if f not in due]
        return due

    def _lose(self, fault: Kill | Drop | Delay) -> None:
        if isinstance(fault, Kill):
            self.killed.add(fault.rank)
            self._broken = f"rank {fault.rank} was killed"
        elif isinstance(fault, Delay):
            self.waited_s += min(fault.seconds, TIMEOUT_S)
            if fault.seconds > TIMEOUT_S:
                self._broken = f"rank {fault.rank} did not come within {TIMEOUT_S:g} s"
        else:
            self.waited_s += TIMEOUT_S
            self._broken = f"a message of rank {fault.rank} did not arrive within {TIMEOUT_S:g} s"


def _flipped(data: bytes, bit: int) -> bytes:
    if not data:
        return data
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    return bytes(changed)


def _corrupted(x: LocalTensor, fault: Corrupt) -> LocalTensor:
    if fault.rank not in x.ranks:
        return x
    parts = [x.on_rank(rank) for rank in x.ranks]
    place = x.ranks.index(fault.rank)
    damaged = parts[place].clone(memory_format=torch.contiguous_format)
    if damaged.numel():
        raw = damaged.view(-1).view(torch.uint8)
        raw[fault.bit // 8 % len(raw)] ^= 1 if damaged.dtype is torch.bool else 1 << fault.bit % 8
    parts[place] = damaged
    return from_ranks(x._roster.world, x.ranks, parts, x._sized)


def written(data: memoryview) -> memoryview:
    """The part of `data` that reaches the disk: all of it, unless faults are simulated."""
    faults = current_world().faults if in_simulated_world() else None
    return data if faults is None else faults.write(data)
