"""Views and shape changes, diagonals and windows: which dim of the input is which of the output.

A view is described by a list of `Link`s. A linked pair of dims can be sharded together; all other
dims must be whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise._torch.dispatch import decompositions
from shardwise.core.layout import shard_with
from shardwise.core.placements import Partial, Shard
from shardwise.core.sizes import Size, divides, equal, lengths, smaller, statically_equal
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    averages_too,
    linear_choices,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.dtensor.snapshots import resolve_conj, resolve_neg
from shardwise.errors import LayoutError

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Link:
    """Dim `source` of the input becomes dim `target` of the output.

    Both cover the same elements in the same order; an entry of `source` has `source_run` of them,
    an entry of `target` has `target_run`. With equal runs they are the same dim.
    """

    source: int
    target: int
    source_run: Size = 1
    target_run: Size = 1

    @property
    def same_dim(self) -> bool:
        return self.source_run is self.target_run or equal(self.source_run, self.target_run)


def link_choices(
    call: Call, links: Sequence[Link], local: LocalCall | None = None
) -> Iterator[Choice]:
    yield replace(call.replicated(), local=local)
    for link in links:
        if link.same_dim:
            targets = [link.target] * len(call.outputs)
            yield from sharded_together(call, (link.source,), targets, local)
        else:
            yield from _run_choices(call, links, link)
    for choice in linear_choices(call, ((0,),)):
        yield replace(choice, local=local)


def reordered_choices(
    call: Call, links: Sequence[Link], local: LocalCall | None = None
) -> Iterator[Choice]:
    """`link_choices` of an op that only moves entries: a Partial of any reduction passes."""
    yield from link_choices(call, links, local)
    placed = call.placed[0] if call.placed else None
    if isinstance(placed, Partial) and placed.reduce_op not in averages_too(call.inputs[0]):
        yield Choice((placed,), (placed,) * len(call.outputs), local)


def _run_choices(call: Call, links: Sequence[Link], link: Link) -> Iterator[Choice]:
    """Shards that hold whole entries of both dims of a link."""
    place = (0, link.source)
    size_in, size_out = call.inputs[0].shape[link.source], call.outputs[0].shape[link.target]
    parts = call.axis_size
    known = type(size_in) is int and type(size_out) is int
    if not known and not _is_needed(call, links):
        return
    if divides(parts, size_in) and divides(parts, size_out):
        # The nested splits of several axes must divide too, on both sides.
        yield Choice((Shard(link.source),), (Shard(link.target),), even=(place,))
    if not known:
        return
    for sizes in call.splits([place]):
        num_elements = [n * link.source_run for n in lengths(size_in, parts, sizes)]
        if all(n % link.target_run == 0 for n in num_elements):
            sizes_out = tuple(n // link.target_run for n in num_elements)
            target = shard_with(link.target, sizes_out, size_out, parts)
            yield Choice((Shard(link.source, sizes),), (target,), alone=(place,))


def _is_needed(call: Call, links: Sequence[Link]) -> bool:
    """Whether to test the divisibility of a symbolic size, which specialises the graph.

    It is not tested if the input keeps its placement.
    """
    if not call.placed or any(isinstance(p, Shard) for p in call.wanted):
        return True
    placed = call.placed[0]
    return isinstance(placed, Shard) and not any(
        link.source == placed.dim and link.same_dim for link in links
    )


def view_links(before: Sequence[Size], after: Sequence[Size]) -> list[Link]:
    """The links of a view: in each run of dims that are merged or split, the outermost ones.

    >>> view_links((4, 6), (24,))
    [Link(source=0, target=0, source_run=6, target_run=1)]
    """
    links: list[Link] = []
    i = j = 0
    while i < len(before) and j < len(after):
        first_i, first_j = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while not equal(left, right):
            if i < len(before) and (j == len(after) or smaller(left, right)):
                left, i = left * before[i], i + 1
            elif j < len(after):
                right, j = right * after[j], j + 1
            else:
                return links
        if i - first_i == 1 == j - first_j:
            links.append(Link(first_i, first_j))  # it stays as it is, with size 1 too
            continue
        link = _outermost(before[first_i:i], after[first_j:j], first_i, first_j)
        if link is not None:
            links.append(link)
    return links


def _outermost(
    before: Sequence[Size], after: Sequence[Size], first_i: int, first_j: int
) -> Link | None:
    """The link of the outermost dims of a run, without dims of size 1."""
    skip_i = _leading_ones(before)
    skip_j = _leading_ones(after)
    if skip_i == len(before) or skip_j == len(after):
        return None
    return Link(
        first_i + skip_i,
        first_j + skip_j,
        math.prod(before[skip_i + 1 :]),
        math.prod(after[skip_j + 1 :]),
    )


def _leading_ones(sizes: Sequence[Size]) -> int:
    return next((n for n, s in enumerate(sizes) if type(s) is not int or s != 1), len(sizes))


def _viewed(call: Call) -> list[Link]:
    before, after = call.inputs[0].shape, call.outputs[0].shape
    if not any(type(s) is int and s == 0 for s in before):
        return view_links(before, after)
    # Which dims an empty view merges is unknown: only dims that stay in place are linked.
    if len(before) != len(after):
        return []
    return [d for d in unchanged(call) if equal(before[d.source], after[d.target])]


def _permuted(order: Callable[[Call], Sequence[int]]) -> Callable[[Call], list[Link]]:
    return lambda call: [Link(source, target) for target, source in enumerate(order(call))]


def _permute_order(call: Call) -> list[int]:
    ndim = call.inputs[0].ndim
    return [d % ndim for d in call.argument("dims")]


def _transpose_order(call: Call) -> list[int]:
    ndim = call.inputs[0].ndim
    order = list(range(ndim))
    if ndim:
        a, b = call.argument("dim0") % ndim, call.argument("dim1") % ndim
        order[a], order[b] = order[b], order[a]
    return order


def _reversed_order(call: Call) -> list[int]:
    return list(reversed(range(call.inputs[0].ndim)))


def _inserted(call: Call) -> list[Link]:
    at = call.argument("dim") % call.outputs[0].ndim
    return [Link(d, d + (d >= at)) for d in range(call.inputs[0].ndim)]


@dataclass(frozen=True, slots=True)
class Squeeze:
    """Drops the dims that the global tensor drops."""

    dims: tuple[int, ...]

    def __call__(self, x: torch.Tensor, *_: Any) -> torch.Tensor:
        return aten.squeeze.dims(x, self.dims)


def _squeeze_choices(call: Call) -> Iterator[Choice]:
    """The dims to drop are explicit: a shard may have size 1 although the global tensor has not."""
    ndim, shape = call.inputs[0].ndim, call.inputs[0].shape
    names = {arg.name for arg in call.op._schema.arguments}
    given = call.argument("dim") if "dim" in names else range(ndim)
    chosen = {d % ndim for d in ([given] if isinstance(given, int) else given)} if ndim else set()
    dropped = [d for d in sorted(chosen) if equal(shape[d], 1)]
    kept = [d for d in range(ndim) if d not in dropped]
    local = LocalCall(Squeeze(tuple(dropped)))
    yield from reordered_choices(call, [Link(s, t) for t, s in enumerate(kept)], local)


def _expanded(call: Call) -> list[Link]:
    """Dims that are expanded from size 1 are whole; the others keep their size."""
    before, after = call.inputs[0].shape, call.outputs[0].shape
    new = len(after) - len(before)
    return [Link(d, d + new) for d, size in enumerate(before) if equal(size, after[d + new])]


def _selected(call: Call) -> list[Link]:
    at = call.argument("dim") % call.inputs[0].ndim
    return [Link(d, d - (d > at)) for d in range(call.inputs[0].ndim) if d != at]


@dataclass(frozen=True, slots=True)
class DimSlice:
    """A slice of a dim of known size: `start`, `step`, and how many entries it takes."""

    dim: int
    start: int
    step: int
    count: int

    def within(self, offset: int, length: int) -> tuple[int, int]:
        """`(first, count)` of the entries in `[offset, offset + length)`, relative to offset."""
        skipped = max(0, -((self.start - offset) // self.step)) if offset > self.start else 0
        first = self.start + skipped * self.step - offset
        inside = max(0, -((first - length) // self.step)) if first < length else 0
        return first, max(0, min(inside, self.count - skipped))

    def lengths(self, shard_sizes: Sequence[int]) -> tuple[int, ...]:
        """How many entries each shard of the dim keeps."""
        offsets = itertools.accumulate(shard_sizes, initial=0)
        return tuple(self.within(o, n)[1] for o, n in zip(offsets, shard_sizes, strict=False))

    def of(self, x: torch.Tensor, offset: int) -> torch.Tensor:
        """The slice of a shard `x` that starts at `offset`."""
        first, count = self.within(offset, x.shape[self.dim])
        if count == 0:
            return aten.slice.Tensor(x, self.dim, 0, 0)
        stop = first + (count - 1) * self.step + 1
        return aten.slice.Tensor(x, self.dim, first, stop, self.step)


def slice_cut(call: Call, dim: int, size: Any, count: Any) -> DimSlice | None:
    """The slice that a call names, of `count` out of `size` entries; None for symbolic sizes.

    A symbolic bound is specialised only where the dim is sharded.
    """
    if type(size) is not int or type(count) is not int:
        return None
    bounds = [call.argument(name) for name in ("start", "end", "step")]
    is_sharded = any(p.is_shard(dim) for p in (*call.placed, *call.wanted))
    if not is_sharded and any(isinstance(bound, torch.SymInt) for bound in bounds):
        return None
    start, _, step = slice(*bounds).indices(size)
    return DimSlice(dim, start, step, count)


@dataclass(frozen=True, slots=True)
class OwnedSlice:
    """The entries of a slice in this rank's shard, as a view of it."""

    cut: DimSlice

    def __call__(self, coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, *_: Any) -> Any:
        return self.cut.of(x, layouts[0].box(coordinate)[0][self.cut.dim])


