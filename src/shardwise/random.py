"""One device's random numbers, drawn into shards: filling them, whole draws, and `rng`.

Note [Drawing in chunks]
Torch's CPU generator is a sequence: a tensor takes its values from it in memory order. So the whole
is drawn chunk by chunk into a small buffer, each shard copies its values, and the generator ends in
the state that one device would leave. Chunks are exact because of three facts, which
`_chunks_agree` checks once per op and dtype, since a build of torch may differ (with MKL).

- Most draws take the same values in chunks of any length.
- Normal draws into contiguous memory come in groups of 16, and the last 16 are drawn again when the
  length is not a multiple of 16. So chunks are multiples of 16, and the last has at least 16
  values.
- Normal draws into other memory come in pairs, and the generator keeps the second value. So a
  tensor that is not contiguous is drawn into a buffer that is not contiguous either.

A chunk that meets no shard is not drawn: the generator is advanced more cheaply, if
`_words_per_value` has found that this leaves it in the same state.

On other devices the values depend on the length of the whole draw, so it is drawn at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.agreement import gather
from shardwise.comm.watch import because
from shardwise.core.box import Box
from shardwise.core.layout import Layout, contiguous_stride, dense_stride, differing_axes
from shardwise.core.mesh import Coordinate, Grid
from shardwise.core.placements import Partial, Shard
from shardwise.errors import ArgumentError, RankMismatchError
from shardwise.simulation.ranks import each_rank, localize, no_values, on_rank, parts_with_ranks

#: Values per chunk: about the size of a cache, a multiple of 16.
CHUNK = 1 << 18
_GROUP = 16
#: The operand for values outside the shards, which are thrown away.
ANY_PROBABILITY = 0.5


@dataclass(frozen=True, slots=True)
class Draw:
    """How one device draws a tensor: `run(tensor, operand)` writes its values.

    The values depend elementwise on `operand`; the count of numbers taken from the generator must
    not. `name` distinguishes draws whose chunks may behave differently; None: never draw in chunks.
    """

    run: Callable[[torch.Tensor, torch.Tensor | None], object]
    name: Hashable | None
    generator: torch.Generator | None = None


@dataclass(frozen=True, slots=True)
class Whole:
    """The tensor that one device would draw."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def contiguous(self) -> bool:
        dense = contiguous_stride(self.shape)
        pairs = zip(self.shape, self.stride, dense, strict=True)
        return all(size == 1 or a == b for size, a, b in pairs)


@dataclass(frozen=True, slots=True)
class DrawnShard:
    """A shard to fill, and the matching shard of the operand."""

    offset: tuple[int, ...]
    part: torch.Tensor
    operand: torch.Tensor | None = None

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.part.shape))


def fill_exactly(whole: Whole, shards: Sequence[DrawnShard], draw: Draw) -> None:
    """Write to each shard the values that one device would have there."""
    if not math.prod(whole.shape):
        draw.run(shards[0].part, shards[0].operand)  # draws nothing; raises as one device does
        return
    device = shards[0].part.device
    in_chunks = device.type == "cpu" and math.prod(whole.shape) > CHUNK and draw.name is not None
    if in_chunks and _chunks_agree(whole, shards[0], draw):
        _fill_in_chunks(whole, shards, draw)
    else:
        _fill_at_once(whole, shards, draw, device)


def fill_quickly(shards: Sequence[DrawnShard], draw: Draw) -> None:
    """Draw each shard from its own seed; the values are not one device's."""
    device = shards[0].part.device
    generator = generator_for(device, draw.generator)
    for shard in shards:
        seed = digest(generator, *shard.box)
        with kept(generator):
            generator.manual_seed(seed & (2**63 - 1))
            draw.run(shard.part, shard.operand)
    # Advance the generator, so that the next draw starts from another state.
    torch.empty(1, device=device).uniform_(generator=generator)


# -- at once ---------------------------------------------------------------------------------


