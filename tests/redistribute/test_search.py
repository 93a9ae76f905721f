"""The cheapest way between two layouts: never dearer than one axis after the other."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.core.layout import contiguous_stride, make_layout, normalize
from shardwise.core.mesh import grid_of
from shardwise.errors import LayoutError
from shardwise.redistribute.steps import cost_s, find_steps


@pytest.fixture(scope="module")
def grids():
    with shardwise.simulate(12):
        yield {
            shape: grid_of(
                shardwise.DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).view(shape))
            )
            for shape in [(4,), (2, 2), (3, 2), (2, 6), (2, 3, 2)]
        }


def layout_of(grid, placements, shape, order=None):
    normal = normalize(placements, shape, grid, order)
    return make_layout(grid, normal, shape, contiguous_stride(shape), torch.float32, order)


def one_axis_after_another(source, target):
    """What each order of changing single axes costs; only those that keep legal layouts."""
    for axes in itertools.permutations(range(source.grid.num_axes)):
        total, here = 0.0, source
        try:
            for axis in axes:
                placements = list(here.placements)
                placements[axis] = target.placements[axis]
                there = layout_of(source.grid, placements, source.shape, target.order)
                total, here = total + cost_s(here, there), there
        except LayoutError:  # two Partials that do not commute, or sizes inside another split
            continue
        yield total + cost_s(here, target)


@st.composite
def ends(draw):
    mesh_shape = draw(st.sampled_from([(2, 2), (3, 2), (2, 6), (2, 3, 2)]))
    shape = draw(st.sampled_from([(12, 12), (7, 5), (1000, 64), (24, 36, 8)]))
    kinds = [Replicate(), Partial(), *map(Shard, range(len(shape)))]
    found = []
    for _ in range(2):
        order = tuple(draw(st.permutations(range(len(mesh_shape)))))
        placements = [draw(st.sampled_from(kinds)) for _ in mesh_shape]
        found.append((placements, order))
    return mesh_shape, shape, *found


@settings(max_examples=300)
@given(ends=ends())
def test_all_axes_together_are_never_dearer(grids, ends):
    mesh_shape, shape, before, after = ends
    grid = grids[mesh_shape]
    source = layout_of(grid, before[0], shape, before[1])
    target = layout_of(grid, after[0], shape, after[1])
    together = cost_s(source, target)
    for apart in one_axis_after_another(source, target):
        assert together <= apart + 1e-12
    # And it is a way: each step goes on where the one before ended.
    steps = find_steps(source, target)
    for one, two in itertools.pairwise(steps):
        assert one.target is two.source
    if steps:
        assert (steps[0].source, steps[-1].target) == (source, target)


@pytest.mark.parametrize(
    ("mesh_shape", "before", "after"),
    [
        ((2, 2), [Shard(0), Shard(1)], [Shard(1), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)], [Shard(1), Shard(1)]),
        ((2, 6), [Shard(1), Shard(0)], [Shard(0), Shard(1)]),
        ((2, 6), [Partial(), Shard(0)], [Shard(0), Replicate()]),
        ((2, 3, 2), [Shard(0), Shard(1), Shard(0)], [Shard(1), Shard(0), Shard(1)]),
    ],
)
def test_together_can_be_cheaper(grids, mesh_shape, before, after):
    grid, shape = grids[mesh_shape], (1000, 64)
    source, target = layout_of(grid, before, shape), layout_of(grid, after, shape)
    assert cost_s(source, target) < 0.95 * min(one_axis_after_another(source, target))


@pytest.mark.parametrize(
    ("before", "after", "kinds"),
    [
        (Shard(0), Shard(1), ["all_to_all"]),
        (Partial(), Shard(0), ["reduce_scatter"]),
        (Replicate(), Shard(0), ["slice"]),
        (Replicate(), Partial(), ["to_partial"]),
        (Replicate(), Partial("max"), ["to_partial"]),
        (Partial(), Partial("max"), ["all_reduce", "to_partial"]),
        (Shard(0), Partial(), ["all_gather", "to_partial"]),
        (Shard(0, (1000, 0, 0, 0)), Shard(1), ["all_to_all"]),
        (Shard(0, (1000, 0, 0, 0)), Shard(0), ["resplit"]),
        (Shard(0), Shard(0, (0, 400, 200, 400)), ["resplit"]),
    ],
    ids=repr,
)
def test_one_axis(grids, before, after, kinds):
    grid = grids[4,]
    steps = find_steps(*(layout_of(grid, [p], (1000, 64)) for p in (before, after)))
    assert [step.kind for step in steps] == kinds
