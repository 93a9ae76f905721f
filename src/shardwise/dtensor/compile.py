"""DTensors under torch.compile and torch.export: flattening, conversions as ops, views.

torch.compile cannot trace the construction of a tensor subclass, but records an op as it is. So
while a region is traced, `from_local`, the factories and `distribute_tensor` are ops of
`torch.ops.shardwise`. Ops take ints and strings, so placements and meshes are encoded. torch.export
records ops on DTensors and must know where each local tensor came from: there `redistribute` and
`to_local` are ops too.

Note [Part names]
In a simulated world a DTensor is flattened to the parts of its LocalTensor, which halves the sizes
that the compiler has to track. Their names carry the number of parts, `_part0of2`: torch describes
a parameter and its `.grad` by one set of names if one set contains the other, but a Partial
gradient has more parts than a replicated parameter.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise._torch.dispatch import (
    TorchDispatchMode,
    is_function_mode_enabled,
    return_and_correct_aliasing,
    without_torch_function,
)
from shardwise._torch.functions import share_symbols
from shardwise.core.encode import decode_mesh, decode_placements, source_digest
from shardwise.core.layout import Layout, make_layout
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.placements import Placement, Shard
from shardwise.core.sizes import splits_evenly, statically_equal
from shardwise.core.world import world_caches
from shardwise.simulation.ranks import from_parts, parts_of, rank_values, roster_of
from shardwise.simulation.roster import Roster

#: How many layouts a context remembers.
_MAX_KNOWN = 64


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FlatContext:
    """What a compiled graph knows about a DTensor besides its plain tensors and the sizes.

    Sizes are separate, so that a new batch size needs no new graph. Contexts are interned: guards
    compare two for each input of each call, and comparing identity needs no Python.
    """

    grid: Grid
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    #: Which rank holds which part; None in a real process.
    roster: Roster | None
    #: Layouts by shape and stride; every run of compiled code looks up those of its outputs.
    known: dict[Any, Layout] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> FlatContext:
        return self  # interned

    def __reduce__(self) -> Any:
        return make_context, (self.grid, self.placements, self.order, self.dtype, self.roster)

    def layout(self, shape: Any, stride: Any) -> Layout:
        try:
            found = self.known.get((shape, stride))
        except TypeError:  # a symbolic int has no hash
            return self._made(shape, stride)
        if found is None:
            if len(self.known) >= _MAX_KNOWN:
                self.known.clear()
            found = self.known[shape, stride] = self._made(shape, stride)
        return found

    def _made(self, shape: Any, stride: Any) -> Layout:
        return make_layout(self.grid, self.placements, shape, stride, self.dtype, self.order)

    def restored(
        self, inner: dict[str, torch.Tensor], shape: Any, stride: Any
    ) -> tuple[torch.Tensor, Layout]:
        """The local tensor, assembled from its parts, and its layout."""
        local = from_parts(tuple(inner.values()), self.roster)
        layout = self.layout(shape, stride)
        if layout.symbolic and _ties_sizes(local, layout):
            layout = self.layout(shape, stride)
        return local, layout


_interned: weakref.WeakValueDictionary[Any, FlatContext] = weakref.WeakValueDictionary()


def make_context(
    grid: Grid,
    placements: tuple[Placement, ...],
    order: tuple[int, ...],
    dtype: torch.dtype,
    roster: Roster | None,
) -> FlatContext:
    """The one context with these values."""
    key = (grid, placements, order, dtype, roster)
    try:
        found = _interned.get(key)
    except TypeError:  # a placement with symbolic sizes has no hash
        return FlatContext(*key)
    return _interned.setdefault(key, FlatContext(*key)) if found is None else found


def _ties_sizes(local: torch.Tensor, layout: Layout) -> bool:
    """Tell the compiler what concrete shard sizes imply for symbolic global sizes; whether any did.

    A shard of size 0 or 1 has no symbol, and explicit sizes are ints. The compiler must know this
    before the first op: torch loses the size of an output that becomes constant later.
    """
    tied = False
    for placement in layout.placements:
        if isinstance(placement, Shard) and placement.sizes is not None:
            size = layout.shape[placement.dim]
            tied = (type(size) is not int and bool(size == sum(placement.sizes))) or tied
    values = rank_values(layout.grid, local)
    for dim in range(layout.ndim):
        sizes = [part.shape[dim] for _, part in values]
        tied = _ties_dim(layout, dim, [coordinate for coordinate, _ in values], sizes) or tied
    return tied


def _ties_dim(
    layout: Layout, dim: int, coordinates: Sequence[Coordinate], shard_sizes: Sequence[Any]
) -> bool:
    """If the shards of all ranks have one size, the global size is a multiple of it.

    Without this fact, later sizes would be computed from both symbols, and compared. If shards have
    separate symbols, one graph may serve even and uneven sizes.
    """
    size, first = layout.shape[dim], shard_sizes[0]
    num_shards = math.prod(layout.grid.shape[axis] for axis in layout.axes_of(dim))
    # A process knows only its own shard.
    alike = len(shard_sizes) > 1 or (type(first) is int and splits_evenly(size, num_shards))
    alike = alike and all(statically_equal(first, other) for other in shard_sizes)
    if type(size) is not int and num_shards > 1 and alike:
        return bool(size == num_shards * first)
    tied = False
    for coordinate, found in zip(coordinates, shard_sizes, strict=True):
        if (type(size) is int) != (type(found) is int):
            tied = bool(layout.local_shape(coordinate)[dim] == found) or tied
    return tied


#: The attribute that holds the plain tensor of a DTensor in a real process.
LOCAL = ["_local"]
#: How a DTensor in a real process is flattened, by layout: names and context. Emptied when full,
#: and with the world.
plain_parts: dict[Layout, tuple[list[str], FlatContext]] = {}


def flattened(x: Any) -> tuple[list[str], FlatContext]:
    """The names of a DTensor's attributes that hold plain tensors, and the rest as a context."""
    local, layout = x._local, x._layout
    if layout.symbolic:
        share_symbols(torch.Tensor.size(x))
    roster = roster_of(local)
    if roster is None:
        return plain_parts.get(layout) or _plain(layout)
    cls: Any = type(x)
    return part_names(roster.num_parts, cls), context_of(layout, roster)


