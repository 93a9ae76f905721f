"""The arithmetic of runs of values, without any draw."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.random import boxes_of_range

shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shapes, st.data())
def test_boxes_cover_a_run_in_order(shape, data):
    num_values = math.prod(shape)
    start = data.draw(st.integers(0, num_values))
    stop = data.draw(st.integers(start, num_values))
    whole = torch.arange(num_values).view(shape)
    found = []
    for box in boxes_of_range(shape, start, stop):
        found += whole[box.slices].flatten().tolist()
    assert found == list(range(start, stop))


@given(shapes, st.data())
def test_a_run_is_few_boxes(shape, data):
    """Not one per row, or copying them would cost more than drawing."""
    stop = data.draw(st.integers(0, math.prod(shape)))
    start = data.draw(st.integers(0, stop))
    assert len(list(boxes_of_range(shape, start, stop))) <= max(1, 2 * len(shape))
