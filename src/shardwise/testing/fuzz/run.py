"""A program run in one world, statement by statement."""

from __future__ import annotations

import contextlib
import copy
import math
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardwise._torch.dispatch import TorchDispatchMode
from shardwise._torch.pytree import tree_leaves, tree_map
from shardwise.core.placements import Partial, Replicate, Shard
from shardwise.testing.fuzz.compare import difference, grad_of, tolerance
from shardwise.testing.fuzz.hand import MOST
from shardwise.testing.fuzz.program import Item, Program, Statement, compiled
from shardwise.testing.fuzz.worlds import OneDevice

_NAMES = {
    "torch": torch,
    "F": F,
    "math": math,
    "copy": copy,
    "checkpoint": checkpoint,
    "Shard": Shard,
    "Replicate": Replicate,
    "Partial": Partial,
}
_CAST = re.compile(r'autocast\("cpu", torch\.(\w+)\)')


def execute(code: str, scope: dict[str, Any]) -> None:
    """WorldState a statement. An error keeps no frame alive.

    A context that waits in a frame for its end goes on until the frame is gone: `checkpoint` of a
    function that raises would, in torch 2.11, recompute it in the backward of later programs.
    """
    try:
        exec(compiled(code), scope)
    except Exception as error:
        traceback.clear_frames(error.__traceback__)
        raise


@dataclass
class WorldState:
    """What a world holds after some items: the slots, and the generator of its own."""

    world: OneDevice
    seed: int
    scope: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    #: How many items ran; with an error, the number of the one that raised.
    done: int = 0
    #: What ops have run under autocast to.
    casts: set[torch.dtype] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scope = dict(_NAMES) | {"w": self.world}
        self.rng = torch.Generator().manual_seed(self.seed).get_state()

    def execute(self, item: Item) -> None:
        """WorldState one item; what it raises is what one would see."""
        torch.set_rng_state(self.rng)
        try:
            execute(item.code, self.scope)
        finally:
            self.rng = torch.get_rng_state()
        self._look()
        self.casts.update(getattr(torch, name) for name in _CAST.findall(item.code))
        self.done += 1

    def _look(self) -> None:
        """Ask each value whether it is a leaf, so that no later step depends on who has asked.

        Until somebody asks, torch takes a view whose base was written to for a leaf, and refuses
        to write to it.
        """
        for value in self.slots().values():
            if isinstance(value, torch.Tensor):
                with contextlib.suppress(Exception):  # one of several views is not to be read
                    _ = value.is_leaf

    def slots(self) -> dict[str, Any]:
        """The values by name, in the order in which they were made."""
        return {name: v for name, v in self.scope.items() if name[0] == "v" and name[1:].isdigit()}


def run(program: Program, world: OneDevice) -> WorldState:
    """WorldState until the end or an error."""
    state = WorldState(world, program.seed)
    for item in program.items:
        try:
            state.execute(item)
        except Exception as error:
            state.error = error
            break
    return state


# Rounding errors added to one device's run: which programs hang on the last bit.

#: The largest number that a program may hold.
LARGEST = 100.0
#: The part of the tolerance that rounding errors may reach on one device.
SHARE = 0.1


class Kinks(TorchDispatchMode):
    """Notes whether an op makes bools or integers that hang on a float being zero or next to it.

    A cancellation that is exact in one order of the terms is not in another. Then a comparison, a
    logical op, `nonzero` or a cast gives another result. Leaves hold nothing next to zero.
    """

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        moved = []
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        given = [] if self.found or drawn else _tensors((args, kwargs))
        if any(_next_to_zero(x).any() for x in given):
            # Before the op runs, which may write to them.
            moved = [tree_map(_with_zeros(sign), (args, kwargs)) for sign in (1, 0, -1)]
        result = func(*args, **kwargs)
        made = _tensors(result)
        if made and not any(x.is_floating_point() or x.is_complex() for x in made):
            for near in moved:
                again = _tensors(func(*near[0], **near[1]))
                self.found |= not all(map(torch.equal, made, again))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return list(filter(_has_memory, tree_leaves(values)))


def _has_memory(x: Any) -> bool:
    """Whether `x` is a tensor that can be read.

    A ZeroTensor, which backward makes, can not, nor what torch infers its shape with.
    """
    return isinstance(x, torch.Tensor) and not x._is_zerotensor() and not x.is_meta