def _whole_view(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return aten.alias.default(x)


#: A slice of the whole dim, such as torch.compile makes of `:`: each rank keeps its shard.
_WHOLE_VIEW = LocalCall(_whole_view)


def _slice_choices(call: Call) -> Iterator[Choice]:
    """Each rank keeps the slice's entries in its shard, so a slice never communicates."""
    at = call.argument("dim") % call.inputs[0].ndim
    size, count = call.inputs[0].shape[at], call.outputs[0].shape[at]
    if statically_equal(size, count):
        yield from reordered_choices(call, unchanged(call), _WHOLE_VIEW)
        return
    yield from reordered_choices(call, all_but(call, at))
    cut = slice_cut(call, at, size, count)
    if cut is None:
        return
    local = LocalCall(OwnedSlice(cut), per_rank=True)
    for sizes in call.splits([(0, at)]):
        kept = cut.lengths(lengths(size, call.axis_size, sizes))
        target = shard_with(at, kept, count, call.axis_size)
        yield Choice((Shard(at, sizes),), (target,), local, alone=((0, at),))


def unchanged(call: Call) -> list[Link]:
    return all_but(call, None)


def all_but(call: Call, dim: int | None) -> list[Link]:
    """Links for all dims but one, which do not change."""
    return [Link(d, d) for d in range(call.inputs[0].ndim) if d != dim]


def _view_choices(call: Call, links: Sequence[Link]) -> Iterator[Choice]:
    """If the shape stays, shards keep their strides: torch would give dims of size 1 new ones."""
    shape, made = call.inputs[0].shape, call.outputs[0].shape
    same = len(shape) == len(made) and all(map(statically_equal, shape, made))
    yield from reordered_choices(call, links, _WHOLE_VIEW if same else None)


def view(
    *ops: Any,
    links: Callable[[Call], Sequence[Link]],
    text: str,
    shape: str | None = None,
    choices: Callable[[Call, Sequence[Link]], Iterator[Choice]] = reordered_choices,
) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table. `shape` names the argument that holds the output's shape."""
    return ops, Rule(lambda call: choices(call, links(call)), text, {shape: 0} if shape else {})


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """For zero repeats, torch's decomposition would make a plain tensor."""
    if len(repeats) < x.dim() or all(repeats):  # torch raises in the first case
        return decompositions()[aten.repeat.default](x.contiguous(), repeats)  # as one device
    sizes = (1,) * (len(repeats) - x.dim()) + tuple(x.shape)
    return x.new_empty([size * times for size, times in zip(sizes, repeats, strict=True)])


def _keep_size(x: Any, size: Sequence[int], **_: Any) -> Any:
    """`x.resize_(size)` to the present size, as torch's own code for `out=` calls it."""
    if tuple(size) == tuple(x.shape):
        return x
    raise LayoutError(
        f"resize_() to the shape {tuple(size)}: the DTensor has the shape {tuple(x.shape)}, and "
        "cannot be resized. Make one of that shape, or reshape() it."
    )


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.repeat.default: _repeat,
    aten.resize_.default: _keep_size,
    aten.resize_as_.default: lambda x, other, **_: _keep_size(x, other.shape),
}


