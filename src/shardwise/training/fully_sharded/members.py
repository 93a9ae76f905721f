"""Member: a parameter of a group; FlatPacking: where parameters lie in one flat buffer."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.core.layout import Layout
from shardwise.core.mesh import Grid
from shardwise.errors import LayoutError

#: Parameters that fully_shard has replaced, and the names under which it found them.
_replaced: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}


@dataclass(frozen=True, slots=True)
class ShardAxes:
    """The mesh of sharded parameters, the axis that shards them, and those with replicas."""

    grid: Grid
    axis: int
    replicas: tuple[int, ...]

    @property
    def parts(self) -> int:
        return self.grid.shape[self.axis]


@dataclass(slots=True)
class Member:
    """A parameter of a group: who holds it, and how it is laid out while sharded and gathered."""

    name: str
    owners: list[tuple[nn.Module, str]]
    parameter: nn.Parameter
    #: The layout of the sharded parameter.
    layout: Layout
    #: The layout while it is gathered; None for a plain tensor.
    whole: Layout | None
    #: Whether its gradient is that of this rank's own loss; else it is global.
    own: bool
    #: The dim whose rows are shared out; in the buffer it is the outermost.
    dim: int = 0
    #: Whether all ranks are known to train it; see Note [Frozen on one rank] in `reducer`.
    trained: bool = True

    @property
    def statistics(self) -> torch.Tensor | None:
        """The running mean beside it, if it is a parameter of a norm that has one."""
        owner, _ = self.owners[0]
        return getattr(owner, "running_mean", None)

    def whole_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of what `rank` holds while it is gathered."""
        if self.whole is None:
            return self.layout.shape
        grid = self.whole.grid
        # In a process, a submesh knows its own ranks; others along the data axes hold the same.
        known = rank if rank in grid.coordinates else grid.world.rank
        return self.whole.local_shape(grid.coordinates[known])


def note_replaced(old: torch.Tensor, name: str) -> None:
    """Remember a parameter that a sharded one replaced, wherever else it may be held."""
    number = id(old)
    _replaced[number] = weakref.ref(old, lambda _: _replaced.pop(number, None)), name


def name_of_replaced(parameter: torch.Tensor) -> str | None:
    """The name under which fully_shard has replaced this parameter, if it has."""
    known = _replaced.get(id(parameter))
    return known[1] if known is not None and known[0]() is parameter else None


def check_ties(module: nn.Module) -> None:
    """Raise if a module still holds a parameter that was replaced elsewhere."""
    for path, parameter in module.named_parameters():
        name = name_of_replaced(parameter)
        if name is not None:
            raise LayoutError(
                f"Parameter {path!r} is shared with a module that is fully sharded without it "
                f"(there it is {name!r}), and would not be tied to it any more. A parameter "
                "belongs to one group: call fully_shard on a module that has all its users, and "
                "not on those."
            )


# -- policies ------------------------------------------------------------------------------------
# Options of a group besides sharding: computing in another dtype, and keeping shards on the host.


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """Dtypes of a group: of gathered parameters, of their reduction, and of outputs.

    Parameters, gradients and optimizer state keep the dtype that they have. Gradients are reduced
    in `reduce_dtype`, or else in the dtype in which backward computes them. With
    `cast_forward_inputs`, floating inputs of the module get `param_dtype`.

    Parameters beside running statistics, as in BatchNorm, are computed in the dtype of those:
    kernels take no others. Convert the statistics to `param_dtype` to compute in that.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy:
    """Keep sharded parameters and gradients, and so optimizer state, in the host's memory."""

    pin_memory: bool = True


# -- nested --------------------------------------------------------------------------------------
# Tensors in nested containers: what modules take and return.


