"""What torch leaves undefined or gets wrong on one device: there is nothing to compare with.

A program is compared up to the step at which one of these is found, and counted as `undefined`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from shardwise._torch.autograd import current_node
from shardwise._torch.dispatch import TorchDispatchMode
from shardwise._torch.functions import tree_leaves, tree_map
from shardwise.testing.cases import repeats_memory
from shardwise.testing.compare import difference, tolerance
from shardwise.testing.fuzz.hand import MOST
from shardwise.testing.fuzz.program import Item, OneDevice, Program, Statement, WorldState

aten = torch.ops.aten

OVERLAP = "overlapping write"
MEDIAN = "median of equal values"
ZERO_TENSOR = "gradient that is a ZeroTensor"
BIAS_ALONE = "second backward of a norm with a bias alone"
SHARED_RESULT = "new tensor whose entries share memory"
EMPTY_VIEW = "gradient through a view without entries of a written tensor"
SHARED_VIEW = "gradient through a view of a written tensor whose entries share memory"
SHARED_GRADIENT = "write to a gradient that leaves share"
ROUNDING = "rounding"

#: Every reason not to compare, and why it is one.
REASONS = {
    OVERLAP: "an op writes to memory that it also reads at other indices: the result depends on "
    "the order in which a kernel goes through memory",
    MEDIAN: "torch does not say which index it returns, and along an expanded dim its kernel "
    "reads uninitialized memory",
    ZERO_TENSOR: "the gradient of sgn is a ZeroTensor: one device cannot add the gradient of a "
    "second backward to it, and a 0-dim one times a float has another dtype",
    BIAS_ALONE: "the gradient of batch norm's bias depends on the gradient of its result, and "
    "torch's formula leaves that out where there is no weight",
    SHARED_RESULT: "select_scatter and similar ops keep the strides of a view by unfold, so a "
    "write to one entry shows in others too, and a later write acts on one location several times",
    EMPTY_VIEW: "torch recreates a view of a written tensor by strides, and if the view is empty, "
    "that gradient is zeros without a graph; the gradient of the view itself has a graph",
    SHARED_VIEW: "torch recreates a view of a written tensor by strides, and spreads its gradient "
    "evenly over all entries that share a memory location, whichever of them the view has",
    SHARED_GRADIENT: "the gradients of leaves of one sum may share memory, and what a second "
    "backward adds to one of them is added to the others",
    ROUNDING: "one device gives another number when rounding errors are added, and with leaves in "
    "float64 both worlds agree",
}
_MEDIANS = frozenset({aten.median.dim, aten.nanmedian.dim})
_SCATTERS = {aten.diagonal_scatter, aten.select_scatter, aten.slice_scatter}
_SCATTERS |= {aten.as_strided_scatter}
#: These read the entries of their source one after another, whichever they write to.
_BY_COUNT = frozenset({aten.masked_scatter_.default, aten.put_.default})
_NORM_BACKWARD = aten.native_batch_norm_backward.default


class UndefinedMode(TorchDispatchMode):
    """Finds the first reason while ops run on one device."""

    found: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.found is None:
            if _overlaps(func, args, kwargs):
                self.found = OVERLAP
            elif func in _MEDIANS and _has_equal(*args[:2]):
                self.found = MEDIAN
            elif func is _NORM_BACKWARD and args[2] is None and args[-1][2]:
                # With a graph of backward, its formula may be used later.
                self.found = BIAS_ALONE if torch.is_grad_enabled() else None
            elif func is aten.zeros.default and torch.is_grad_enabled() and _in_view_again(True):
                self.found = EMPTY_VIEW
            elif func is aten.div_.Tensor and _in_view_again(False) and (args[1] > 1).any():
                self.found = SHARED_VIEW  # a sum over entries, by how many there are
        result = _run(func, args, kwargs)
        if self.found is None and func.overloadpacket in _SCATTERS and repeats_memory(result):
            self.found = SHARED_RESULT
        return result


def _in_view_again(empty: bool) -> bool:
    """Whether the gradient of a view by strides is being made, which has no entries or some."""
    node: Any = current_node()
    is_view = node is not None and node.name() == "AsStridedBackward0"
    return is_view and (0 in node._saved_size) == empty


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The op. Inside a mode, torch reads the memory of a ZeroTensor that meets a number."""
    if func._schema.overload_name == "Scalar":
        args, kwargs = tree_map(_with_memory, (args, kwargs))
    return func(*args, **kwargs)


def _with_memory(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype)
    return x


def undefined_error(error: Exception, code: str) -> str | None:
    """The reason why one device raises where it should not."""
    texts = ("ZeroTensors are immutable", "has changed the type of value")
    known = "backward(" in code and any(text in str(error) for text in texts)
    return ZERO_TENSOR if known else None


