"""Rounding errors added to one device's run: which programs hang on the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.dispatch import TorchDispatchMode
from shardwise._torch.pytree import tree_leaves, tree_map
from shardwise.testing.fuzz.compare import difference, grad_of, tolerance
from shardwise.testing.fuzz.hand import MOST
from shardwise.testing.fuzz.program import Item, Program, Statement
from shardwise.testing.fuzz.run import WorldState
from shardwise.testing.fuzz.worlds import OneDevice

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
