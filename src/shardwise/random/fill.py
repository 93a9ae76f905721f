"""Filling blocks of a tensor with the values that one device would draw for the whole of it.

Note [Drawing in chunks]
Torch's CPU generator is a sequence: a tensor takes its values from it in memory order. So the whole
is drawn chunk by chunk into a small buffer, each block takes what belongs to it, and the generator
ends where one device would leave it. Three facts make the chunks exact; `_chunks_agree` tries them
once per op and dtype, since a build of torch may draw otherwise (through MKL), and the tests do so
at length.

- Most draws take the same values in chunks of any length.
- Normal draws into contiguous memory come in groups of 16, and the last 16 are drawn again when the
  length is no multiple of 16. So chunks are multiples of 16, and the last has at least 16 values.
- Normal draws into other memory come in pairs, of which the generator keeps the second. So a tensor
  that is not contiguous is drawn in a buffer that is not contiguous either.

A chunk of which no block holds anything is not drawn: the generator is moved on by cheaper means,
where `_words_per_value` has found that this leaves it in the same state.

On other devices the values depend on the length of the whole draw: there it is drawn at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.box import Box
from shardwise.core.layout import contiguous_stride
from shardwise.random.generators import digest, generator_for, kept

# Which boxes of a tensor a run of its values covers.


def slabs(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """The values `start` to `stop` of a row-major tensor, as few boxes in order.

    >>> for slab in slabs((4, 10), 7, 32):
    ...     print(*slab)
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
    for slab in slabs(shape[1:], start - base, stop - base):
        yield Box((row, *slab.offsets), (1, *slab.sizes))


# MERGED

#: Values per chunk: about the size of a cache, a multiple of 16.
CHUNK = 1 << 18
_GROUP = 16
#: What the values are drawn for where nobody holds the block: its result is thrown away.
ANY_PROBABILITY = 0.5


