"""Boxes against tensors of which they are parts."""

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.core.box import Box, overlapping, why_not_tiled


def boxes_of(ndim):
    sizes = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim).map(tuple)
    return st.builds(Box, sizes, sizes)


def marked(box):
    whole = torch.zeros([8] * len(box.sizes), dtype=torch.bool)
    whole[box.slices] = True
    return whole


@given(st.integers(0, 3).flatmap(lambda ndim: st.tuples(boxes_of(ndim), boxes_of(ndim))))
def test_what_two_boxes_share(pair):
    first, second = pair
    both = marked(first) & marked(second)
    shared = first.intersect(second)
    if shared is None:
        assert not both.any()
        return
    assert torch.equal(marked(shared), both)
    assert first.contains(shared)
    assert second.contains(shared)
    numbered = torch.arange(both.numel()).view(both.shape)
    for box in pair:
        here = numbered[box.slices]
        assert torch.equal(here[shared.within(box).slices], numbered[shared.slices])
        position = shared.position_in(box)
        assert here.flatten()[position] == numbered[shared.slices].flatten()[0]


@given(st.integers(0, 3).flatmap(lambda ndim: st.lists(boxes_of(ndim), max_size=5)))
def test_two_that_overlap_are_found(boxes):
    pairs = itertools.combinations(range(len(boxes)), 2)
    meeting = {pair for pair in pairs if (marked(boxes[pair[0]]) & marked(boxes[pair[1]])).any()}
    found = overlapping(boxes)
    assert (found is None) == (not meeting)
    assert found is None or tuple(sorted(found)) in meeting


@given(st.lists(st.integers(0, 4), max_size=3), st.data())
def test_boxes_that_fill_a_tensor_once(shape, data):
    boxes = [Box.whole(shape)]
    for _ in range(data.draw(st.integers(0, 3)) if shape else 0):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, box.sizes[dim]))
        boxes += [box.along(dim, 0, at), box.along(dim, at, box.sizes[dim] - at)]
    assert why_not_tiled(boxes, shape) is None
    if math.prod(shape):
        full = next(box for box in boxes if box.volume)
        assert "overlap" in why_not_tiled([*boxes, full], shape)
        assert "in no box" in why_not_tiled([b for b in boxes if b is not full], shape)
        assert not shape or "beyond" in why_not_tiled([full.along(0, 5, 1)], shape)