def _next_to_zero(x: torch.Tensor) -> torch.Tensor:
    """Where `x` is what cancellation may leave of numbers as large as those of a program."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros(())
    return x.abs() <= 16 * torch.finfo(x.dtype).eps


def _with_zeros(sign: int) -> Callable[[Any], Any]:
    """Copies tensors; what is next to zero becomes zero, or the number next to it on one side."""

    def copied(x: Any) -> Any:
        if not _has_memory(x):
            return x
        there = _next_to_zero(x)
        return torch.where(there, sign * torch.finfo(x.dtype).tiny, x) if there.any() else x.clone()

    return copied


def hangs_on_rounding(program: Program, slot: str) -> bool:
    """Whether rounding errors, of several draws, change `slot` on one device: `v2` or `v2.grad`."""
    name, grad = slot.removesuffix(".grad"), slot.endswith(".grad")
    for draw in range(1, 9):
        exact, noisy = _both(program, draw)
        values = [run.slots().get(name) for run in (noisy, exact)]
        found, expected = map(grad_of, values) if grad else values
        if difference(found, expected, tolerance(exact.slots().values(), exact.casts)):
            return True
    return False


def steady(program: Program) -> bool:
    """Whether the program gives the same on one device in spite of rounding errors."""
    kinks = Kinks()
    exact, noisy = _both(program, kinks=kinks)
    return not kinks.found and exact.done == noisy.done and alike(exact, noisy)


def _both(program: Program, draw: int = 0, kinks: Any = None) -> tuple[WorldState, WorldState]:
    """The program without and with rounding errors, the latter watched by `kinks`."""
    exact, noisy = WorldState(OneDevice(), program.seed), WorldState(OneDevice(), program.seed)
    with contextlib.suppress(Exception):
        for item in program.items:
            exact.execute(item)
            with kinks or contextlib.nullcontext():
                noisy.execute(item)
            disturb(noisy, item, exact, draw)
    return exact, noisy


def alike(exact: WorldState, noisy: WorldState) -> bool:
    """Whether two runs hold the same, up to a share of the tolerance."""
    slots, others = exact.slots(), noisy.slots()
    allowed = tolerance(slots.values(), exact.casts) * SHARE
    try:
        for name, value in slots.items():
            pairs = ((others[name], value), (grad_of(others[name]), grad_of(value)))
            if any(not bounded(ours) or difference(other, ours, allowed) for other, ours in pairs):
                return False
    except RuntimeError:  # one of several views of a tensor that was written to is not to be read
        return False
    return True


def bounded(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return True
    if value.numel() > 2 * MOST or value.dim() > 5:
        return False
    value = value.detach()
    if value.is_floating_point() or value.is_complex():
        size = value.abs()
        return bool((size <= LARGEST).all())
    return value.dtype is torch.bool or bool((value.abs() <= LARGEST).all())


def disturb(state: WorldState, item: Item, exact: WorldState, draw: int = 0) -> None:
    """Add rounding errors to what the item has made, where it holds memory of its own.

    They are of the size of the largest entry, which cancellation may leave in any, and pull towards
    zero: an entry that is next to zero comes to its other side. A zero gets the sign that it does
    not have in `exact`.
    """
    if not isinstance(item, Statement):
        return
    slots, others = state.slots(), exact.slots()
    taken = {
        v.untyped_storage()._cdata
        for name, v in slots.items()
        if name not in item.makes and isinstance(v, torch.Tensor)
    }
    for name in item.makes:
        value = slots[name]
        if not isinstance(value, torch.Tensor) or value.untyped_storage()._cdata in taken:
            continue
        if not (value.is_floating_point() or value.is_complex()) or not value.numel():
            continue
        if 0 in value.stride():
            continue
        generator = torch.Generator().manual_seed(value.numel() + draw)
        noise = torch.rand(value.shape, generator=generator, dtype=torch.float64)
        eps = torch.finfo(value.dtype).eps
        other = others[name].detach()
        data = value.data  # whose version autograd does not watch
        with contextlib.suppress(RuntimeError):  # entries that share memory are left alone
            wide = data.to(_WIDE[data.is_complex()])
            rounded = wide - 2 * eps * noise * wide.sgn() * wide.abs().amax()
            data.copy_(torch.where((data == 0) & (other == 0), -other, rounded))


_WIDE = (torch.float64, torch.complex128)