def _plain(layout: Layout) -> tuple[list[str], FlatContext]:
    parts = LOCAL, _context(layout, None)
    if not layout.symbolic:
        if len(plain_parts) >= _MAX_CONTEXTS:
            plain_parts.clear()
        plain_parts[layout] = parts
    return parts


def context_of(layout: Layout, roster: Roster | None) -> FlatContext:
    return (_context if layout.symbolic else _cached_context)(layout, roster)


def _context(layout: Layout, roster: Roster | None) -> FlatContext:
    return make_context(layout.grid, layout.placements, layout.order, layout.dtype, roster)


_MAX_CONTEXTS = 4096
_cached_context = functools.lru_cache(maxsize=_MAX_CONTEXTS)(_context)
world_caches += [_cached_context.cache_clear, plain_parts.clear]


@functools.cache
def part_names(num_parts: int, cls: Any, held: str = "_local", prefix: str = "_part") -> list[str]:
    """See Note [Part names]. Defines a property of `cls` for each part of the attribute `held`.

    A class with `__getattr__` would need none, but torch.compile cannot read its other attributes.
    """
    names = [f"{prefix}{number}of{num_parts}" for number in range(num_parts)]
    for number, name in enumerate(names):
        setattr(cls, name, _part(number, held))
    return names


def _part(number: int, held: str) -> property:
    def read(x: Any) -> torch.Tensor:
        return parts_of(getattr(x, held))[number]

    def write(x: Any, part: torch.Tensor) -> None:
        """torch replaces a gradient's part by a copy if its strides are not those expected."""
        local = getattr(x, held)
        parts = list(parts_of(local))
        parts[number] = part
        setattr(x, held, from_parts(parts, roster_of(local)))

    return property(read, write)


