"""Whatever the two layouts, the global value stays what it was, and so does its gradient."""

import itertools

import pytest
import torch
from by_hand import lay, value
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import DTYPES
from time_limit import cpu_limit

import shardwise
from shardwise import ArgumentError, DTensor, LocalTensor, Partial, Replicate, Shard
from shardwise.debug import CommDebugMode

REDUCE_OPS = ("sum", "avg", "max", "min", "product")


def integers(shape):
    """Floats whose sums and products are exact."""
    return torch.randint(-8, 8, shape).float()


def random_bits(shape):
    """Every kind of float: what only moves must arrive to the bit."""
    bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64).to(torch.int32)
    return bits.view(torch.float32)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def movable(shape, parts):
    """Placements between which data only moves."""
    found = [Replicate()]
    for dim, size in enumerate(shape):
        found += [Shard(dim), Shard(dim, sizes=(size, *[0] * (parts - 1)))]
        if size:
            found.append(Shard(dim, sizes=(*[0] * (parts - 2), 1, size - 1)))
    return found


SHAPES = [(8, 4), (5, 3), (2, 3), (0, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_data_moves_to_the_bit(mesh, shape):
    whole = random_bits(shape)
    for before, after in itertools.product(movable(shape, 4), repeat=2):
        moved = lay(whole, mesh, [before]).redistribute(placements=[after])
        assert same_bits(value(moved), whole), (before, after)
        assert same_bits(moved.full_tensor().agreed(), whole), (before, after)


@pytest.mark.parametrize("reduce_op", REDUCE_OPS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_to_and_from_partial(mesh, shape, reduce_op):
    whole = integers(shape)
    partial = Partial(reduce_op)
    for other in [*movable(shape, 4), *map(Partial, REDUCE_OPS)]:
        reduced = lay(whole, mesh, [partial]).redistribute(placements=[other])
        assert torch.equal(value(reduced), whole), (partial, other)
        opened = lay(whole, mesh, [other]).redistribute(placements=[partial])
        assert torch.equal(value(opened), whole), (other, partial)
        assert opened.placements == (partial,)


@st.composite
def journeys(draw):
    """`(mesh shape, tensor shape, (placements, order) before, … after)` on two or three axes."""
    mesh_shape = draw(st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 2, 2), (2, 3, 2), (1, 2, 3)]))
    shape = draw(st.sampled_from([(8, 12), (7, 5), (4, 3), (1, 2), (0, 5), (6,), (5, 2, 3)]))
    reduce_op = draw(st.sampled_from(REDUCE_OPS))
    ends = []
    for _ in range(2):
        order = tuple(draw(st.permutations(range(len(mesh_shape)))))
        placements = [Replicate()] * len(mesh_shape)
        for axis in order:
            kinds = [Replicate(), Partial(reduce_op), *map(Shard, range(len(shape)))]
            placements[axis] = draw(st.sampled_from(kinds))
        outer = placements[order[0]]
        if outer.is_shard() and draw(st.booleans()):
            first = draw(st.integers(0, shape[outer.dim]))
            rest = [0] * (mesh_shape[order[0]] - 2)
            if mesh_shape[order[0]] > 1:
                sizes = (first, *rest, shape[outer.dim] - first)
                placements[order[0]] = Shard(outer.dim, sizes)
        ends.append((tuple(placements), order))
    return mesh_shape, shape, *ends


def assert_same(found, expected, placements):
    """Averages over an axis of three are rounded; all else is exact."""
    rounded = any(p.is_partial("avg") for p in placements)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if rounded else 0)


@pytest.mark.slow
@settings(max_examples=300)
@given(journey=journeys())
def test_several_axes_in_any_order(mesh_of, journey):
    mesh_shape, shape, before, after = journey
    torch.manual_seed(0)
    whole = integers(shape)
    x = lay(whole, mesh_of(mesh_shape), *before)
    moved = x.redistribute(placements=after[0], order=after[1])
    for found in (value(moved), moved.full_tensor().agreed(), value(x)):
        assert_same(found, whole, [*before[0], *after[0]])


