"""How torch.compile takes a DTensor apart: plain tensors, and a value that says what they are.

Note [Part names]
In a simulated world a DTensor is taken apart down to the parts of its LocalTensor, which halves the
sizes that the compiler has to track. The names of the parts carry their number, `_part0of2`: torch
describes a parameter and its `.grad` by one set of names when the names of one are all among those
of the other, but a gradient that is Partial has more parts than a replicated parameter.
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
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.dispatch import (
    TorchDispatchMode,
    is_function_mode_enabled,
    return_and_correct_aliasing,
    without_torch_function,
)
from shardwise.core.code_version import source_digest
from shardwise.core.encode import decode_mesh, decode_placements, encode_mesh, encode_placements
from shardwise.core.layout import Layout, make_layout
from shardwise.core.mesh import Coordinate, Grid, current_mesh
from shardwise.core.placements import Placement, Shard
from shardwise.core.sizes import splits_evenly, surely_equal
from shardwise.core.world import world_caches
from shardwise.errors import ArgumentError, UnsupportedError
from shardwise.simulation.parts import from_parts, parts_of, roster_of
from shardwise.simulation.ranks import rank_values
from shardwise.simulation.roster import Roster

#: How many layouts a context remembers.
_MAX_KNOWN = 64


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class FlatContext:
    """What a compiled graph knows of a DTensor besides its tensors: all but the sizes.

    Sizes come separately, so that a new batch size does not mean a new graph. Equal ones are one
    object: guards compare two of these for each input of each call, and identity needs no Python.
    """

    grid: Grid
    placements: tuple[Placement, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    #: Which rank holds which part; None in a real process.
    roster: Roster | None
    #: Layouts by shape and stride: every run of compiled code asks for those of its outputs.
    known: dict[Any, Layout] = field(default_factory=dict, repr=False)

    def __deepcopy__(self, memo: Any) -> FlatContext:
        return self  # one object per value

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
        """The local tensor out of its parts, and its layout."""
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
    except TypeError:  # a placement that remembers a symbolic size has no hash
        return FlatContext(*key)
    return _interned.setdefault(key, FlatContext(*key)) if found is None else found


def _ties_sizes(local: torch.Tensor, layout: Layout) -> bool:
    """Tell the compiler what pieces of known size say about a symbolic whole; whether they did.

    A piece of size 0 or 1 has no symbol, and explicit sizes are numbers. What follows for the whole
    must be known before the first op: torch loses the size of an output that turns out to be
    constant later on.
    """
    tied = False
    for placement in layout.placements:
        if isinstance(placement, Shard) and placement.sizes is not None:
            size = layout.shape[placement.dim]
            tied = (type(size) is not int and bool(size == sum(placement.sizes))) or tied
    values = rank_values(layout.grid, local)
    for dim in range(layout.ndim):
        pieces = [part.shape[dim] for _, part in values]
        tied = _ties_dim(layout, dim, [coordinate for coordinate, _ in values], pieces) or tied
    return tied


def _ties_dim(
    layout: Layout, dim: int, coordinates: Sequence[Coordinate], pieces: Sequence[Any]
) -> bool:
    """Where one symbol stands for the pieces of all ranks, the whole is a multiple of it.

    Otherwise all that follows would be computed with both, and compared. Where pieces have symbols
    of their own, a graph may serve sizes that divide and sizes that do not.
    """
    size, first = layout.shape[dim], pieces[0]
    num_pieces = math.prod(layout.grid.shape[axis] for axis in layout.axes_of(dim))
    # A process knows its own piece only.
    alike = len(pieces) > 1 or (type(first) is int and splits_evenly(size, num_pieces))
    alike = alike and all(surely_equal(first, other) for other in pieces)
    if type(size) is not int and num_pieces > 1 and alike:
        return bool(size == num_pieces * first)
    tied = False
    for coordinate, found in zip(coordinates, pieces, strict=True):
        if (type(size) is int) != (type(found) is int):
            tied = bool(layout.local_shape(coordinate)[dim] == found) or tied
    return tied


#: The names of the tensors of a DTensor in a real process.
LOCAL = ["_local"]
#: What a DTensor in a real process is taken apart into, by layout: names and context. Emptied when
#: full, and with the world.
plain_parts: dict[Layout, tuple[list[str], FlatContext]] = {}


def flattened(x: Any) -> tuple[list[str], FlatContext]:
    """The names of attributes of a DTensor that hold its plain tensors, and all else."""
    local, layout = x._local, x._layout
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
    """See Note [Part names]. Each is a property of `cls` from now on, of the parts of `held`.

    A `__getattr__` would do, but torch.compile does not read other attributes of such a class.
    """
    names = [f"{prefix}{number}of{num_parts}" for number in range(num_parts)]
    for number, name in enumerate(names):
        setattr(cls, name, _part(number, held))
    return names


def _part(number: int, held: str) -> property:
    def read(x: Any) -> torch.Tensor:
        return parts_of(getattr(x, held))[number]

    def write(x: Any, part: torch.Tensor) -> None:
        """torch puts a copy in place of a gradient's part that lies otherwise than it expected."""
        local = getattr(x, held)
        parts = list(parts_of(local))
        parts[number] = part
        setattr(x, held, from_parts(parts, roster_of(local)))

    return property(read, write)