def _fill_at_once(
    whole: Whole, shards: Sequence[DrawnShard], draw: Draw, device: torch.device
) -> None:
    first = shards[0]
    if len(shards) == 1 and _is_whole(first, whole):
        draw.run(first.part, first.operand)
        return
    values = torch.empty_strided(whole.shape, whole.stride, dtype=whole.dtype, device=device)
    operand = None
    if first.operand is not None:
        operand = torch.empty_strided(
            whole.shape, whole.stride, dtype=first.operand.dtype, device=device
        ).fill_(ANY_PROBABILITY)
        for shard in shards:
            assert shard.operand is not None, "either every shard has an operand or none"
            operand[shard.box.slices] = shard.operand
    draw.run(values, operand)
    for shard in shards:
        shard.part.copy_(values[shard.box.slices])


def _is_whole(shard: DrawnShard, whole: Whole) -> bool:
    return Whole(tuple(shard.part.shape), shard.part.stride(), shard.part.dtype) == whole


# -- in chunks -------------------------------------------------------------------------------


def _fill_in_chunks(whole: Whole, shards: Sequence[DrawnShard], draw: Draw) -> None:
    order = sorted(range(len(whole.shape)), key=lambda d: -whole.stride[d])
    shape = [whole.shape[d] for d in order]
    num_values = math.prod(shape)
    permuted = [_in_memory_order(shard, order) for shard in shards]
    buffer = _buffer(CHUNK + _GROUP, whole.dtype, whole.contiguous)
    operand = None
    if shards[0].operand is not None:
        operand = _buffer(CHUNK + _GROUP, shards[0].operand.dtype, whole.contiguous)
    words = _words_per_value(whole, shards[0], draw)
    stop = 0
    while stop < num_values:
        start, stop = stop, min(stop + CHUNK, num_values)
        if num_values - stop < _GROUP:
            stop = num_values
        length = stop - start
        met = list(_intersections(shape, start, stop, permuted))
        if words and length % _GROUP == 0 and not met:
            _skip(words * length, draw.generator)
            continue
        if operand is not None:
            operand.fill_(ANY_PROBABILITY)
            for view, _, given in met:
                view(operand).copy_(given)
        draw.run(buffer[:length], None if operand is None else operand[:length])
        for view, part, _ in met:
            part.copy_(view(buffer))


def _intersections(
    shape: Sequence[int], start: int, stop: int, shards: Sequence[DrawnShard]
) -> Iterator[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor, Any]]:
    """The intersections of a run of values with shards, as views of run, shard and operand."""
    at = 0
    for box in boxes_of_range(shape, start, stop):
        for shard in shards:
            common = box.intersect(shard.box)
            if common is not None:
                here = common.within(shard.box).slices
                given = None if shard.operand is None else shard.operand[here]
                yield functools.partial(_view_in, at, box, common), shard.part[here], given
        at += box.volume


def _view_in(at: int, box: Box, common: Box, run: torch.Tensor) -> torch.Tensor:
    """The values of `common` in a run that holds those of `box` from position `at` on."""
    return run[at : at + box.volume].view(box.sizes)[common.within(box).slices]


def _in_memory_order(shard: DrawnShard, order: Sequence[int]) -> DrawnShard:
    """The shard with its dims in memory order."""
    return DrawnShard(
        tuple(shard.offset[d] for d in order),
        shard.part.permute(*order) if order else shard.part,
        None if shard.operand is None else shard.operand.permute(*order),
    )


def _buffer(length: int, dtype: torch.dtype, contiguous: bool) -> torch.Tensor:
    if contiguous:
        return torch.empty(length, dtype=dtype)
    return torch.empty(length, 2, dtype=dtype)[:, 0]


_agree: dict[Any, bool] = {}


def _chunks_agree(whole: Whole, shard: DrawnShard, draw: Draw) -> bool:
    """Whether this build of torch draws the same in chunks as at once; tried once per kind."""
    key = (draw.name, whole.dtype, whole.contiguous)
    if key not in _agree:
        generator = generator_for(torch.device("cpu"), draw.generator)
        lengths = (1 << 15, 1 << 14, _GROUP + 3)
        with kept(generator):
            at_once = _trial(whole, shard, draw, (sum(lengths),))
            after = generator.get_state()
        with kept(generator):
            in_chunks = _trial(whole, shard, draw, lengths)
            same_state = torch.equal(after, generator.get_state())
        _agree[key] = same_state and torch.equal(at_once, in_chunks)
    return _agree[key]