def cast(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """`x` in a floating dtype, if it has one."""
    return x.to(dtype) if x.is_floating_point() else x


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    found: list[torch.Tensor] = []
    mapped(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `fn` applied to its tensors; the same object where none changes."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        items = {key: mapped(item, fn) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        fields = {name: mapped(item, fn) for name, item in held.items()}
        same = all(fields[name] is held[name] for name in held)
        return value if same else dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        parts = [mapped(item, fn) for item in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return getattr(type(value), "_make", type(value))(parts)  # of a named tuple
    return value


# -- packing -------------------------------------------------------------------------------------
# Note [Flat buffers]
# A group gathers one buffer: the ranks' chunks, one after another. While gathered, a parameter is a
# view of the buffer, so it is contiguous there; a rank's shard of it is its overlap with the rank's
# chunk. Shards are rows of one dim (`Shard(dim, sizes)`), so a chunk may end inside a parameter
# only between two rows.
#
# Collectives are fastest with chunks of equal length. Padding goes between parameters, and the
# length is chosen so that there is little of it. Parameters with long rows come first; short rows
# then fit anywhere. A parameter longer than a chunk makes the length a multiple of its rows. So if
# a chunk has fewer than 100 rows, rounding up may take more than 1%: then rows of other dims are
# tried, and for a large group several buffers, each with rows of few lengths. If that does not
# help, chunks end at the row boundaries nearest to equal lengths, and their lengths differ: 1,000
# rows on 96 ranks are 10 or 11 on each. Then there is no padding, and each rank's chunk is sent by
# itself.


#: The fraction of the sent bytes that may be padding, and a number of elements up to which more of
#: it costs less than anything else.
MOST_PADDING, LITTLE = 0.01, 1 << 12
#: Up to this many elements, the cost of copying across dims does not matter.
FEW = 1 << 16
#: From this many elements on, another collective costs less than sending chunk by chunk.
MANY = 1 << 22
#: With fewer rows per rank than this, rounding up to a multiple of ranks matters.
FEW_ROWS = 8


@dataclass(frozen=True, slots=True)
class FlatPacking:
    """The offset of each parameter, by its number; the ends of chunks; the dims of the rows."""

    offsets: dict[int, int]
    ends: tuple[int, ...]
    dims: dict[int, int]


def is_little(padding: int, total: int) -> bool:
    """Whether this much padding is acceptable for `total` elements."""
    return padding <= max(LITTLE, total * MOST_PADDING)


def rows_of(shape: Sequence[int], dim: int) -> tuple[int, int]:
    """The number of rows along a dim, and the length of one."""
    return shape[dim], math.prod((*shape[:dim], *shape[dim + 1 :]))


def split_dim(shape: Sequence[int], parts: int) -> int:
    """The dim along which a parameter is split by default.

    >>> split_dim((4096, 4096), parts=64), split_dim((8, 28672, 4096), parts=64)
    (0, 1)
    """
    numel, missing = math.prod(shape), -shape[0] % parts
    few = shape[0] < FEW_ROWS * parts
    if few and missing * (numel // shape[0]) > max(FEW, numel * MOST_PADDING):
        return min(range(len(shape)), key=lambda dim: (-shape[dim] % parts) / shape[dim])
    return 0


def pack(shapes: Sequence[Sequence[int]], parts: int) -> list[FlatPacking]:
    """Buffers for parameters of these shapes; most often one. See Note [Flat buffers].

    >>> pack([(4, 3), (6,)], parts=2)
    [FlatPacking(offsets={0: 0, 1: 12}, ends=(9, 18), dims={0: 0, 1: 0})]
    """
    total = sum(math.prod(shape) for shape in shapes)
    usual = [split_dim(shape, parts) for shape in shapes]
    short = [_dim_of_short_rows(shape) for shape in shapes]
    for num_buffers in (1, 2, 3) if total >= MANY else (1,):
        for dims in (usual, short):
            for numbers in _divided(shapes, dims, num_buffers):
                packings = [_packed(each, shapes, dims, parts) for each in numbers]
                padding = sum(packing.ends[-1] for packing in packings) - total
                if is_little(padding, total):
                    return packings
    uneven = [_cut_near(shapes, dims, parts) for dims in (usual, short)]
    return [min(uneven, key=lambda packing: max(lengths_of(packing.ends)))]


def lengths_of(ends: Sequence[int]) -> list[int]:
    """The lengths of consecutive chunks.

    >>> lengths_of((9, 18))
    [9, 9]
    """
    return [end - start for start, end in itertools.pairwise((0, *ends))]


def _dim_of_short_rows(shape: Sequence[int]) -> int:
    """The largest dim; not the last one of a stack, so that contiguous copies stay long."""
    return max(range(min(2, len(shape))), key=lambda dim: shape[dim])


def _divided(
    shapes: Sequence[Sequence[int]], dims: list[int], num_buffers: int
) -> Iterator[list[list[int]]]:
    """The parameters of each of several buffers, by number: similar row lengths together."""
    rows = [rows_of(shape, dim)[1] for shape, dim in zip(shapes, dims, strict=True)]
    lengths = sorted(set(rows), reverse=True)
    for ends in itertools.combinations(range(1, len(lengths)), num_buffers - 1):
        bounds = itertools.pairwise((0, *ends, len(lengths)))
        yield [
            [number for number, row in enumerate(rows) if row in lengths[low:high]]
            for low, high in bounds
        ]


def _cut_near(shapes: Sequence[Sequence[int]], dims: list[int], parts: int) -> FlatPacking:
    """Chunks that end at the row boundaries nearest to equal lengths."""
    items = {number: rows_of(shape, dims[number]) for number, shape in enumerate(shapes)}
    order = sorted(items, key=lambda i: -items[i][1])
    sizes = [items[i][0] * items[i][1] for i in order]
    starts = list(itertools.accumulate(sizes, initial=0))
    ends, at = [], 0
    for chunk in range(1, parts + 1):
        wanted = starts[-1] * chunk // parts
        while starts[at + 1] < wanted:
            at += 1
        row = items[order[at]][1]
        ends.append(starts[at] + (2 * (wanted - starts[at]) + row) // (2 * row) * row)
    return FlatPacking(dict(zip(order, starts, strict=False)), tuple(ends), dict(enumerate(dims)))


def _packed(
    numbers: list[int], shapes: Sequence[Sequence[int]], dims: list[int], parts: int
) -> FlatPacking:
    """Chunks of one length, with padding between parameters."""
    items = {number: rows_of(shapes[number], dims[number]) for number in numbers}
    order = sorted(numbers, key=lambda i: -items[i][1])
    least = -(-sum(items[i][0] * items[i][1] for i in order) // parts)
    # An item longer than a chunk crosses two ends of chunks: both have to be between its rows.
    unit = math.lcm(*(items[i][1] for i in order if items[i][0] * items[i][1] > least))
    length = -(-least // unit) * unit
    for tries in itertools.count():
        offsets = _placed(order, items, parts, length)
        if offsets is not None:
            ends = tuple(range(length, parts * length + 1, length))
            return FlatPacking(offsets, ends, {number: dims[number] for number in offsets})
        length += unit << (tries // 32)
    raise AssertionError("one chunk that holds everything always fits")


def _placed(
    order: list[int], items: dict[int, tuple[int, int]], parts: int, length: int
) -> dict[int, int] | None:
    offsets, at, left = {}, 0, list(order)
    while left:
        i = left[0]
        num, row = items[i]
        padding, end_of_chunk = 0, (at // length + 1) * length
        if at + num * row > end_of_chunk:
            padding = (end_of_chunk - at) % row
            start = at + padding
            second_end = start + length if start % length == 0 else end_of_chunk + length
            if start + num * row > second_end and length % row:
                return None
        if padding:
            filler = _filler(left, items, padding, end_of_chunk - at, row, length)
            if filler is not None:
                i, padding = filler, 0
        offsets[i] = at + padding
        at = offsets[i] + items[i][0] * items[i][1]
        left.remove(i)
    return offsets if at <= parts * length else None


def _filler(
    left: list[int],
    items: dict[int, tuple[int, int]],
    padding: int,
    room: int,
    row: int,
    length: int,
) -> int | None:
    """An item to place instead of padding: one that fits, or one with short rows that ends later.

    `room` is what is left of the chunk. Biases fit anywhere.
    """
    for j in left:
        if items[j][0] * items[j][1] <= padding:
            return j
    for j in left:
        size = items[j][0] * items[j][1]
        if items[j][1] < row and room % items[j][1] == 0 and room < size <= room + length:
            return j
    return None


def rows_per_chunk(offset: int, num_rows: int, row: int, ends: Sequence[int]) -> list[int]:
    """How many rows of an item lie in each chunk.

    >>> rows_per_chunk(offset=12, num_rows=6, row=1, ends=(9, 18))
    [0, 6]
    """
    last = offset + num_rows * row
    return [
        max(0, min(last, end) - max(offset, start)) // row
        for start, end in itertools.pairwise((0, *ends))
    ]
