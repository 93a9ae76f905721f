"""Who owns what: boxes against nested torch.chunk, and the identity of layouts."""

import gc
import weakref

import pytest
import torch
from by_hand import blocks
from hypothesis import given
from strategies import cases

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.core.layout import contiguous_stride, make_layout
from shardwise.core.mesh import grid_of
from shardwise.core.sizes import lengths, shard_range


def layout_of(mesh, shape, placements, order=None, dtype=torch.float32):
    return make_layout(grid_of(mesh), placements, shape, contiguous_stride(shape), dtype, order)


@given(case=cases())
def test_boxes_are_those_of_nested_chunks(mesh_of, case):
    mesh_shape, shape, placements, order = case
    layout = layout_of(mesh_of(mesh_shape), shape, placements, order)
    numbers = torch.arange(torch.Size(shape).numel()).view(shape)
    for coordinate, held in blocks(numbers, mesh_shape, placements, order).items():
        offset, size = layout.box(coordinate)
        assert size == tuple(held.shape)
        assert layout.local_shape(coordinate) == size
        box = numbers[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
        assert torch.equal(box, held)


@given(case=cases())
def test_boxes_tile_the_tensor(mesh_of, case):
    mesh_shape, shape, placements, order = case
    layout = layout_of(mesh_of(mesh_shape), shape, placements, order)
    owners = torch.zeros(shape, dtype=torch.int64)
    for coordinate in layout.grid.coordinates.values():
        offset, size = layout.box(coordinate)
        assert all(o + s <= whole for o, s, whole in zip(offset, size, shape, strict=True))
        owners[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))] += 1
    copies = 1
    for axis, placement in enumerate(placements):
        copies *= 1 if placement.is_shard() else mesh_shape[axis]
    assert (owners == copies).all()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("size", range(10))
def test_pieces_follow_each_other(size, parts):
    end = 0
    for index, length in enumerate(lengths(size, parts, None)):
        assert shard_range(size, parts, index, None) == (end, length)
        end += length
    assert end == size


def test_a_rank_may_own_nothing(mesh):
    layout = layout_of(mesh, (5, 3), (Shard(0, sizes=(0, 5, 0, 0)),))
    assert [layout.box((i,)) for i in range(4)] == [
        ((0, 0), (0, 3)),
        ((0, 0), (5, 3)),
        ((5, 0), (0, 3)),
        ((5, 0), (0, 3)),
    ]


def test_the_order_of_axes_decides_who_is_next_to_whom(square):
    """With axis 1 outermost, the ranks of one row are far apart."""
    default = layout_of(square, (8,), (Shard(0), Shard(0)))
    swapped = layout_of(square, (8,), (Shard(0), Shard(0)), (1, 0))
    places = [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [default.box(c)[0] for c in places] == [(0,), (2,), (4,), (6,)]
    assert [swapped.box(c)[0] for c in places] == [(0,), (4,), (2,), (6,)]


# -- identity --------------------------------------------------------------------------------


def test_equal_layouts_are_one_object(square):
    again = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))
    one = layout_of(square, (4, 6), (Shard(0), Partial()))
    assert layout_of(again, (4, 6), (Shard(0), Partial())) is one
    for other in (
        layout_of(square, (4, 6), (Shard(0), Partial("avg"))),
        layout_of(square, (6, 4), (Shard(0), Partial())),
        layout_of(square, (4, 6), (Shard(0), Partial()), dtype=torch.float64),
    ):
        assert other is not one


def test_other_axis_names_are_another_mesh(square):
    unnamed = shardwise.init_device_mesh("cpu", (2, 2))
    assert layout_of(unnamed, (4,), (Shard(0), Replicate())) is not layout_of(
        square, (4,), (Shard(0), Replicate())
    )


def test_layouts_of_two_worlds_are_apart():
    kept = []
    for _ in range(2):
        with shardwise.simulate(4):
            mesh = shardwise.init_device_mesh("cpu", (4,))
            kept.append((mesh, layout_of(mesh, (8,), (Shard(0),))))
    assert kept[0][0] == kept[1][0], "torch calls the meshes equal"
    assert kept[0][1] is not kept[1][1]
    assert kept[0][1].grid.world is not kept[1][1].grid.world


def test_a_mesh_of_a_past_world_is_refused():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        grid_of(mesh)
    with shardwise.simulate(4), pytest.raises(shardwise.WorldError, match="Make the mesh again"):
        grid_of(mesh)


def test_layouts_go_when_nobody_holds_them(mesh):
    layout = weakref.ref(layout_of(mesh, (1234,), (Shard(0),)))
    gc.collect()
    assert layout() is None


def test_an_order_without_meaning_is_dropped():
    with shardwise.simulate(8):
        cube = shardwise.init_device_mesh("cpu", (2, 2, 2))
        plain = layout_of(cube, (8, 8), (Shard(0), Shard(1), Replicate()))
        assert layout_of(cube, (8, 8), (Shard(0), Shard(1), Replicate()), (2, 1, 0)) is plain
        # Axes 0 and 2 share a dim: their order counts, that of axis 1 does not.
        shared = (Shard(0), Shard(1), Shard(0))
        orders = [(2, 1, 0), (1, 2, 0), (2, 0, 1)]
        swapped = {layout_of(cube, (8, 8), shared, order) for order in orders}
        orders = [None, (0, 1, 2), (1, 0, 2)]
        straight = {layout_of(cube, (8, 8), shared, order) for order in orders}
        assert len(swapped) == 1
        assert len(straight) == 1
        assert swapped != straight