def _diagonal_dims(call: Call, ndim: int) -> tuple[int, int]:
    return call.argument("dim1") % ndim, call.argument("dim2") % ndim


def _around_diagonal(call: Call, ndim: int) -> list[int]:
    """The dims that are neither rows nor columns, in the order of the result."""
    whole = _diagonal_dims(call, ndim)
    return [d for d in range(ndim) if d not in whole]


@dataclass(frozen=True, slots=True)
class OwnedDiagonal:
    """The entries of a diagonal in this rank's rows (sign 1) or columns (sign -1)."""

    offset: int
    rows: int
    columns: int
    cut: int
    sign: int

    def __call__(self, coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, *_: Any) -> Any:
        start = layouts[0].box(coordinate)[0][self.cut]
        return aten.diagonal.default(x, self.offset + self.sign * start, self.rows, self.columns)


def _diagonal_choices(call: Call) -> Iterator[Choice]:
    """Each rank keeps the entries in its rows or columns, so a diagonal never communicates."""
    ndim = call.inputs[0].ndim
    around = _around_diagonal(call, ndim)
    yield from reordered_choices(call, [Link(d, i) for i, d in enumerate(around)])
    rows, columns = _diagonal_dims(call, ndim)
    offset, count = call.argument("offset"), call.outputs[0].shape[-1]
    for cut, first, sign in ((rows, max(0, -offset), 1), (columns, max(0, offset), -1)):
        size = call.inputs[0].shape[cut]
        if type(size) is not int or type(count) is not int:
            return
        local = LocalCall(OwnedDiagonal(offset, rows, columns, cut, sign), per_rank=True)
        for sizes in call.splits([(0, cut)]):
            kept = DimSlice(cut, first, 1, count).lengths(lengths(size, call.axis_size, sizes))
            target = shard_with(ndim - 2, kept, count, call.axis_size)
            alone = ((0, rows), (0, columns))
            yield Choice((Shard(cut, sizes),), (target,), local, alone=alone)