@settings(max_examples=100)
@given(journey=journeys())
def test_the_gradient_is_the_identity_on_global_values(mesh_of, journey):
    mesh_shape, shape, before, after = journey
    torch.manual_seed(0)
    mesh = mesh_of(mesh_shape)
    x = lay(integers(shape), mesh, *before).requires_grad_()
    moved = x.redistribute(placements=after[0], order=after[1])
    upstream = integers(shape)
    rest = [Replicate()] * (len(mesh_shape) - 1)
    for placements in ([Replicate(), *rest], [Shard(0), *rest]):
        (grad,) = torch.autograd.grad(moved, x, lay(upstream, mesh, placements), retain_graph=True)
        assert torch.equal(value(grad), upstream)


def test_partials_that_do_not_commute_are_refused_or_have_one_value(square):
    """A sum of maxima is not a maximum of sums: the value must not depend on the way taken."""
    terms = torch.tensor([[1.0, 5.0], [4.0, 2.0]])
    try:
        x = shardwise.DTensor.from_local(
            shardwise.LocalTensor.per_rank(lambda rank: terms.flatten()[rank].view(1)),
            square,
            [Partial("sum"), Partial("max")],
        )
    except ValueError:
        return
    direct = x.full_tensor().agreed()
    for stop in ([Replicate(), Partial("max")], [Partial("sum"), Replicate()]):
        assert torch.equal(x.redistribute(placements=stop).full_tensor().agreed(), direct)


KINDS = [Replicate(), Shard(0), Shard(1), *map(Partial, REDUCE_OPS)]


@pytest.mark.slow
@pytest.mark.parametrize("before", [*itertools.product(KINDS, repeat=2)], ids=str)
def test_every_pair_of_kinds_on_two_axes(square, before):
    """Also where the way leads past Partials that do not commute: a product, and a sum."""
    whole, upstream = torch.randint(1, 8, (3, 5)).double(), integers((3, 5)).double()
    try:
        x = lay(whole, square, before).requires_grad_()
    except shardwise.LayoutError:
        return  # such a tensor has no unique value
    for after in itertools.product(KINDS, repeat=2):
        ops = {p.reduce_op for p in after if p.is_partial()}
        if len(ops) > 1 and ops != {"sum", "avg"}:
            with pytest.raises(shardwise.LayoutError, match="no unique value"):
                x.redistribute(placements=after)
            continue
        moved = x.redistribute(placements=after)
        assert torch.equal(moved.full_tensor().agreed(), whole), after
        (grad,) = torch.autograd.grad(moved, x, lay(upstream, square, [Shard(1), Replicate()]))
        assert torch.equal(value(grad), upstream), after


# -- what a caller may rely on ---------------------------------------------------------------


def test_placements_say_who_holds_what(mesh_of):
    """Without an order they mean the default one, whatever the tensor has passed through."""
    mesh = mesh_of((2, 2, 2))
    whole = integers((8, 8))
    places = list(itertools.product([Replicate(), Shard(0), Shard(1)], repeat=3))
    for before in places:
        x = shardwise.distribute_tensor(whole, mesh, before)
        for after in places:
            y = x.redistribute(placements=after)
            again = shardwise.DTensor.from_local(y.to_local(), mesh, y.placements)
            assert again._layout is y._layout, (before, after)
            assert torch.equal(again.full_tensor().agreed(), whole), (before, after)


def test_another_order_is_asked_for_and_shown(square):
    both = [Shard(0), Shard(0)]
    x = lay(integers((8,)), square, both)
    swapped = x.redistribute(placements=both, order=[1, 0])
    assert "order=(1, 0)" in repr(swapped)
    assert "order" not in repr(x)
    assert swapped._layout != x._layout
    back = swapped.redistribute(placements=both)
    assert back._layout is x._layout
    assert torch.equal(back.to_local().on_rank(1), x.to_local().on_rank(1))
    # What is reduced on the way keeps the order that the tensor has.
    grads = torch.autograd.grad((swapped.requires_grad_() * 2).sum(), swapped)
    assert grads[0]._layout.order == (1, 0)
    with pytest.raises(shardwise.LayoutError, match=r"order=\(1, 0\)"):
        shardwise.distribute_tensor(swapped.detach(), square, both)