_words: dict[Any, int] = {}


def _words_per_value(whole: Whole, shard: DrawnShard, draw: Draw) -> int:
    """How many 32-bit numbers each value takes from the generator; 0 if that is not constant.

    Tried once per kind of draw, with and without half a pair of normal values in the state.
    """
    key = (draw.name, whole.dtype, whole.contiguous)
    if key not in _words:
        generator = generator_for(torch.device("cpu"), draw.generator)
        fitting = [
            words
            for words in (1, 2)
            if all(_skips_alike(whole, shard, draw, generator, words, pair) for pair in (0, 1))
        ]
        _words[key] = fitting[0] if fitting else 0
    return _words[key]


def _skips_alike(
    whole: Whole, shard: DrawnShard, draw: Draw, generator: torch.Generator, words: int, pair: int
) -> bool:
    length = 1 << 12
    states = []
    for skipping in (False, True):
        with kept(generator):
            generator.manual_seed(0)
            torch.empty(pair).normal_(generator=generator)
            if skipping:
                _skip(words * length, generator)
            else:
                _trial(whole, shard, draw, (length,))
            states.append(generator.get_state())
    return torch.equal(*states)


def _skip(num_words: int, generator: torch.Generator | None) -> None:
    torch.empty(num_words, dtype=torch.uint8).random_(generator=generator)


def _trial(whole: Whole, shard: DrawnShard, draw: Draw, lengths: Sequence[int]) -> torch.Tensor:
    drawn = []
    for length in lengths:
        operand = None
        if shard.operand is not None:
            operand = _buffer(length, shard.operand.dtype, whole.contiguous).fill_(ANY_PROBABILITY)
        drawn.append(_buffer(length, whole.dtype, whole.contiguous))
        draw.run(drawn[-1], operand)
    return torch.cat(drawn)


# -- boxes -----------------------------------------------------------------------------------


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The values `start` to `stop` of a row-major tensor, as a minimal sequence of boxes.

    >>> for box in boxes_of_range((4, 10), 7, 32):
    ...     print(*box)
    (0, 7) (1, 3)
    (1, 0) (2, 10)
    (3, 0) (1, 2)
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # inside one row
        yield from _in_row(shape, first - 1, start, stop)
        return
    yield from _in_row(shape, first - 1, start, first * inner)
    if first < last:
        yield Box.whole(shape).along(0, first, last - first)
    yield from _in_row(shape, last, last * inner, stop)


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    base = row * math.prod(shape[1:])
    for box in boxes_of_range(shape[1:], start - base, stop - base):
        yield Box((row, *box.offsets), (1, *box.sizes))


# -- torch's generators ---------------------------------------------------------------------------


def generator_for(device: torch.device, given: torch.Generator | None) -> torch.Generator:
    """The generator that an op on `device` draws from."""
    if given is not None:
        return given
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def digest(generator: torch.Generator, *more: object) -> int:
    """A hash of the generator's state and `more`."""
    state = generator.get_state().numpy().tobytes()
    mixed = hashlib.blake2b(state + repr(more).encode(), digest_size=8)
    return int.from_bytes(mixed.digest(), "little", signed=True)


def generator_kind(device: torch.device, given: torch.Generator | None) -> str:
    """The generators of all ranks, for messages."""
    return f"default {device.type} generators" if given is None else "given generators"


def generator_digest(device: torch.device, given: torch.Generator | None) -> int:
    """Equal on two ranks exactly when they would draw the same values on `device`."""
    generator = generator_for(device, given)
    if device.type != "cuda":
        return digest(generator)
    # A GPU's values depend on how many threads it spreads a draw over.
    made = torch.cuda.get_device_properties(device)
    return digest(generator, made.multi_processor_count, made.max_threads_per_multi_processor)