def _embedded(call: Call) -> list[Link]:
    return [Link(i, d) for i, d in enumerate(_around_diagonal(call, call.outputs[0].ndim))]


def _windows(call: Call) -> list[Link]:
    ndim = call.inputs[0].ndim
    return all_but(call, call.argument("dimension") % ndim if ndim else None)


def _windows_back(call: Call) -> list[Link]:
    """A dim of size 1 is repeated where the output is longer, and stays whole."""
    grad, out = call.inputs[0].shape, call.outputs[0].shape
    at = call.argument("dim") % len(out) if out else 0
    return [Link(d, d) for d in range(len(out)) if d != at and grad[d] == out[d]]


def _computed(fn: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call], Iterator[Choice]]:
    """The choices of a view that is computed: collectives ignore torch's lazy bits."""
    local = LocalCall(fn, copies=True)
    return lambda call: link_choices(call, unchanged(call), local)


# An empty shard may begin at a misaligned place in another tensor, so it gets separate memory.
def _pair_choices(call: Call) -> Iterator[Choice]:
    but_last = all_but(call, call.inputs[0].ndim - 1)
    yield from link_choices(call, but_last, unless_empty(call.op))


def _bits_choices(call: Call) -> Iterator[Choice]:
    """The same bits as another dtype: a shard of the last dim must hold whole entries."""
    before, after, local = call.inputs[0], call.outputs[0], unless_empty(call.op)
    yield replace(call.replicated(), local=local)
    for dim in range(before.ndim):
        for sizes in call.splits([(0, dim)]):
            target: Shard | None = Shard(dim, sizes)
            alone: tuple[tuple[int, int], ...] = ()
            if dim == before.ndim - 1 and before.dtype.itemsize != after.dtype.itemsize:
                target, alone = _same_bytes(call, dim, sizes), ((0, dim),)
            if target is not None:
                yield Choice((Shard(dim, sizes),), (target,), local, alone=alone)


