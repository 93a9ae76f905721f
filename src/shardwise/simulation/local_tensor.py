"""LocalTensor: one tensor per rank of a simulated world, as a single torch.Tensor.

Note [A simulated world has no dispatch mode]
A LocalTensor runs every op on each of its parts in its own `__torch_dispatch__`, collectives
included. No mode is active, so torch.compile traces it like any other tensor subclass. A plain
tensor in a call is the same on every rank.

Note [Bits]
Torch computes conjugates, negatives and zeros lazily: a bit of the tensor says so, and the
dispatcher handles it before the kernel. Inside a wrapper subclass nothing does, since an op on the
wrapper is past that point. So no tensor inside a LocalTensor or a DTensor has such a bit.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import make_wrapper, no_torch_function, undispatched
from shardwise._torch.frames import Asker, asker
from shardwise._torch.functions import compare_by, neg_view, tree_flatten, tree_iter, tree_unflatten
from shardwise.core.encode import source_digest
from shardwise.core.sizes import length_of, unrecorded
from shardwise.core.untraced import untraced
from shardwise.core.world import World, simulated_world, world_caches
from shardwise.errors import ArgumentError, LeafError, RankMismatchError
from shardwise.simulation.roster import (
    RankIntNode,
    Roster,
    agreed_value,
    differing,
    grouped,
    join,
    make_roster,
    mismatch,
    no_constants,
    placeholder,
    rank_int,
    rank_values_of,
    same_values,
    spans,
    traced_placeholder,
)

#: op -> function(op, args, kwargs), for ops that do not run part by part; mostly filled by
#: simulation.collectives.
collective_handlers: dict[Any, Callable[..., Any]] = {}


_item = torch.Tensor.__getitem__


def _differ(shape: torch.Size, stride: Sequence[int], part: torch.Tensor) -> bool:
    """Whether unequal strides matter: not for dims of size 1, or for empty tensors."""
    if 0 in shape:
        return False
    return any(size > 1 and a != b for size, a, b in zip(shape, stride, part.stride(), strict=True))


class LocalTensor(torch.Tensor):
    """The values of one tensor on every rank of a simulated world.

    >>> import shardwise
    >>> with shardwise.simulate(2):
    ...     x = shardwise.LocalTensor.per_rank(lambda rank: torch.full((2,), rank))
    ...     x + 1
    LocalTensor(
      rank 0: tensor([1, 1])
      rank 1: tensor([2, 2])
    )
    """

    __slots__ = ("_parts", "_recorded", "_roster", "_sized", "_uneven")
    _parts: tuple[torch.Tensor, ...]
    _roster: Roster
    #: Whether its sizes are given rank by rank; see Note [Uneven sizes]. Not inside a DTensor,
    #: which is below autograd and takes its sizes from layouts.
    _sized: bool
    #: Whether its parts differ in sizes or strides; known only where `_sized`.
    _uneven: bool
    #: The shape and strides that a compiler has recorded for it; see simulation.roster.
    _recorded: tuple[Any, Any] | None

    __torch_function__ = no_torch_function

    @staticmethod
    @untraced
    def __new__(
        cls, parts: Sequence[torch.Tensor], roster: Roster, sized: bool = False
    ) -> LocalTensor:
        first = parts[0]
        shape: Any = first.shape
        stride: Any = first.stride() if first.layout is torch.strided else None
        uneven, node = False, None
        if sized and len(parts) > 1 and stride is not None:
            if type(first) is torch.Tensor:
                uneven = any(
                    p.shape != shape or (p.stride() != stride and _differ(shape, stride, p))
                    for p in parts
                )
            else:
                shapes, strides = [p.shape for p in parts], [p.stride() for p in parts]
                uneven = bool(differing(shapes) or differing(strides))
                node = _traced_node(first) if uneven else None
            if uneven:
                shape = _per_rank(roster, [part.shape for part in parts], node)
                stride = _per_rank(roster, [part.stride() for part in parts], node)
        make = functools.partial(
            make_wrapper,
            cls,
            shape,
            strides=stride,
            dtype=first.dtype,
            device=first.device,
            requires_grad=False,
        )
        self = unrecorded(make) if node is not None else make()
        self._parts = tuple(parts)
        self._roster = roster
        self._sized = sized
        self._uneven = uneven
        self._recorded = None
        return self

    # -- making and reading ------------------------------------------------------------------

    @staticmethod
    def per_rank(
        fn: Callable[[int], torch.Tensor], ranks: Iterable[int] | None = None
    ) -> LocalTensor:
        """The tensor that `fn(rank)` gives on each rank of the current simulated world."""
        world = simulated_world("LocalTensor.per_rank")
        every = tuple(range(world.size)) if ranks is None else tuple(ranks)
        if not every or len(set(every)) < len(every) or not set(every) <= set(range(world.size)):
            raise ArgumentError(
                f"LocalTensor.per_rank(ranks={every}) takes each of the ranks 0 to "
                f"{world.size - 1} at most once, and at least one of them."
            )
        tensors = [fn(rank) for rank in every]
        for rank, tensor in zip(every, tensors, strict=True):
            if not isinstance(tensor, torch.Tensor):
                raise ArgumentError(f"per_rank(fn): fn({rank}) is not a tensor, found {tensor!r}.")
        return from_ranks(world, every, tensors, sized=True)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._roster.ranks

    def on_rank(self, rank: int) -> torch.Tensor:
        """The plain tensor that `rank` holds."""
        return self._parts[self._roster.part_of(rank)]

    def agreed(self) -> torch.Tensor:
        """The plain tensor that all ranks hold, or an error that says which differ."""
        first = self._parts[0]
        for part in self._parts[1:]:
            if part.shape != first.shape or not same_values(part, first):
                raise mismatch("one tensor", self._roster, self._parts)
        return first

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._outward("shape") if self._uneven else self._parts[0].shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        stride = self._outward("stride") if self._uneven else self._parts[0].stride()
        return stride if dim is None else stride[dim]

    def _outward(self, asked: str) -> Any:
        """The shape or strides of parts that differ: raises, except for the compiler's records."""
        strides = asked == "stride"
        who = asker(__file__)
        if who is Asker.COMPILER:
            if self._recorded is None:
                traced = type(self._parts[0]) is not torch.Tensor
                self._recorded = (
                    traced_placeholder(self.dim()) if traced else placeholder(self._parts)
                )
            return self._recorded[strides]
        if who is Asker.FORMULA or (who is Asker.NORM and self._may_be_normalized()):
            return (torch.Tensor.stride if strides else torch.Tensor.size)(self)
        if who is Asker.FOR_CONSTANTS:
            return no_constants()
        found = [p.stride() if strides else p.shape for p in self._parts]
        raise mismatch(asked, self._roster, found)

    def _may_be_normalized(self) -> bool:
        """Whether no norm refuses the part of one rank and takes that of another."""
        if len({part.shape[2:] for part in self._parts}) > 1:
            return False
        return all(part.dim() > 1 and part.numel() > part.shape[1] for part in self._parts)

    @property
    def _dynamo_weak_dynamic_indices(self) -> set[int]:
        """The dims whose sizes the compiler must not specialise; it may add to them."""
        marked: set[int] = self.__dict__.get("_marked_dynamic", set())
        return marked | set(differing([p.shape for p in self._parts])) if self._uneven else marked

    @_dynamo_weak_dynamic_indices.setter
    def _dynamo_weak_dynamic_indices(self, dims: set[int]) -> None:
        self.__dict__["_marked_dynamic"] = dims

    def numel(self) -> int:
        return math.prod(self.shape)

    __len__ = length_of

    def __getitem__(self, index: Any) -> Any:
        # A Python function, so that torch.tensor([x]) asks for a length before it reads memory.
        return _item(self, index)

    def tolist(self) -> Any:
        return self.agreed().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.agreed().numpy(force=force)

    # Torch would read memory that this tensor does not have, and end the process.

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.agreed().__dlpack__(*args, **kwargs)

    def apply_(self, callable: Callable[[Any], Any]) -> LocalTensor:
        for part in self._parts:
            part.apply_(callable)
        return self

    def share_memory_(self) -> LocalTensor:
        for part in self._parts:
            part.share_memory_()
        return self

    def __format__(self, spec: str) -> str:
        """As any tensor's: a 0-dim tensor that all ranks share is formatted as a number."""
        if self.dim() or (not spec and as_plain(self) is self):
            return format(str(self), spec)
        return format(self.agreed().item(), spec)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        lines = []
        for number, part in enumerate(self._parts):
            ranks = self._roster.ranks_of(number)
            label = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {spans(ranks)}"
            below = "\n" + " " * len(f"  {label}: ")
            lines.append(f"  {label}: {part!r}".replace("\n", below))
        return "LocalTensor(\n" + "\n".join(lines) + "\n)"

    # -- torch.compile and pickling ----------------------------------------------------------

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_part") and name[5:].isdigit():
            return self._parts[int(name[5:])]
        raise AttributeError(f"LocalTensor has no attribute {name!r}")

    @untraced
    def __tensor_flatten__(self) -> tuple[list[str], Roster]:
        return [f"_part{i}" for i in range(len(self._parts))], self._roster

    @staticmethod
    @untraced
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], roster: Roster, outer_size: Any, outer_stride: Any
    ) -> LocalTensor:
        made = LocalTensor([inner[f"_part{i}"] for i in range(len(inner))], roster, sized=True)
        if made._uneven and type(made._parts[0]) is not torch.Tensor:
            made._recorded = (outer_size, outer_stride)
        return made

    @untraced
    def __coerce_same_metadata_as_tangent__(
        self, meta: Roster, typ: type | None = None
    ) -> LocalTensor:
        return self.held_like(meta)

    @staticmethod
    @untraced
    def _plain_tangent(x: torch.Tensor, roster: Roster) -> LocalTensor:
        """The gradient of an output that was not used; see `_torch.dynamo`."""
        return LocalTensor([x.clone() for _ in range(roster.num_parts)], roster, sized=True)

    def _stable_hash_for_caching(self) -> str:
        """The key of this tensor in torch's compile caches; includes this package's code."""
        parts = [
            (list(map(str, p.shape)), list(map(str, p.stride())), p.dtype, str(p.device))
            for p in self._parts
        ]
        roster = self._roster
        return repr((parts, roster.ranks, roster.index, self.requires_grad, source_digest()))

    def held_like(self, roster: Roster) -> LocalTensor:
        """The same values with the parts of `roster`; ranks that share a part there must agree.

        A gradient may have one part per rank although its value has one for all.
        """
        if self._roster is roster:
            return self
        first: dict[int, torch.Tensor] = {}
        for place, part in enumerate(roster.index):
            value = self._parts[self._roster.index[place]]
            if value is not first.setdefault(part, value) and not same_values(value, first[part]):
                asked = "a gradient of a value that these ranks share"
                raise mismatch(asked, self._roster, self._parts)
        return LocalTensor([first[part] for part in range(roster.num_parts)], roster)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalTensor:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise LeafError(
                "Only leaf tensors can be deep-copied (as with torch.Tensor): detach() it first."
            )
        copies = [p.detach().clone() for p in self._parts]
        copied = memo[id(self)] = LocalTensor(copies, self._roster, self._sized)
        copied.__dict__.update(copy.deepcopy(_lasting(self.__dict__), memo))
        copied.requires_grad_(self.requires_grad)
        if not isinstance(self, torch.nn.Parameter):  # as torch does
            copied.grad = copy.deepcopy(self.grad, memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        held = (self._parts, self._roster.ranks, self._roster.index, self._sized)
        return _unpickle, (*held, self.requires_grad, _lasting(self.__dict__))

    # -- the op call -------------------------------------------------------------------------

    @classmethod
    @untraced
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(types) > 1 and any(hasattr(kind, "_layout") for kind in types):
            return NotImplemented  # a DTensor has a LocalTensor inside, not beside it
        handler = collective_handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        roster = _common_roster(args)
        if roster is None or kwargs or _writes(func):
            return _run_any(func, args, kwargs)
        results = [
            func(*[a._parts[i] if type(a) is LocalTensor else a for a in args])
            for i in range(roster.num_parts)
        ]
        sized = any(a._sized for a in args if type(a) is LocalTensor)
        first = results[0]
        if isinstance(first, torch.Tensor) and not first.is_sparse:
            return LocalTensor(results, roster, sized)
        return wrap_results(results, roster, str(func), sized)


def _lasting(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes that a copy keeps: those of users, and whether it is a parameter."""
    return {k: v for k, v in attributes.items() if k == "_is_param" or k[0] != "_"}


def _unpickle(
    parts: Sequence[torch.Tensor],
    ranks: tuple[int, ...],
    index: tuple[int, ...],
    sized: bool,
    requires_grad: bool,
    attributes: dict[str, Any],
) -> LocalTensor:
    world = simulated_world("A LocalTensor")
    restored = LocalTensor(parts, make_roster(world, ranks, index), sized)
    restored.__dict__.update(attributes)
    restored.requires_grad_(requires_grad)
    return restored


def as_plain(x: Any) -> Any:
    """The plain tensor that all ranks share, where `x` is one; else `x`."""
    if type(x) is not LocalTensor or type(x._parts[0]) is not torch.Tensor:
        return x
    first = x._parts[0]
    return first if all(same_values(part, first) for part in x._parts[1:]) else x


# In a process the whole tensor is plain, and `assert_close` takes it beside a Parameter.
compare_by(as_plain)


def _common_roster(args: tuple[Any, ...]) -> Roster | None:
    """The roster of all tensors in `args`, if they have the same and none is inside a list."""
    roster = None
    for arg in args:
        kind = type(arg)
        if kind is LocalTensor:
            if roster is None:
                roster = arg._roster
            elif arg._roster is not roster:
                return None
        elif kind is torch.SymInt:
            return None
        elif kind is list or kind is tuple:
            for item in arg:
                if type(item) is LocalTensor or type(item) is torch.SymInt:
                    return None
    return roster


@functools.lru_cache(maxsize=4096)
def _writes(func: Any) -> bool:
    return func._schema.is_mutable


@functools.lru_cache(maxsize=4096)
def _turns(func: Any) -> bool:
    """Whether the op turns its argument into a view of itself, as `t_` does."""
    return torch.Tag.inplace_view in func.tags and func not in _RESIZES


_RESIZES = (torch.ops.aten.resize_.default, torch.ops.aten.resize_as_.default)


def _run_any(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on the parts of tensors that may have several rosters, or be in lists."""
    leaves, spec = tree_flatten((args, kwargs))
    # Sizes that differ between ranks have parts and a roster, like tensors.
    held: dict[int, tuple[Roster, Sequence[Any]]] = {}
    for i, leaf in enumerate(leaves):
        if type(leaf) is LocalTensor:
            held[i] = (leaf._roster, leaf._parts)
        elif (node := rank_values_of(leaf)) is not None:
            held[i] = node.parts()
    rosters = tuple(roster for roster, _ in held.values())
    roster = rosters[0]
    picks: Sequence[Sequence[int]]
    if all(r is roster for r in rosters):
        picks = [range(roster.num_parts)] * len(rosters)
    else:
        roster, picks = join(rosters)
    calls = []
    for part in range(roster.num_parts):
        here = list(leaves)
        for (i, (_, parts)), pick in zip(held.items(), picks, strict=True):
            here[i] = parts[pick[part]]
        calls.append(here)
    if _writes(func):
        return _run_in_place(func, leaves, spec, roster, calls)
    results = []
    for here in calls:
        part_args, part_kwargs = tree_unflatten(here, spec)
        results.append(func(*part_args, **part_kwargs))
    return wrap_results(results, roster, str(func), _any_sized(leaves))


def _view_as_recorded(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view with a tensor's own sizes, which the compiler calls with those that it recorded."""
    x, *size = args
    recorded = x._recorded if type(x) is LocalTensor and x._uneven else None
    if recorded is None or kwargs or list(size[0]) != list(recorded[0]):
        return _run_any(func, args, kwargs)
    return LocalTensor([func(part, part.shape) for part in x._parts], x._roster, x._sized)


collective_handlers[torch.ops.aten._unsafe_view.default] = _view_as_recorded


def _at_once(op: Any) -> Callable[..., Any]:
    """Compute at once what torch would do lazily; see Note [Bits]."""
    return lambda func, args, kwargs: _run_any(op, args, kwargs)


collective_handlers[torch.ops.aten._conj.default] = _at_once(torch.ops.aten.conj_physical.default)
collective_handlers[torch.ops.aten._neg_view.default] = _at_once(torch.ops.aten.neg.default)


def _any_sized(leaves: Sequence[Any]) -> bool:
    return any(type(leaf) is LocalTensor and leaf._sized for leaf in leaves)


def _run_in_place(
    func: Any,
    leaves: list[Any],
    spec: Any,
    roster: Roster,
    calls: Sequence[list[Any]],
) -> Any:
    """Run an op that writes, once per tensor that it writes to.

    A part that ranks share may be written only if all of them would write the same.
    """
    written = _written_leaves(func, leaves, spec)
    before_write = [(x, [part.shape for part in x._parts]) for x in _traceless(leaves, written)]
    done: dict[tuple[int, ...], tuple[list[Any], Any]] = {}
    results = []
    for part, here in enumerate(calls):
        target = tuple(id(here[i]) for i in written)
        if len(target) > 1 and target not in done and any(set(target) & set(t) for t in done):
            raise RankMismatchError(
                f"{func} writes to several tensors; ranks share some of them and not others. "
                "Call the op for one tensor at a time (optimizers: foreach=False)."
            )
        before = done.get(target)
        if before is not None:
            _check_same_write(func, before[0], here, roster, part, trusted=not _any_sized(leaves))
            results.append(before[1])
            continue
        part_args, part_kwargs = tree_unflatten(here, spec)
        results.append(func(*part_args, **part_kwargs))
        done[target] = (here, results[-1])
    for x, shapes in before_write:
        if not _turns(func) and [part.shape for part in x._parts] != shapes:
            _take_sizes_of_parts(x)
    if len(func._schema.returns) == 1 and isinstance(results[0], torch.Tensor):
        for i in written:
            if type(leaves[i]) is LocalTensor and results[0] is leaves[i]._parts[0]:
                if _turns(func):
                    args, kwargs = tree_unflatten(leaves, spec)
                    with undispatched():
                        func(*args, **kwargs)  # the sizes that autograd reads
                return leaves[i]
    if not func._schema.returns:
        return None
    return wrap_results(results, roster, str(func), _any_sized(leaves))


def _traceless(leaves: list[Any], written: list[int]) -> list[LocalTensor]:
    """The LocalTensors among the written leaves, but those that a compiler traces."""
    tensors = [leaves[i] for i in written if type(leaves[i]) is LocalTensor]
    return [x for x in tensors if type(x._parts[0]) is torch.Tensor]


def _take_sizes_of_parts(x: LocalTensor) -> None:
    """Give `x` the sizes of its parts, which `addbmm_`, `out=` or `resize_` changed."""
    made = LocalTensor(x._parts, x._roster, x._sized)
    with undispatched():
        x.data = made
    x._uneven = made._uneven


def _check_same_write(
    func: Any, before: list[Any], here: list[Any], roster: Roster, part: int, *, trusted: bool
) -> None:
    """`trusted`: a layout says that these ranks hold the same, so traced tensors pass."""
    for old, new in zip(before, here, strict=True):
        if not isinstance(new, torch.Tensor) or old is new:
            continue
        if type(new) is not torch.Tensor and trusted:  # traced by torch.compile: no values
            continue
        if not same_values(old, new):
            raise RankMismatchError(
                f"{func} would write other values on rank {roster.ranks_of(part)[0]} than on an "
                "earlier rank into a tensor that these ranks share (a plain tensor, or a "
                "replicated value). Clone it per rank first: "
                "LocalTensor.per_rank(lambda rank: x.clone())."
            )


def _written_leaves(func: Any, leaves: list[Any], spec: Any) -> list[int]:
    numbered_args, numbered_kwargs = tree_unflatten(list(range(len(leaves))), spec)
    found: list[int] = []
    for position, arg in enumerate(func._schema.arguments):
        if arg.alias_info is not None and arg.alias_info.is_write:
            if arg.name in numbered_kwargs:
                found += tree_iter(numbered_kwargs[arg.name])
            elif position < len(numbered_args):
                found += tree_iter(numbered_args[position])
    return [i for i in found if isinstance(leaves[i], torch.Tensor)]


def wrap_results(results: list[Any], roster: Roster, asked: str, sized: bool = False) -> Any:
    """One result from the parts' results: tensors stay per rank, plain values must agree."""
    first = results[0]
    if isinstance(first, torch.Tensor):
        if first.is_sparse and all(_same_rows(each, first) for each in results[1:]):
            return first  # an optimizer checks whether a gradient is sparse, and reads its rows
        return LocalTensor(results, roster, sized)
    if isinstance(first, (tuple, list)):
        agreed_value(list(map(len, results)), roster, f"the number of results of {asked}")
        columns = zip(*results, strict=True)
        whole = [wrap_results(list(each), roster, asked, sized) for each in columns]
        return type(first)(whole)
    return agreed_value(results, roster, asked)


def _same_rows(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two ranks hold the same sparse tensor; one of them may hold a dense one."""
    if not (one.is_sparse and other.is_sparse):
        return False
    pairs = ((one._indices(), other._indices()), (one._values(), other._values()))
    return all(same_values(*pair) for pair in pairs)


def _traced_node(part: torch.Tensor) -> type[RankIntNode]:
    from shardwise.simulation.traced_rank_int import node_for

    return node_for(part)


def _per_rank(
    roster: Roster, tuples: Sequence[Sequence[int]], node: type[RankIntNode] | None
) -> list[Any]:
    """Sizes or strides of the parts, as RankInts where they differ."""
    if len(set(map(len, tuples))) > 1:
        found = ", ".join(f"rank {r}: {len(tuples[roster.part_of(r)])}" for r in roster.ranks)
        raise RankMismatchError(
            f"The ranks' tensors have different numbers of dims ({found}). In a simulated world "
            "only their sizes may differ: give all of them the same number of dims."
        )
    columns = zip(*tuples, strict=True)
    return [
        rank_int(roster.world, roster.ranks, [column[part] for part in roster.index], node)
        for column in columns
    ]


def from_ranks(
    world: World,
    ranks: tuple[int, ...],
    tensors: Sequence[torch.Tensor],
    sized: bool = False,
) -> LocalTensor:
    """A LocalTensor of one tensor per rank; one that several ranks hold is stored once."""
    roster, firsts = grouped(world, ranks, [id(t) for t in tensors])
    return LocalTensor([resolved(tensors[place]) for place in firsts], roster, sized)


def resolved(x: torch.Tensor) -> torch.Tensor:
    """A plain tensor without lazy bits; see Note [Bits]."""
    conjugate, negative, zero = x.is_conj(), x.is_neg(), x._is_zerotensor()
    if not (conjugate or negative or zero):
        return x
    if zero:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    # Clear the bits first: inside an op on a wrapper, nothing would handle them.
    x = x.conj() if conjugate else x
    x = neg_view(x) if negative else x
    x = torch.conj_physical(x) if conjugate else x
    return torch.neg(x) if negative else x


@functools.lru_cache(maxsize=256)
def shared_roster(world: World, ranks: tuple[int, ...]) -> Roster:
    return make_roster(world, ranks, (0,) * len(ranks))


world_caches.append(shared_roster.cache_clear)