@contextlib.contextmanager
def kept(generator: torch.Generator) -> Iterator[None]:
    """Restore the generator's state afterwards."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)


# -- draws of a whole tensor ---------------------------------------------------------------------


_MODES = ("exact", "fast")


#: Of the whole process, since backward may run on other threads.
_mode = "exact"


class rng:
    """Set how DTensors draw random numbers, from now on or for a `with` block.

    `"exact"`, the default: the values that one device would draw, whatever the mesh and placements;
    each rank draws the whole tensor and keeps its shard. `"fast"`: each rank draws only its shard,
    from a seed that depends on the generator and the shard's box. Runs with the same seed, mesh and
    placements repeat, but the values are not one device's and depend on the placements. Compiled
    code draws exactly in both modes.

    >>> import shardwise, torch
    >>> with shardwise.simulate(2), shardwise.rng("fast"):
    ...     mesh = shardwise.init_device_mesh("cpu", (2,))
    ...     _ = torch.manual_seed(0)
    ...     x = shardwise.rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    ...     _ = torch.manual_seed(0)
    ...     again = shardwise.rand(4, device_mesh=mesh, placements=[shardwise.Shard(0)])
    >>> torch.equal(x.to_local().on_rank(1), again.to_local().on_rank(1))
    True
    """

    def __init__(self, mode: str) -> None:
        if mode not in _MODES:
            raise ArgumentError(f"rng() takes 'exact' or 'fast', found {mode!r}.")
        global _mode
        self._before, _mode = _mode, mode

    def __enter__(self) -> rng:
        return self

    def __exit__(self, *exc: Any) -> None:
        global _mode
        _mode = self._before


def draw_parts(
    layout: Layout, held: torch.Tensor, draw: Draw, operand: torch.Tensor | None = None
) -> None:
    """Write a draw of the whole tensor to the local tensor of a DTensor in `layout`."""
    device = held.device
    if device.type == "meta" or layout.grid.device_type == "meta":
        return  # as on one device: a meta tensor draws nothing
    if layout.grid.outside:
        shards = [_nothing_of(layout, device)]  # so that generators stay in step
    else:
        compare_generators_once(layout.grid, device, draw.generator)
        shards = _own_shards(layout, held, operand)
    if _mode == "fast":
        fill_quickly(shards, draw)
    else:
        fill_exactly(Whole(layout.shape, layout.stride, layout.dtype), shards, draw)


def _nothing_of(layout: Layout, device: torch.device) -> DrawnShard:
    """The shard of a rank outside the mesh."""
    shape = (0,) * layout.ndim
    operand = torch.full(shape, ANY_PROBABILITY, device=device)
    return DrawnShard(shape, torch.empty(shape, dtype=layout.dtype, device=device), operand)


def _own_shards(
    layout: Layout, held: torch.Tensor, operand: torch.Tensor | None
) -> list[DrawnShard]:
    shards = []
    for coordinates, part, given in parts_of(layout, held, operand):
        neutral = _neutral(layout, coordinates)
        if neutral is not None:
            part.fill_(neutral)
            part = torch.empty_like(part)  # still drawn, so that generators stay in step
        shards.append(DrawnShard(layout.box(coordinates[0])[0], part, given))
    return shards


def draw_of(op: Any, args: Sequence[Any], generator: torch.Generator | None) -> Draw:
    """The draw of an op that writes to its first argument."""
    # An integer from a range of 2**32 or more takes two numbers.
    wide = tuple(a for a in args if a is None or (isinstance(a, int) and abs(a) >= 2**31))
    return Draw(
        lambda tensor, _: op(tensor, *args, generator=generator),
        name=(op, wide),
        generator=generator,
    )


def parts_of(
    layout: Layout, held: torch.Tensor, operand: torch.Tensor | None
) -> Iterator[tuple[list[Coordinate], torch.Tensor, torch.Tensor | None]]:
    """Each part of a local tensor, the coordinates of its ranks, and its part of `operand`."""
    for ranks, part in parts_with_ranks(layout.grid, held):
        yield [layout.grid.coordinates[rank] for rank in ranks], part, on_rank(operand, ranks[0])


def _neutral(layout: Layout, coordinates: Sequence[Coordinate]) -> float | None:
    """The neutral element that ranks hold of a Partial draw; None if they hold the values."""
    found = {_neutral_at(layout, coordinate) for coordinate in coordinates}
    if len(found) > 1:
        raise RankMismatchError(
            f"A draw into {layout!r} gives its values to one rank and {found - {None}} to the "
            "others, but these ranks share one tensor. Give each its own: "
            "LocalTensor.per_rank(lambda rank: x.clone())."
        )
    return found.pop()


def _neutral_at(layout: Layout, coordinate: Coordinate) -> float | None:
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial) and coordinate[axis]:
            if placement.reduce_op == "sum":
                return 0.0
            if placement.reduce_op == "product":
                return 1.0
    return None


def new_parts(layout: Layout, device: torch.device) -> torch.Tensor:
    """An uninitialised local tensor for a DTensor in `layout`."""
    if layout.grid.outside:
        return no_values(layout.grid, layout.dtype, device)
    order = layout.memory_order or range(layout.ndim)

    def here(coordinate: Coordinate) -> torch.Tensor:
        shape = layout.local_shape(coordinate)
        stride = dense_stride(shape, order)
        return torch.empty_strided(shape, stride, dtype=layout.dtype, device=device)

    return localize(layout.grid, each_rank(layout.grid, here, axes=differing_axes([layout])))


# -- generators ------------------------------------------------------------------------------------

#: Per mesh, the kinds of generators that were compared at a first draw.
_compared: weakref.WeakKeyDictionary[Grid, set[str]] = weakref.WeakKeyDictionary()


def compare_generators_once(
    grid: Grid, device: torch.device, generator: torch.Generator | None
) -> None:
    """Compare generators at the first draw on a mesh, once per kind of generator."""
    kind, kinds = generator_kind(device, generator), _compared.setdefault(grid, set())
    if kind not in kinds:
        compare_generators(grid, device, generator, "the first random draw on a mesh")
        kinds.add(kind)


def compare_generators(
    grid: Grid, device: torch.device, generator: torch.Generator | None, cause: str
) -> None:
    """Raise on every rank of the mesh unless all generators are in one state."""
    state = generator_digest(device, generator)
    with because(cause, implicit=False, always=True):
        found = gather(grid, cause, lambda _: [state]).flatten().tolist()
    groups: dict[int, list[int]] = defaultdict(list)
    for rank, number in zip(grid.submeshes[0], found, strict=True):
        groups[number].append(rank)
    if len(groups) > 1:
        states = "; ".join(f"one on ranks {ranks}" for ranks in groups.values())
        raise RankMismatchError(
            f"The {generator_kind(device, generator)} are in {len(groups)} different states: "
            f"{states}. Ranks that draw from different states would hold shards of different "
            "tensors. Call torch.manual_seed(seed) with the same seed on every rank, and draw what "
            "only one rank needs from a torch.Generator of its own."
        )


# -- while torch.compile traces: the whole is drawn, and sliced ------------------------------------


def sliced(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The local tensor of a DTensor in `layout`, from a whole tensor on every rank."""

    def here(coordinate: Coordinate) -> torch.Tensor:
        return _slice(whole, layout, coordinate).clone()

    return localize(layout.grid, each_rank(layout.grid, here, axes=differing_axes([layout])))


def _slice(whole: torch.Tensor, layout: Layout, coordinate: Coordinate) -> torch.Tensor:
    """The shard of `whole` at a coordinate, as a view."""
    offset, shape = layout.box(coordinate)
    for dim in sorted({p.dim for p in layout.placements if isinstance(p, Shard)}):
        whole = whole.narrow(dim, offset[dim], shape[dim])
    return whole


def assembled(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """A whole tensor with the shards held here; any probability will do elsewhere."""
    whole = model_of(layout, held.device, held.dtype).fill_(ANY_PROBABILITY)
    for coordinates, part, _ in parts_of(layout, held, None):
        _slice(whole, layout, coordinates[0]).copy_(part)
    return whole


def model_of(
    layout: Layout, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """An uninitialised whole tensor with one device's strides."""
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=dtype or layout.dtype, device=device
    )
