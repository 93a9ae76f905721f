"""A simulated world: one process that runs all ranks.

`torch.distributed` reports a world of the given size, with this process as rank 0. Meshes and
sub-meshes are made as usual, and every DTensor made inside holds a LocalTensor. On exit, the state
of torch.distributed is restored, whether or not it was initialised.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

from shardwise._torch.c10d import HashStore, fresh_c10d
from shardwise.core.world import World, enter_world, leave_world
from shardwise.errors import ArgumentError
from shardwise.simulation.faults import FaultInjector, SimulatedFault
from shardwise.simulation.process_group import SimulatedGroup

_BACKEND = "shardwise_simulated"

P = ParamSpec("P")
R = TypeVar("R")


class simulate:
    """Simulate `world_size` ranks in this process; a context manager and a decorator.

    `faults` are what goes wrong inside, and when: `Kill`, `Drop`, `Delay`, `Corrupt` and `FullDisk`
    of `shardwise.testing`. With a list, also an empty one, `num_moments` counts the moments.

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
        stack = contextlib.ExitStack()
        stack.enter_context(fresh_c10d())
        world = stack.enter_context(_simulated_world(self.world_size))
        if self._faults is not None:
            self._injector = world.faults = FaultInjector(self._faults, self.world_size)
        self._entered.append(stack)
        return self

    @property
    def num_moments(self) -> int:
        """How many moments the world has seen at which a fault may come; 0 without `faults`."""
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
def _simulated_world(world_size: int) -> Iterator[World]:
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            _BACKEND, _make_group, extended_api=True, devices=["cpu", "cuda"]
        )
    dist.init_process_group(_BACKEND, store=HashStore(), rank=0, world_size=world_size)
    world = enter_world(dist.GroupMember.WORLD, simulated=True)
    try:
        yield world
    finally:
        leave_world(world)


def _make_group(options: Any, backend_options: Any) -> Any:
    return SimulatedGroup(options.group_rank, options.group_size, options.group_id)