def _same_bytes(call: Call, dim: int, sizes: tuple[int, ...] | None) -> Shard | None:
    """The shard of the output with the same bytes; None where an entry would be split."""
    before, after = call.inputs[0], call.outputs[0]
    if type(before.shape[dim]) is not int:
        return None
    counts = lengths(before.shape[dim], call.axis_size, sizes)
    shard_bytes = [n * before.dtype.itemsize for n in counts]
    if any(n % after.dtype.itemsize for n in shard_bytes):
        return None
    kept = tuple(n // after.dtype.itemsize for n in shard_bytes)
    return shard_with(dim, kept, after.shape[dim], call.axis_size)


RULES: Table = table(
    view(
        aten.view.default,
        aten._unsafe_view.default,
        links=_viewed,
        text="(a b) -> a b",
        shape="size",
        choices=_view_choices,
    ),
    view(aten.t.default, aten.numpy_T.default, links=_permuted(_reversed_order), text="a b -> b a"),
    view(aten.transpose.int, links=_permuted(_transpose_order), text="a b -> b a"),
    view(aten.permute.default, links=_permuted(_permute_order), text="a b c -> c a b"),
    view(aten.unsqueeze.default, links=_inserted, text="... -> ... 1"),
    (
        (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims),
        Rule(_squeeze_choices, "... 1 -> ..."),
    ),
    view(aten.expand.default, links=_expanded, text="... 1 -> ... n", shape="size"),
    view(aten.select.int, links=_selected, text="... [n] -> ..."),
    ((aten.slice.Tensor,), Rule(_slice_choices, "... n -> ... m")),
    view(aten.detach.default, aten.alias.default, links=unchanged, text="... -> ..."),
    view(aten.unbind.int, links=_selected, text="... [n] -> ..., ...", choices=link_choices),
    view(
        aten.select_backward.default,
        links=_inserted,
        text="... -> ... [n]",
        shape="input_sizes",
        choices=link_choices,
    ),
    ((aten.view.dtype,), Rule(_bits_choices, "... -> ...")),
    ((aten.diagonal.default,), Rule(_diagonal_choices, "m n ... -> ... k")),
    view(
        aten.diagonal_backward.default,
        links=_embedded,
        text="... [k] -> [m] [n] ...",
        shape="input_sizes",
        choices=link_choices,
    ),
    view(
        aten.diag_embed.default,
        links=_embedded,
        text="... [k] -> [m] [n] ...",
        choices=link_choices,
    ),
    view(aten.unfold.default, links=_windows, text="... [n] -> ... [w] [k]"),
    view(
        aten.unfold_backward.default,
        links=_windows_back,
        text="... [w] [k] -> ... [n]",
        shape="input_sizes",
        choices=link_choices,
    ),
    view(aten.view_as_real.default, links=unchanged, text="... -> ... [2]", choices=link_choices),
    ((aten.view_as_complex.default,), Rule(_pair_choices, "... [2] -> ...")),
    ((aten._conj.default,), Rule(_computed(torch.conj_physical), "... -> ...")),
    ((aten._neg_view.default,), Rule(_computed(torch.neg), "... -> ...")),
)

KERNELS: tuple[tuple[str, Any], ...] = (
    ("resolve_conj", resolve_conj),
    ("resolve_neg", resolve_neg),
)