def stable_hash(local: Any, layout: Layout, requires_grad: bool) -> str:
    """What torch's compile caches need to know of a DTensor, and of the code behind it."""
    roster = roster_of(local)
    return repr(
        (
            [str(s) for s in layout.shape],
            [str(s) for s in layout.stride],
            layout.dtype,
            layout.placements,
            layout.order,
            layout.grid.shape,
            layout.grid.ranks,
            layout.grid.world.rank,
            requires_grad,
            [tuple(map(str, part.shape)) for part in parts_of(local)],
            (roster.ranks, roster.index) if roster else None,
            source_digest(),
        )
    )


# Local tensors that become DTensors inside a compiled region, and moves in exported programs.
#
# torch.compile reads the Python of a region and refuses what it cannot read, such as the making
# of a tensor subclass. An op of ours it takes as it is. The arguments of an op are numbers and
# texts, so placements are encoded as numbers and meshes as text.
#
# `torch.export` notes ops on DTensors, not what they do to local tensors, and asks for the origin
# of each local tensor that is read: `redistribute` and `to_local` are ops there too.

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "from_local(Tensor local, str mesh, int[]? placements, SymInt[]? shape, SymInt[]? stride, "
    "int[]? grad_placements) -> Tensor"
)
_library.define(
    "redistribute(Tensor x, int[] placements, int[]? order, ScalarType? forward_dtype, "
    "ScalarType? backward_dtype) -> Tensor"
)
_library.define("to_local(Tensor x, int[]? grad_placements) -> Tensor")
_library.define("from_uneven(Tensor local, str mesh, int[] placements) -> Tensor")


