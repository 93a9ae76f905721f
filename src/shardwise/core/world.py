"""Worlds: the set of ranks that a mesh and its tensors belong to, and what each rank is doing.

Note [Worlds come and go]
A process may initialise torch.distributed, destroy it and initialise it again, and simulated
worlds nest. Torch compares meshes of two worlds as equal, so no cache may be keyed by a mesh alone:
every cached value belongs to a `Grid`, and a grid to a `World`. A new default process group is a
new world.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401

from shardwise._torch.c10d import default_store
from shardwise.errors import WorldError

# Its functions take the default group at import time as the default of an argument. Any optimizer
# imports it; an import that late would keep the group alive. See `_let_go_of_groups`.


_epochs = itertools.count(1)


class World:
    """One lifetime of torch.distributed. Compared by identity."""

    def __init__(self, group: Any, *, simulated: bool) -> None:
        self.epoch = next(_epochs)
        self.group = weakref.ref(group)
        self.simulated = simulated
        #: Whether there is no process group; see `absent_world`.
        self.absent = isinstance(group, _NoGroup)
        self.size: int = group.size()
        self.rank: int = group.rank()
        #: The ranks of this process: its own, or all of a simulated world.
        self.present = tuple(range(self.size)) if simulated else (self.rank,)
        #: Whether tensors have values; False if one rank is played only for its layouts.
        self.has_values = True
        #: The grid of each mesh, by value; see core.mesh.
        self.grids: dict[Any, Any] = {}
        #: Per name of a process group, all groups of ranks that run its collectives in parallel.
        self.lines: dict[str, list[list[int]]] = {}
        #: Per name of a process group, the mesh axis that it runs along.
        self.axis_names: dict[str, str] = {}
        #: What injects the faults of a simulated world; see simulation.faults.
        self.faults: Any = None

    @property
    def alive(self) -> bool:
        """Whether this world's process group is still the default one."""
        group = self.group()
        return group is not None and dist.GroupMember.WORLD is group

    def __deepcopy__(self, memo: Any) -> World:
        return self  # one object per value

    def __repr__(self) -> str:
        kind = "simulated" if self.simulated else "real"
        return f"World(epoch={self.epoch}, {kind}, size={self.size})"


_known: list[World] = []

#: Caches to empty when a world comes or goes, so that none outlives its layouts.
world_caches: list[Callable[[], None]] = []


def enter_world(group: Any, *, simulated: bool) -> World:
    """Declare that `group` is the default process group of a new world."""
    _known[:] = [w for w in _known if w.group() is not None]
    world = World(group, simulated=simulated)
    _known.append(world)
    _empty_caches()
    return world


def leave_world(world: World) -> None:
    _known.remove(world)
    _empty_caches()


def _empty_caches() -> None:
    for empty in world_caches:
        empty()


@atexit.register
def _let_go_of_groups() -> None:
    """Frees the process groups of worlds that are over, whose destructors join their threads.

    A gloo thread that frees a tensor late needs the interpreter; if that is being torn down, the
    process ends with SIGABRT.
    """
    for world in _known:
        if not world.alive:
            for grid in world.grids.values():
                del grid.mesh


def current_world() -> World:
    """The world of the default process group."""
    if not dist.is_available() or not dist.is_initialized():
        raise WorldError(
            "There is no process group: call torch.distributed.init_process_group() under "
            "torchrun, or open `with shardwise.simulate(world_size):`."
        )
    group = dist.GroupMember.WORLD
    for world in reversed(_known):
        if world.group() is group:
            return world
    return enter_world(group, simulated=False)


class _NoGroup:
    """Stands for the process group of a world that is not there."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


@functools.lru_cache(maxsize=16)
def absent_world(size: int) -> World:
    """The world of tensors loaded without a process group, in which nothing can be sent."""
    return World(_NoGroup(size), simulated=False)


def simulated_world(asked: str) -> World:
    """The current world; raises unless it is simulated. `asked` names what needs that."""
    world = current_world()
    if not world.simulated:
        raise WorldError(f"{asked} needs a simulated world: open `with shardwise.simulate(n):`.")
    return world


def in_simulated_world() -> bool:
    """Whether this process simulates all ranks; compiled code belongs to one world."""
    return dist.is_available() and dist.is_initialized() and current_world().simulated


# As torch.compiler.assume_constant_result does, which would import the compiler.
in_simulated_world._dynamo_marked_constant = True  # type: ignore[attr-defined]


# -- what ranks do -------------------------------------------------------------------------------
# For ranks whose collective failed: they can no longer use the group, but still the store of the
# rendezvous.


_EVERY_S = 0.02


def _key(topic: str, rank: int) -> str:
    return f"shardwise/{topic}/{rank}"


def post(text: str, topic: str = "doing") -> None:
    """Write to the store what this rank is doing; only its first text is kept."""
    with contextlib.suppress(RuntimeError, ValueError):  # the store may be gone, or the group
        default_store().compare_set(_key(topic, dist.get_rank()), "", text)


def posted(num_ranks: int, wait_s: float, topic: str = "doing") -> dict[int, str]:
    """What each rank has posted; waits at most `wait_s` for those that have not."""
    said: dict[int, str] = {}
    until_s = time.monotonic() + wait_s
    with contextlib.suppress(RuntimeError, ValueError):
        store = default_store()
        while True:
            for rank in range(num_ranks):
                if rank not in said and store.check([_key(topic, rank)]):
                    said[rank] = store.get(_key(topic, rank)).decode()
            if len(said) == num_ranks or time.monotonic() > until_s:
                break
            time.sleep(_EVERY_S)
    return said