def test_where_nothing_changes_the_tensor_itself_is_returned(square):
    x = lay(integers((4, 4)), square, [Shard(0), Shard(1)])
    assert x.redistribute(placements=[Shard(0), Shard(1)]) is x
    assert x.redistribute(square, [Shard(-2), Shard(-1)], order=[1, 0]) is x


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Replicate(), Shard(0)),
        (Replicate(), Partial("sum")),
        (Replicate(), Partial("max")),
        (Shard(0), Replicate()),
        (Shard(0), Shard(1)),
        (Partial(), Replicate()),
    ],
)
def test_the_result_is_a_tensor_of_its_own(mesh, before, after):
    whole = integers((4, 4))
    x = lay(whole, mesh, [before])
    moved = x.redistribute(placements=[after])
    moved.to_local().zero_()
    assert torch.equal(value(x), whole)
    assert torch.equal(value(moved), torch.zeros(4, 4))


def test_each_rank_has_a_term_of_its_own_to_write_to(mesh):
    """The average of equal values is that value: simulated ranks must not share one tensor."""
    whole, terms = integers((4, 4)), LocalTensor.per_rank(lambda rank: torch.full((4, 4), rank))
    x = lay(whole, mesh, [Replicate()]).redistribute(placements=[Partial("avg")])
    x.add_(DTensor.from_local(terms.to(whole.dtype), mesh, [Partial("avg")]))
    assert torch.equal(value(x), whole + 1.5)