@dataclass(frozen=True, slots=True)
class Draw:
    """How one device draws a tensor: `run(tensor, operand)` writes its values.

    `operand` has what the values depend on, element by element; how many numbers are taken from the
    generator must not depend on it. `name` tells draws apart whose chunks may behave differently;
    None: never draw in chunks.
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
    """A part of the whole that somebody holds, and the part of the operand that goes with it."""

    offset: tuple[int, ...]
    part: torch.Tensor
    operand: torch.Tensor | None = None

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.part.shape))


def fill_exactly(whole: Whole, blocks: Sequence[DrawnShard], draw: Draw) -> None:
    """Write to each block what one device would have there."""
    if not math.prod(whole.shape):
        return
    device = blocks[0].part.device
    in_chunks = device.type == "cpu" and math.prod(whole.shape) > CHUNK and draw.name is not None
    if in_chunks and _chunks_agree(whole, blocks[0], draw):
        _fill_in_chunks(whole, blocks, draw)
    else:
        _fill_at_once(whole, blocks, draw, device)


def fill_quickly(blocks: Sequence[DrawnShard], draw: Draw) -> None:
    """Write other values, drawn block by block from seeds of their own."""
    device = blocks[0].part.device
    generator = generator_for(device, draw.generator)
    for block in blocks:
        seed = digest(generator, *block.box)
        with kept(generator):
            generator.manual_seed(seed & (2**63 - 1))
            draw.run(block.part, block.operand)
    # One number for the whole draw, so that the next one starts from another state.
    torch.empty(1, device=device).uniform_(generator=generator)


# -- at once ---------------------------------------------------------------------------------


def _fill_at_once(
    whole: Whole, blocks: Sequence[DrawnShard], draw: Draw, device: torch.device
) -> None:
    first = blocks[0]
    if len(blocks) == 1 and _is_whole(first, whole):
        draw.run(first.part, first.operand)
        return
    values = torch.empty_strided(whole.shape, whole.stride, dtype=whole.dtype, device=device)
    operand = None
    if first.operand is not None:
        operand = torch.empty_strided(
            whole.shape, whole.stride, dtype=first.operand.dtype, device=device
        ).fill_(ANY_PROBABILITY)
        for block in blocks:
            assert block.operand is not None, "either every block has an operand or none"
            operand[block.box.slices] = block.operand
    draw.run(values, operand)
    for block in blocks:
        block.part.copy_(values[block.box.slices])


def _is_whole(block: DrawnShard, whole: Whole) -> bool:
    part = block.part
    return (tuple(part.shape), part.stride(), part.dtype) == (
        whole.shape,
        whole.stride,
        whole.dtype,
    )


# -- in chunks -------------------------------------------------------------------------------


def _fill_in_chunks(whole: Whole, blocks: Sequence[DrawnShard], draw: Draw) -> None:
    order = sorted(range(len(whole.shape)), key=lambda d: -whole.stride[d])
    shape = [whole.shape[d] for d in order]
    num_values = math.prod(shape)
    turned = [_turned(block, order) for block in blocks]
    buffer = _buffer(CHUNK + _GROUP, whole.dtype, whole.contiguous)
    operand = None
    if blocks[0].operand is not None:
        operand = _buffer(CHUNK + _GROUP, blocks[0].operand.dtype, whole.contiguous)
    words = _words_per_value(whole, blocks[0], draw)
    stop = 0
    while stop < num_values:
        start, stop = stop, min(stop + CHUNK, num_values)
        if num_values - stop < _GROUP:
            stop = num_values
        length = stop - start
        if words and length % _GROUP == 0 and not _anyone_holds(shape, start, stop, turned):
            _skip(words * length, draw.generator)
            continue
        if operand is not None:
            operand.fill_(ANY_PROBABILITY)
            for piece, _, given in _meetings(shape, start, stop, turned, operand):
                piece.copy_(given)
        draw.run(buffer[:length], None if operand is None else operand[:length])
        for piece, part, _ in _meetings(shape, start, stop, turned, buffer):
            part.copy_(piece)


def _meetings(
    shape: Sequence[int], start: int, stop: int, blocks: Sequence[DrawnShard], run: torch.Tensor
) -> Any:
    """The pieces of a run of values that blocks hold: of the run, of the part, of the operand."""
    at = 0
    for slab in slabs(shape, start, stop):
        values = run[at : at + slab.volume].view(slab.sizes)
        at += slab.volume
        for block in blocks:
            met = slab.intersect(block.box)
            if met is not None:
                here = met.within(block.box).slices
                given = None if block.operand is None else block.operand[here]
                yield values[met.within(slab).slices], block.part[here], given


def _anyone_holds(
    shape: Sequence[int], start: int, stop: int, blocks: Sequence[DrawnShard]
) -> bool:
    return any(
        slab.intersect(block.box) is not None
        for slab in slabs(shape, start, stop)
        for block in blocks
    )


def _turned(block: DrawnShard, order: Sequence[int]) -> DrawnShard:
    """The block with its dims in the order of memory."""
    return DrawnShard(
        tuple(block.offset[d] for d in order),
        block.part.permute(*order) if order else block.part,
        None if block.operand is None else block.operand.permute(*order),
    )


def _buffer(length: int, dtype: torch.dtype, contiguous: bool) -> torch.Tensor:
    if contiguous:
        return torch.empty(length, dtype=dtype)
    return torch.empty(length, 2, dtype=dtype)[:, 0]


_agree: dict[Any, bool] = {}


def _chunks_agree(whole: Whole, block: DrawnShard, draw: Draw) -> bool:
    """Whether this build of torch draws the same in chunks as at once; tried once per kind."""
    key = (draw.name, whole.dtype, whole.contiguous)
    if key not in _agree:
        generator = generator_for(torch.device("cpu"), draw.generator)
        lengths = (1 << 15, 1 << 14, _GROUP + 3)
        with kept(generator):
            at_once = _trial(whole, block, draw, (sum(lengths),))
            after = generator.get_state()
        with kept(generator):
            pieces = _trial(whole, block, draw, lengths)
            same_state = torch.equal(after, generator.get_state())
        _agree[key] = same_state and torch.equal(at_once, pieces)
    return _agree[key]


_words: dict[Any, int] = {}


def _words_per_value(whole: Whole, block: DrawnShard, draw: Draw) -> int:
    """How many numbers of 32 bits a value takes from the generator; 0 if that does not say it all.

    Tried once per kind, from a state with and from one without half a pair of normal values.
    """
    key = (draw.name, whole.dtype, whole.contiguous)
    if key not in _words:
        generator = generator_for(torch.device("cpu"), draw.generator)
        fitting = [
            words
            for words in (1, 2)
            if all(_skips_alike(whole, block, draw, generator, words, pair) for pair in (0, 1))
        ]
        _words[key] = fitting[0] if fitting else 0
    return _words[key]


def _skips_alike(
    whole: Whole, block: DrawnShard, draw: Draw, generator: torch.Generator, words: int, pair: int
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
                _trial(whole, block, draw, (length,))
            states.append(generator.get_state())
    return torch.equal(*states)


def _skip(num_words: int, generator: torch.Generator | None) -> None:
    torch.empty(num_words, dtype=torch.uint8).random_(generator=generator)


def _trial(whole: Whole, block: DrawnShard, draw: Draw, lengths: Sequence[int]) -> torch.Tensor:
    drawn = []
    for length in lengths:
        operand = None
        if block.operand is not None:
            operand = _buffer(length, block.operand.dtype, whole.contiguous).fill_(ANY_PROBABILITY)
        drawn.append(_buffer(length, whole.dtype, whole.contiguous))
        draw.run(drawn[-1], operand)
    return torch.cat(drawn)
