"""The arithmetic of runs of values, without any draw."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.random.slabs import overlap, slabs

shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shapes, st.data())
def test_slabs_cover_a_run_in_order(shape, data):
    num_values = math.prod(shape)
    start = data.draw(st.integers(0, num_values))
    stop = data.draw(st.integers(start, num_values))
    whole = torch.arange(num_values).view(shape)
    found, at = [], start
    for slab in slabs(shape, start, stop):
        assert slab.start == at
        at = slab.stop
        block = whole[tuple(slice(o, o + n) for o, n in zip(slab.offset, slab.shape, strict=True))]
        found += block.flatten().tolist()
    assert found == list(range(start, stop))


@given(shapes, st.data())
def test_a_run_is_few_slabs(shape, data):
    """Not one per row, or copying them would cost more than drawing."""
    stop = data.draw(st.integers(0, math.prod(shape)))
    start = data.draw(st.integers(0, stop))
    assert len(list(slabs(shape, start, stop))) <= max(1, 2 * len(shape))


blocks = st.integers(1, 3).flatmap(
    lambda n: st.tuples(*[st.lists(st.integers(0, 4), min_size=n, max_size=n)] * 4)
)


@given(blocks)
def test_overlap(block):
    offset, shape, other, other_shape = block
    met = overlap(offset, shape, other, other_shape)
    size = [16] * len(offset)
    first, second = torch.zeros(size), torch.zeros(size)
    numbered = torch.arange(1, first.numel() + 1).view(size)
    box = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
    other_box = tuple(slice(o, o + n) for o, n in zip(other, other_shape, strict=True))
    first[box], second[other_box] = 1, 1
    both = numbered[(first * second).bool()]
    if met is None:
        assert not both.numel()
    else:
        assert numbered[box][met[0]].flatten().tolist() == both.tolist()
        assert numbered[other_box][met[1]].flatten().tolist() == both.tolist()