class SharedGradients:
    """The gradients of leaves that are one place in memory on one device."""

    def __init__(self, slots: Iterable[Any]) -> None:
        grads = [grad for grad in map(grad_of, slots) if _has_memory(grad) and not grad.is_sparse]
        shared = [x for x in grads if any(x is not y and _share_memory(x, y) for y in grads)]
        self._before = [(grad, grad.clone()) for grad in shared]

    @property
    def changed(self) -> bool:
        return any(not torch.equal(grad, value) for grad, value in self._before)


def _overlaps(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    written: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for argument, value in _named(op, args, kwargs):
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        writes = argument.alias_info is not None and argument.alias_info.is_write
        (written if writes else read).extend(tensors)
    in_order = op not in _BY_COUNT
    return any(_share_memory(x, y, but_equal=in_order) for x in written for y in read)


def _named(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for number, argument in enumerate(op._schema.arguments):
        if number < len(args):
            yield argument, args[number]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _share_memory(x: torch.Tensor, y: torch.Tensor, *, but_equal: bool = False) -> bool:
    """Whether entries share memory; with `but_equal`, not if each shares its own place alone."""
    if x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    ours, theirs = _addresses(x), _addresses(y)
    return not (but_equal and ours == theirs) and not set(ours).isdisjoint(theirs)


def _addresses(x: torch.Tensor) -> list[int]:
    end = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    places = torch.arange(max(end, 0)).as_strided(x.shape, x.stride()).flatten()
    return [x.data_ptr() + place * x.itemsize for place in places.tolist()]


def _has_equal(x: torch.Tensor, dim: int) -> bool:
    if not x.dim():
        return False
    ordered = x.sort(dim)[0]
    return bool((ordered.diff(dim=dim) == 0).any())


# -- rounding: which programs depend on the last bit --------------------------------------------

#: The largest number that a program may hold.
LARGEST = 100.0
#: The share of the tolerance that rounding errors may reach on one device.
SHARE = 0.1


class Kinks(TorchDispatchMode):
    """Finds ops whose bools or integers depend on whether a float is zero or next to it.

    The place of the largest entry, and the order of entries, depend on rounding where two are next
    to each other.

    A cancellation that is exact in one order of the terms is not in another. Then a comparison, a
    logical op, `nonzero` or a cast gives another result, and a draw takes more numbers from the
    generator or fewer. Leaves hold nothing next to zero. So does an op that rounds, next to any
    number at which its result jumps.
    """

    found = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        moved = []
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        given = [] if self.found else _tensors((args, kwargs))
        if any(_next_to_zero(x).any() for x in given):
            # Before the op runs, which may write to them.
            moved = [tree_map(_with_zeros(sign), (args, kwargs)) for sign in (1, 0, -1)]
        places, jumps = func.overloadpacket in _PLACES, func.overloadpacket in _JUMPS
        compares = func.overloadpacket in _COMPARES and len(given) > 1
        if (places or jumps or compares) and not self.found:
            moved += [tree_map(_rounded(seed, apart=compares), (args, kwargs)) for seed in _SEEDS]
        if compares and not self.found:
            self.found = _meet(*given[:2])
        before = torch.get_rng_state()
        result = _run(func, args, kwargs)
        if drawn:
            self.found |= not all(_draws_alike(func, near, before) for near in moved)
            return result
        made = _tensors(result)
        if compares and not made:  # torch.equal
            self.found |= any(_run(func, *near) != result for near in moved)
        if jumps:
            for near in moved:
                again = _tensors(_run(func, *near))
                self.found |= any(map(_is_far, made, again))
            return result
        whole = _whole_numbers(made)
        if whole and (places or len(whole) == len(made)):
            for near in moved:
                again = _whole_numbers(_tensors(_run(func, *near)))
                self.found |= not all(map(torch.equal, whole, again))
        return result


def _draws_alike(func: Any, near: Any, before: torch.Tensor) -> bool:
    """Whether a draw with these arguments leaves the generator in the state that it is in."""
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    _run(func, *near)
    found = torch.get_rng_state()
    torch.set_rng_state(after)
    return torch.equal(found, after)


def _tensors(values: Any) -> list[torch.Tensor]:
    return list(filter(_has_memory, tree_leaves(values)))


def _has_memory(x: Any) -> bool:
    """Whether `x` is a tensor with readable memory: no ZeroTensor of backward, no meta tensor."""
    return isinstance(x, torch.Tensor) and not x._is_zerotensor() and not x.is_meta


def _whole_numbers(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x for x in tensors if not (x.is_floating_point() or x.is_complex())]


def _is_far(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two results differ by more than rounding errors make of a smooth function."""
    return bool(((x.double() - y.double()).abs() > 0.01).any())


def _next_to_zero(x: torch.Tensor) -> torch.Tensor:
    """Where `x` is as small as what cancellation leaves of a program's numbers."""
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros(())
    return x.abs() <= 16 * torch.finfo(x.dtype).eps


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether rounding errors may make entries of two tensors equal, or no longer equal."""
    if x.untyped_storage()._cdata == y.untyped_storage()._cdata:
        return False
    if not (x.is_floating_point() and y.is_floating_point()):
        return False
    eps = max(torch.finfo(t.dtype).eps for t in (x, y))
    x, y = x.double(), y.double()
    return bool(((x - y).abs() <= 8 * eps * torch.maximum(x.abs(), y.abs())).any())


#: Ops that return places of entries; some return the entries too.
_PLACES = {aten.argmax, aten.argmin, aten.max, aten.min, aten.cummax, aten.cummin}
_PLACES |= {aten.sort, aten.argsort, aten.topk, aten.kthvalue, aten.mode}
#: Ops that round to whole numbers, and what is left then.
_JUMPS = {aten.ceil, aten.floor, aten.round, aten.trunc, aten.frac}
_JUMPS |= {aten.ceil_, aten.floor_, aten.round_, aten.trunc_, aten.frac_}
_JUMPS |= {aten.floor_divide, aten.floor_divide_, aten.remainder, aten.remainder_}
_JUMPS |= {aten.fmod, aten.fmod_}
#: Ops that compare two tensors, which may be equal by chance, such as two kinds of mean.
_COMPARES = {aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.equal, aten.isclose}
_SEEDS = (1, -1, 2, -2, 3, -3, 4, -4)


def _rounded(seed: int, *, apart: bool = False) -> Callable[[Any], Any]:
    """Copies tensors; floats get rounding errors of some units in the last place.

    Those of `seed` and `-seed` are opposite: entries that are equal change places with one of them.
    Entries that are one place in memory stay equal. With `apart`, tensors in different memory get
    errors of their own.
    """
    storages: list[int] = []

    def copied(x: Any) -> Any:
        if not _has_memory(x) or not x.is_floating_point():
            return x
        storages.append(x.untyped_storage()._cdata)
        number = storages.index(storages[-1]) if apart else 0
        generator = torch.Generator().manual_seed(abs(seed) + 100 * number)
        sizes = [size if step else 1 for size, step in zip(x.shape, x.stride(), strict=True)]
        noise = torch.rand(sizes, generator=generator, dtype=torch.float64) - 0.5
        step = math.copysign(8 * torch.finfo(x.dtype).eps, seed)
        return (x.double() * (1 + step * noise)).to(x.dtype)

    return copied


def _with_zeros(sign: int) -> Callable[[Any], Any]:
    """Copies tensors; what is next to zero becomes zero, or the tiniest number of a sign."""

    def copied(x: Any) -> Any:
        if not _has_memory(x):
            return x
        there = _next_to_zero(x)
        return torch.where(there, sign * torch.finfo(x.dtype).tiny, x) if there.any() else x.clone()

    return copied


def hangs_on_rounding(program: Program, slot: str) -> bool:
    """Whether rounding errors, in one of several draws, change `slot` (`v2` or `v2.grad`)."""
    name, grad = slot.removesuffix(".grad"), slot.endswith(".grad")
    for draw in range(1, 9):
        exact, noisy = _both(program, draw)
        values = [run.slots().get(name) for run in (noisy, exact)]
        found, expected = map(grad_of, values) if grad else values
        if difference(found, expected, tolerance(exact.slots().values(), exact.casts)):
            return True
    return False


def steady(program: Program) -> bool:
    """Whether rounding errors leave the program's result on one device as it is."""
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
    """Whether two runs hold the same values, up to a share of the tolerance."""
    slots, others = exact.slots(), noisy.slots()
    allowed = tolerance(slots.values(), exact.casts) * SHARE
    try:
        for name, value in slots.items():
            pairs = ((others[name], value), (grad_of(others[name]), grad_of(value)))
            if any(not bounded(ours) or difference(other, ours, allowed) for other, ours in pairs):
                return False
    except RuntimeError:  # torch may forbid reading one of several views after a write
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
    """Add rounding errors to results of the item that own their memory.

    They are relative to the largest entry, since cancellation may leave such an error in any entry,
    and pull towards zero: an entry next to zero changes its sign. Every other draw pushes away from
    it: an entry below a whole number passes it. A zero gets the sign that it does not have in
    `exact`.
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
        data = value.data  # autograd does not count this write
        with contextlib.suppress(RuntimeError):  # entries that share memory are left alone
            wide = data.to(_WIDE[data.is_complex()])
            error = 2 * eps * noise * wide.sgn() * wide.abs().amax()
            rounded = wide + error if draw and draw % 2 == 0 else wide - error
            data.copy_(torch.where((data == 0) & (other == 0), -other, rounded))


_WIDE = (torch.float64, torch.complex128)


def grad_of(value: Any) -> Any:
    """The accumulated gradient of a slot, or None."""
    if not isinstance(value, torch.Tensor) or not (value.is_leaf or value.retains_grad):
        return None
    return value.grad