def test_an_axis_of_one_rank():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (1, 4))
        whole = integers((6, 3))
        for before in (Shard(0), Replicate(), Partial(), Partial("avg")):
            x = lay(whole, mesh, [before, Shard(0)])
            for after in (Shard(1), Replicate(), Partial("max")):
                assert torch.equal(value(x.redistribute(placements=[after, Shard(0)])), whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves_to_the_bit(mesh, dtype):
    whole = torch.randint(0, 2, (5, 3)).to(dtype)
    x = shardwise.distribute_tensor(whole, mesh, [Shard(0)])
    for after in (Replicate(), Shard(1), Shard(0, (0, 4, 0, 1))):
        moved = x.redistribute(placements=[after])
        assert moved.dtype == dtype
        back = moved.redistribute(placements=[Shard(0)]).to_local()
        found = torch.cat([back.on_rank(rank) for rank in range(4)])
        assert torch.equal(found.view(torch.uint8), whole.view(torch.uint8))


def test_reductions_without_a_meaning_are_refused(mesh):
    for reduce_op, dtype in (("avg", torch.int64), ("max", torch.complex64)):
        x = shardwise.DTensor.from_local(torch.ones(4).to(dtype), mesh, [Partial(reduce_op)])
        for after in (Replicate(), Shard(0)):
            with pytest.raises(ValueError, match=r"Partial\('sum'\)"):
                x.redistribute(placements=[after])


@pytest.mark.parametrize("before", [Shard(0), Shard(1), Replicate(), Partial()], ids=repr)
@pytest.mark.parametrize("after", [Shard(0), Shard(1), Replicate(), Partial()], ids=repr)
def test_tensors_that_are_not_contiguous(mesh, before, after):
    """Columns first in memory, and a view with gaps: the values and the global strides stay."""
    whole = integers((6, 8)).t()
    x = shardwise.distribute_tensor(whole, mesh, [Replicate()]).redistribute(placements=[before])
    assert x.stride() == (1, 8)
    moved = x.redistribute(placements=[after])
    assert moved.stride() == (1, 8)
    assert torch.equal(value(moved), whole)
    held = [integers((4, 10))[:, ::3] for _ in range(4)]
    gaps = LocalTensor.per_rank(lambda rank: held[0 if before == Replicate() else rank])
    y = shardwise.DTensor.from_local(gaps, mesh, [before])
    assert torch.equal(value(y.redistribute(placements=[after])), value(y))


@pytest.mark.parametrize("dtype", [torch.int16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("after", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_dtypes_that_gloo_does_not_reduce(mesh, dtype, after):
    """Small integers: exact in every one of them."""
    terms = shardwise.LocalTensor.per_rank(lambda rank: torch.full((5, 3), rank).to(dtype))
    x = shardwise.DTensor.from_local(terms, mesh, [Partial()])
    moved = x.redistribute(placements=[after])
    assert moved.dtype == dtype
    # torch does not compare float8 tensors, so each part is looked at as float32.
    parts = [moved.to_local().on_rank(rank).float() for rank in range(4)]
    assert all(bool((part == 6).all()) for part in parts)
    assert sum(part.numel() for part in parts) == 15 * (4 if after == Replicate() else 1)


def test_requests_that_make_no_sense_are_refused(square):
    x = lay(integers((4, 4)), square, [Shard(0), Replicate()])
    with pytest.raises(TypeError, match="needs placements"):
        x.redistribute()
    with pytest.raises(ValueError, match="1 placements"):
        x.redistribute(placements=[Shard(0)])
    other = shardwise.init_device_mesh("cpu", (4,))
    with pytest.raises(ValueError, match="one mesh"):
        x.redistribute(other, [Shard(0)])


def test_an_expanded_tensor_stays_expanded(mesh):
    """Ops lay their results out by the strides of their operands, on parts as on the whole."""
    rows = shardwise.distribute_tensor(torch.arange(12.0).view(1, 4, 3), mesh, [Shard(1)])
    columns = torch.arange(60.0).view(3, 5, 4).permute(1, 2, 0)
    for after in (Shard(0), Shard(2), Replicate()):
        moved = rows.expand(5, 4, 3).redistribute(placements=[after])
        parts = [moved.to_local().on_rank(rank) for rank in range(4)]
        assert {part.stride(0) for part in parts if part.shape[0] > 1} == {0}
        assert torch.equal(value(moved)[4], torch.arange(12.0).view(4, 3))
        other = shardwise.distribute_tensor(columns, mesh, [after])
        product = rows.expand(5, 4, 3) * other
        viewed = product.permute(2, 0, 1).view(3, 20)  # possible, since memory has columns first
        assert torch.equal(value(viewed), (value(moved) * columns).permute(2, 0, 1).view(3, 20))


@pytest.mark.parametrize("before", [Shard(0), Shard(1), Replicate(), Partial()])
@pytest.mark.parametrize("after", [Shard(0), Shard(1), Replicate()])
def test_what_travels_is_cast_before_it_leaves(mesh, before, after):
    whole = integers((7, 5))
    moved = lay(whole, mesh, [before]).requires_grad_()
    with CommDebugMode() as comm:
        result = moved.redistribute(
            mesh, [after], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
        (result.double() * 3).sum().backward()
    assert (result.dtype, result.placements) == (torch.bfloat16, (after,))
    assert torch.equal(value(result), whole.to(torch.bfloat16))
    assert moved.grad.dtype == torch.float32
    assert torch.equal(value(moved.grad), torch.full((7, 5), 3.0))
    with CommDebugMode() as wide_comm:
        lay(whole, mesh, [before]).redistribute(mesh, [after])
    forward = sum(event.num_bytes for event in comm.events if event.phase == "forward")
    assert forward * 2 == wide_comm.get_total_bytes()
    with pytest.raises(ArgumentError, match="forward_dtype is a"):
        moved.redistribute(mesh, [after], forward_dtype="bfloat16")


@pytest.mark.parametrize("shape", [(1024, 1024), (1030, 2049)], ids=["even", "uneven"])
def test_a_thousand_ranks_take_time_for_what_moves(shape):
    whole = torch.arange(shape[0] * shape[1]).view(shape)
    with shardwise.simulate(1024):
        mesh = shardwise.init_device_mesh("cpu", (1024,))
        x = shardwise.distribute_tensor(whole, mesh, [Shard(0)])
        with cpu_limit(4):  # a loop over pairs of ranks takes 10 and more
            y = x.redistribute(placements=[Shard(1)])
        assert torch.equal(torch.cat([y._local.on_rank(r) for r in range(1024)], 1), whole)
        assert torch.equal(y.redistribute(placements=[Shard(0)]).full_tensor().agreed(), whole)