def traced_from_local(
    local: torch.Tensor,
    mesh: str,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> Any:
    """`DTensor.from_local`, as torch.compile reads it."""
    if run_check:
        raise UnsupportedError(
            "from_local(run_check=True) in compiled code: what the ranks hold is compared in "
            "Python. Check outside torch.compile, and leave run_check out inside."
        )
    return torch.ops.shardwise.from_local(
        local,
        mesh,
        encode_placements(placements),
        shape,
        stride,
        encode_placements(grad_placements),
    )


def traced_from_uneven(local: torch.Tensor, mesh: str, placements: Any) -> Any:
    """What `install_from_uneven` was given, as torch.compile reads it."""
    return torch.ops.shardwise.from_uneven(local, mesh, encode_placements(placements))


def install_from_uneven(from_uneven: Callable[[torch.Tensor, Any, list[Placement]], Any]) -> None:
    """Let the op do what this does."""

    def run(local: torch.Tensor, mesh: str, placements: Any) -> Any:
        return from_uneven(local, decode_mesh(mesh), decode_placements(placements) or [])

    _library.impl("from_uneven", unwatched(run), "CompositeImplicitAutograd")


def is_traced() -> bool:
    """Whether a compiler or an exporter notes the calls of the program that runs."""
    return torch.compiler.is_dynamo_compiling() or is_exported()


def is_exported() -> bool:
    """Whether torch.export watches the program: not inside our ops, which it takes as they are."""
    return torch.compiler.is_exporting() and is_function_mode_enabled()


def unwatched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, of which torch.export does not see what it reads: it knows no tensor made in there."""

    def run(*args: Any) -> Any:
        with without_torch_function():
            return fn(*args)

    return run


def exported_redistribute(
    x: torch.Tensor,
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Any:
    """`x.redistribute(...)`, as torch.export notes it."""
    return torch.ops.shardwise.redistribute(
        x, encode_placements(placements), order, forward_dtype, backward_dtype
    )


def exported_to_local(x: torch.Tensor, grad_placements: Sequence[Placement] | None) -> Any:
    """`x.to_local(...)`, as torch.export notes it."""
    return torch.ops.shardwise.to_local(x, encode_placements(grad_placements))


def install(from_local: Any, redistribute: Any, to_local: Any) -> None:
    """Let the ops do what these do."""

    def run(
        local: torch.Tensor, mesh: str, placements: Any, shape: Any, stride: Any, grad: Any
    ) -> Any:
        return from_local(
            local,
            decode_mesh(mesh),
            decode_placements(placements),
            shape=shape,
            stride=stride,
            grad_placements=decode_placements(grad),
        )

    def move(x: Any, placements: Any, order: Any, forward_dtype: Any, backward_dtype: Any) -> Any:
        return redistribute(
            x,
            placements=decode_placements(placements),
            order=order,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )

    def leave(x: Any, grad_placements: Any) -> Any:
        return to_local(x, grad_placements=decode_placements(grad_placements))

    _library.impl("from_local", unwatched(run), "CompositeImplicitAutograd")
    _library.impl("redistribute", unwatched(move), "CompositeImplicitAutograd")
    _library.impl("to_local", unwatched(leave), "CompositeImplicitAutograd")


# How a view of a DTensor enters a compiled region.
#
# torch.compile replays the view on a stand-in for the tensor that it was taken of. Numbers of the
# view, such as where a slice starts, are symbols then that belong to no input, and a rule that
# asks about one of them leaves a guard that torch cannot write down. A view of a DTensor knows
# its parts and its layout: it is put together from stand-ins for those, as a tensor that is no
# view would be, and said to be a view of the other.

#: The last DTensor that was put together from parts: torch makes a stand-in for a view just before
#: it replays the view.
_last: weakref.ref[Any] | None = None


def remember(x: Any) -> None:
    global _last
    _last = weakref.ref(x)


class _Returned(TorchDispatchMode):
    """Any view of a tensor is this one, which is there already."""

    def __init__(self, result: torch.Tensor) -> None:
        super().__init__()
        self._result = result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        # By its memory torch finds out which inputs overlap.
        return return_and_correct_aliasing(func, args, kwargs or {}, self._result)


def replayed(
    view: Any,
    base: torch.Tensor,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
    wrap: Callable[[torch.Tensor, Layout], Any],
) -> torch.Tensor:
    """`view`, of stand-ins for its parts, as a view of `base`."""
    local = view._local
    parts = [stand_in(part) for part in parts_of(local)]
    result = wrap(from_parts(parts, roster_of(local)), _traced_layout(view, parts))
    with _Returned(result):
        return torch.ops.aten.alias.default(base)


def _traced_layout(view: Any, parts: list[torch.Tensor]) -> Layout:
    """The layout with the sizes that the compiler gave to the stand-in for `view`."""
    made = _last() if _last is not None else None
    if made is not None:
        theirs = parts_of(made._local)
        if len(theirs) == len(parts) and all(map(operator.is_, theirs, parts)):
            return made._layout
    return view._layout


# New tensors inside a compiled region.
#
# As in `traced`, the compiler takes an op where it would refuse to read how a subclass is made.
# One makes a tensor of one number, or without values; draws are then written to it, as to any
# tensor.
_library.define(
    "create(SymInt[] size, Scalar? value, str mesh, int[]? placements, ScalarType? dtype) -> Tensor"
)
_library.define("distribute(Tensor x, str mesh, int[]? placements, int? source) -> Tensor")


def is_traceable(requires_grad: bool, generator: torch.Generator | None = None) -> bool:
    """Whether torch.compile reads the program and takes such a call.

    As of plain tensors, it makes no leaves that require grad and knows no generators but the
    default one.
    """
    return is_traced() and not requires_grad and generator is None


def traced_create(
    size: Sequence[Any],
    value: Any,
    dtype: torch.dtype | None,
    layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> Any:
    """A tensor of one number, or without values where that is None."""
    if layout is not torch.strided:
        raise ArgumentError(f"A DTensor is strided, and layout={layout} was asked for.")
    encoded = encode_mesh(mesh if mesh is not None else current_mesh())
    return torch.ops.shardwise.create(size, value, encoded, encode_placements(placements), dtype)


def traced_distribute(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    source: int | None,
) -> Any:
    """`distribute_tensor` of a tensor that needs no gradient."""
    encoded = encode_mesh(mesh if mesh is not None else current_mesh())
    return torch.ops.shardwise.distribute(tensor, encoded, encode_placements(placements), source)


def install_factories(create: Callable[..., Any], distribute: Callable[..., Any]) -> None:
    """Let the ops do what these do.

    They are called as `create(size, value, device_mesh=, placements=, dtype=)` and
    `distribute(tensor, mesh, placements, src_data_rank=)`.
    """

    def run_create(size: Any, value: Any, mesh: str, placements: Any, dtype: Any) -> Any:
        options = {
            "device_mesh": decode_mesh(mesh),
            "placements": decode_placements(placements),
            "dtype": dtype,
        }
        return create(size, value, **options)

    def run_distribute(tensor: Any, mesh: str, placements: Any, source: Any) -> Any:
        return distribute(
            tensor, decode_mesh(mesh), decode_placements(placements), src_data_rank=source
        )

    _library.impl("create", unwatched(run_create), "CompositeImplicitAutograd")
    _library.impl("distribute", unwatched(run_distribute), "CompositeImplicitAutograd")
