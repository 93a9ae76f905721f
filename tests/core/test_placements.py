import dataclasses
import pickle

import pytest
import torch

import shardwise
from shardwise import MaskPartial, Partial, Replicate, Shard
from shardwise.core.layout import contiguous_stride, make_layout, normalize
from shardwise.core.mesh import grid_of

ONE_OF_EACH = [
    Shard(0),
    Shard(1),
    Shard(-1),
    Shard(0, sizes=(3, 1)),
    Shard(0, sizes=(1, 3)),
    Replicate(),
    *(Partial(op) for op in ("sum", "avg", "product", "max", "min")),
    MaskPartial(logical_shape=(8, 4)),
    MaskPartial(logical_shape=(9, 4)),
    MaskPartial(logical_shape=(8, 4), logical_dim=1),
]


@pytest.mark.parametrize("placement", ONE_OF_EACH, ids=repr)
def test_placements_cannot_be_changed(placement):
    for field in dataclasses.fields(placement):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(placement, field.name, 0)
    with pytest.raises((AttributeError, TypeError)):
        placement.mask = torch.ones(1)


def test_placements_are_equal_by_value_and_only_by_value():
    twins = [dataclasses.replace(p) for p in ONE_OF_EACH]
    assert twins == ONE_OF_EACH
    assert len({*ONE_OF_EACH, *twins}) == len(ONE_OF_EACH)
    assert pickle.loads(pickle.dumps(ONE_OF_EACH)) == ONE_OF_EACH


def test_mask_partials_of_equal_tables_are_equal():
    one, other = MaskPartial(logical_shape=(8, 4)), MaskPartial(logical_shape=(8, 4))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Partial("sum")


def test_sizes_may_be_given_as_a_list():
    assert Shard(0, sizes=[3, 1]) == Shard(0, sizes=(3, 1))
    assert hash(Shard(0, sizes=[3, 1])) == hash(Shard(0, sizes=(3, 1)))


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        (Shard(1), "Shard(1)"),
        (Shard(0, sizes=(3, 0)), "Shard(0, sizes=(3, 0))"),
        (Replicate(), "Replicate()"),
        (Partial("max"), "Partial(max)"),
        (MaskPartial(logical_shape=(8, 4)), "MaskPartial(logical_shape=(8, 4), logical_dim=0)"),
    ],
)
def test_repr_says_what_it_is(placement, text):
    assert repr(placement) == text


def test_a_placement_knows_its_kind():
    assert [p.is_shard() for p in ONE_OF_EACH] == [isinstance(p, Shard) for p in ONE_OF_EACH]
    assert [p.is_replicate() for p in ONE_OF_EACH] == [p == Replicate() for p in ONE_OF_EACH]
    assert [p.is_partial() for p in ONE_OF_EACH] == [isinstance(p, Partial) for p in ONE_OF_EACH]
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")
    assert MaskPartial(logical_shape=(8, 4)).is_partial("sum")


def test_an_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match=r"Partial\('mean'\).*sum, avg, product, max, min"):
        Partial("mean")


@pytest.mark.parametrize("dim", ["0", 1.0, True, None])
def test_a_shard_dim_is_an_int(dim):
    with pytest.raises(TypeError, match="int"):
        Shard(dim)


@pytest.mark.parametrize(("sizes", "error"), [((3, -1), ValueError), ((3, 1.0), TypeError)])
def test_bad_sizes_are_refused(sizes, error):
    with pytest.raises(error, match="sizes"):
        Shard(0, sizes=sizes)


# -- placements in a layout ------------------------------------------------------------------


def placed(placements, shape, mesh, order=None):
    grid = grid_of(mesh)
    normal = normalize(placements, shape, grid, order)
    return make_layout(grid, normal, shape, contiguous_stride(shape), torch.float32, order)


def test_negative_dims_count_from_the_end(square):
    assert placed([Shard(-1), Shard(-3)], (4, 4, 4), square).placements == (Shard(2), Shard(0))
    sized = placed([Shard(-1, sizes=(1, 3)), Replicate()], (2, 4), square)
    assert sized.placements == (Shard(1, sizes=(1, 3)), Replicate())


def test_sizes_that_say_nothing_are_dropped(square):
    as_chunk = placed([Shard(0, sizes=(3, 2)), Replicate()], (5,), square)
    assert as_chunk is placed([Shard(0), Replicate()], (5,), square)


@pytest.mark.parametrize(
    ("placements", "match"),
    [
        ([Shard(0)], "1 placements .* mesh of 2 axes"),
        ([Shard(0)] * 3, "3 placements"),
        ([Shard(2), Replicate()], r"Shard\(2\) on axis 'rows' is out of range .*\(4, 6\)"),
        ([Replicate(), Shard(-3)], r"Shard\(-3\) on axis 'cols' is out of range"),
        ([Shard(0, sizes=(4,)), Replicate()], "1 sizes, but axis 'rows' has 2"),
        ([Shard(0, sizes=(4, 1)), Replicate()], "add up to 5, but dim 0 .* has size 4"),
        ([Shard(0), Shard(0, sizes=(1, 3))], "inside another split of dim 0, of size 4"),
        ([Shard(0), Shard(0, sizes=(2, 2))], "inside another split of dim 0, of size 4"),
        ([Shard(0, sizes=(1, 3)), Shard(0, sizes=(1, 0))], "inside another split of dim 0"),
    ],
)
def test_placements_that_do_not_fit_are_refused(square, placements, match):
    with pytest.raises(shardwise.LayoutError, match=match):
        placed(placements, (4, 6), square)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_sizes_inside_an_even_split(square, order):
    """The ranks of one axis hold the same number of rows, which the other splits unevenly."""
    placements = [Shard(0), Shard(0)]
    placements[order[1]] = Shard(0, sizes=(2, 0))
    x = torch.arange(24.0).view(4, 6)
    found = shardwise.distribute_tensor(x, square, [Replicate(), Replicate()]).redistribute(
        placements=placements, order=order
    )
    assert found.placements == tuple(placements)
    assert torch.equal(found.full_tensor().agreed(), x)
    assert torch.equal((found * found).full_tensor().agreed(), x * x)
    assert (found * found).placements == found.placements
    torch.testing.assert_close(torch.linalg.vector_norm(found).full_tensor().agreed(), x.norm())
    even = [Shard(0), Shard(0, sizes=(1, 1))]
    assert found.redistribute(placements=even).placements == (Shard(0), Shard(0))


def test_a_dim_out_of_range_of_a_scalar_is_refused(mesh):
    with pytest.raises(shardwise.LayoutError, match="out of range"):
        placed([Shard(0)], (), mesh)


def test_what_is_no_placement_is_refused(mesh):
    with pytest.raises(TypeError, match="Shard, Replicate or Partial"):
        placed([0], (4,), mesh)


def test_an_order_names_each_axis_once(square):
    for order in ((0, 0), (0,), (1, 2)):
        with pytest.raises(shardwise.LayoutError, match="order"):
            placed([Shard(0), Shard(0)], (4,), square, order)


def test_sizes_are_not_one_number():
    with pytest.raises(shardwise.ArgumentError, match="sizes are a tuple of ints, found 3"):
        Shard(0, sizes=3)