def stable_hash(local: Any, layout: Layout, requires_grad: bool) -> str:
    """The key of a DTensor, and of this package's code, in torch's compile caches."""
    roster = roster_of(local)
    return repr(
        (
            [str(s) for s in layout.shape],
            [str(s) for s in layout.stride],
            layout.dtype,
            layout.placements,
            layout.order,
            layout.grid.shape,
            layout.grid.submeshes,
            layout.grid.world.rank,
            requires_grad,
            [tuple(map(str, part.shape)) for part in parts_of(local)],
            (roster.ranks, roster.index) if roster else None,
            source_digest(),
        )
    )


# -- conversions and factories as ops --------------------------------------------------------

_library = torch.library.Library("shardwise", "FRAGMENT")
#: How the arguments of these names are decoded.
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "mesh": decode_mesh,
    "placements": decode_placements,
    "grad_placements": decode_placements,
}


def define(schema: str, fn: Callable[..., Any]) -> None:
    """Define an op of `torch.ops.shardwise`: `fn`, called by keyword with the decoded arguments.

    It is hidden from torch.export, which knows no tensor that is made inside.
    """
    _library.define(schema)
    name = schema.partition("(")[0]
    names = [a.name for a in getattr(torch.ops.shardwise, name).default._schema.arguments]

    def run(*args: Any) -> Any:
        given = zip(names, args, strict=True)
        with without_torch_function():
            return fn(**{name: _DECODERS.get(name, _as_it_is)(value) for name, value in given})

    _library.impl(name, run, "CompositeImplicitAutograd")


def _as_it_is(value: Any) -> Any:
    return value


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the program."""
    return torch.compiler.is_dynamo_compiling() or is_exported()


def is_exported() -> bool:
    """Whether torch.export traces the program; not so inside our ops."""
    return torch.compiler.is_exporting() and is_function_mode_enabled()


def is_traceable(requires_grad: bool, generator: torch.Generator | None = None) -> bool:
    """Whether the program is traced and such a factory call can be traced.

    As with plain tensors, neither leaves that require grad nor generators can.
    """
    return is_traced() and not requires_grad and generator is None


# -- views that enter a compiled region ------------------------------------------------------
#
# torch.compile replays a view on a fake of its base. Numbers of the view, such as the start of a
# slice, become symbols that belong to no input, and a rule that compares one leaves a guard that
# torch cannot express. But a view of a DTensor has parts and a layout like any DTensor. So it is
# assembled from fakes of its parts, and declared a view of the base.

#: The last DTensor that was assembled from parts: torch makes the fake of a view just before it
#: replays the view.
_last: weakref.ref[Any] | None = None


def remember(x: Any) -> None:
    global _last
    _last = weakref.ref(x)


class _Returned(TorchDispatchMode):
    """A mode in which every view op returns `result`."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self._result = result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        # It must share the base's storage: torch finds overlapping inputs by storage.
        return return_and_correct_aliasing(func, args, kwargs or {}, self._result)


def replayed(
    view: Any,
    base: torch.Tensor,
    fake: Callable[[torch.Tensor], torch.Tensor],
    wrap: Callable[[torch.Tensor, Layout], Any],
) -> torch.Tensor:
    """`view`, with fakes of its parts, as a view of `base`."""
    local = view._local
    parts = [fake(part) for part in parts_of(local)]
    result = wrap(from_parts(parts, roster_of(local)), _traced_layout(view, parts))
    with _Returned(result):
        return torch.ops.aten.alias.default(base)


def _traced_layout(view: Any, parts: list[torch.Tensor]) -> Layout:
    """The layout with the sizes that the compiler gave to the fake of `view`."""
    made = _last() if _last is not None else None
    if made is not None:
        theirs = parts_of(made._local)
        if len(theirs) == len(parts) and all(map(operator.is_, theirs, parts)):
            return made._layout
    return view._layout
