"""Ops that write: in place, to `out=`, and views in place, in layouts that do not suit them."""

import weakref

import pytest
import torch
from by_hand import lay, value
from torch.nn import functional as F

import shardwise
from shardwise import LayoutError, Partial, Replicate, Shard, UnsupportedError
from shardwise.dispatch import infer
from shardwise.testing.layouts import laid_out

PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(0, (0, 5, 0, 0)), Partial()]


def whole(x):
    return x.full_tensor().detach().agreed()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.cumsum_(0),
        lambda x: x.clamp_(0),
        lambda x: x.square_(),
        lambda x: x.masked_fill_(x > 0, 2.0),
    ],
)
def test_in_place_the_tensor_stays_where_it_lies(mesh, write, placement):
    value = torch.randn(5, 6)
    x = laid_out(value, mesh, [placement])
    before, layout = x, x._layout
    assert write(x) is before
    assert x._layout is layout
    torch.testing.assert_close(whole(x), write(value.clone()))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_out_keeps_its_layout(mesh, placement):
    a, b = torch.randn(5, 6), torch.randn(5, 6)
    target = shardwise.distribute_tensor(torch.zeros(5, 6), mesh, [Shard(1)])
    layout = target._layout
    result = torch.add(laid_out(a, mesh, [placement]), laid_out(b, mesh, [Shard(0)]), out=target)
    assert result is target
    assert target._layout is layout
    torch.testing.assert_close(whole(target), a + b)


def test_out_of_several_results(mesh):
    value = torch.randn(5, 6)
    x = shardwise.distribute_tensor(value, mesh, [Shard(0)])
    values = shardwise.distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    indices = shardwise.distribute_tensor(torch.zeros(5, dtype=torch.int64), mesh, [Replicate()])
    torch.max(x, 1, out=(values, indices))
    expected = value.max(1)
    assert torch.equal(whole(values), expected.values)
    assert torch.equal(whole(indices), expected.indices)


def test_out_that_does_not_fit_is_refused(mesh):
    x = shardwise.distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)])
    short = shardwise.distribute_tensor(torch.zeros(5), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="cannot be resized"):
        torch.exp(x, out=short)
    whole_numbers = shardwise.distribute_tensor(torch.zeros(5, 6).int(), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.exp(x, out=whole_numbers)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
def test_out_of_ops_that_have_a_shape_function_only_without_it(mesh, placement):
    value = torch.randn(5, 6)
    for op in (torch.geqrf, lambda x, **out: torch.histogram(x, 4, range=(-2.0, 2.0), **out)):
        expected = op(value)
        targets = [torch.zeros_like(laid_out(e, mesh, [Shard(0)])) for e in expected]
        op(laid_out(value, mesh, [placement]), out=tuple(targets))
        for target, each in zip(targets, expected, strict=True):
            torch.testing.assert_close(whole(target), each)


def test_out_of_a_batch_norm_with_given_statistics(mesh):
    value, numbers = torch.randn(4, 3), torch.rand(3) + 1
    rest = (False, 0.1, 1e-5)
    expected = torch.native_batch_norm(value, None, None, numbers, numbers, *rest)
    x, given = (shardwise.distribute_tensor(t, mesh, [Replicate()]) for t in (value, numbers))
    targets = [torch.zeros_like(laid_out(e, mesh, [Replicate()])) for e in expected]
    torch.native_batch_norm(x, None, None, given, given, *rest, out=tuple(targets))
    torch.testing.assert_close([whole(t) for t in targets], list(expected))


def test_a_write_that_would_resize_is_refused(mesh):
    """On one device `addbmm_` makes a tensor of one entry larger, as no other op does."""
    x = shardwise.distribute_tensor(torch.ones(1), mesh, [Replicate()])
    a, b = torch.ones(2, 3, 4), torch.ones(2, 4, 5)
    assert torch.ones(1).addbmm_(a, b).shape == (3, 5)
    with pytest.raises(NotImplementedError, match=r"shape \(3, 5\) .* cannot be resized"):
        x.addbmm_(*(shardwise.distribute_tensor(t, mesh, [Shard(0)]) for t in (a, b)))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=repr)
@pytest.mark.parametrize("split", [torch.unsafe_split, torch.unsafe_chunk])
def test_an_unsafe_split_shares_memory_as_on_one_device(mesh, split, placement):
    value = torch.randn(5, 6)
    x = laid_out(value, mesh, [placement])
    found, expected = split(x, 3, 1), split(value, 3, 1)
    for written in (x, value):
        written.mul_(2)
    torch.testing.assert_close([whole(f) for f in found], list(expected))


def test_a_tensor_becomes_a_view_of_itself(mesh):
    value = torch.randn(5, 6)
    x = shardwise.distribute_tensor(value, mesh, [Shard(0)])
    x.t_()
    assert x.placements == (Shard(1),)
    assert x.shape == (6, 5)
    assert torch.equal(whole(x.unsqueeze_(0)), value.t().unsqueeze(0))


def test_strict_mode_refuses_what_a_write_would_move(mesh):
    x = shardwise.distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)])
    with shardwise.explicit_redistribution(), pytest.raises(shardwise.RedistributionError):
        x.cumsum_(0)


def test_tensors_that_a_formula_makes_are_whole(mesh):
    """The gradient of copysign for its second operand is zeros, made from a size."""
    a, b = torch.randn(5, 6), torch.randn(5, 6)
    x, y = (shardwise.distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (a, b))
    torch.copysign(x, y).sum().backward()
    assert y.grad.placements == (Shard(0),)
    assert not whole(y.grad).any()


def test_a_plain_tensor_of_a_user_function_is_still_refused(mesh):
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full(grad.shape, 2.0)

    x = shardwise.distribute_tensor(torch.randn(5, 6), mesh, [Shard(0)]).requires_grad_()
    with pytest.raises(shardwise.MixedTensorsError):
        Double.apply(x).sum().backward()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=repr)
def test_cross_entropy_with_class_weights(mesh, placement, smoothing, reduction):
    logits, target = torch.randn(7, 5, dtype=torch.float64), torch.tensor([0, 4, -100, 2, 2, 1, 3])
    weight = torch.rand(5, dtype=torch.float64)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    alone = logits.clone().requires_grad_()
    expected = F.cross_entropy(alone, target, weight, **options)
    expected.sum().backward()
    x = shardwise.distribute_tensor(logits, mesh, [placement]).requires_grad_()
    ids = shardwise.distribute_tensor(target, mesh, [Shard(0)])
    weights = shardwise.distribute_tensor(weight, mesh, [Replicate()])
    found = F.cross_entropy(x, ids, weights, **options)
    found.sum().backward()
    torch.testing.assert_close(whole(found), expected.detach())
    torch.testing.assert_close(whole(x.grad), alone.grad)


def test_cross_entropy_refuses_what_torch_refuses(mesh):
    x = shardwise.distribute_tensor(torch.randn(7, 5), mesh, [Shard(0)])
    ids = shardwise.distribute_tensor(torch.zeros(6, dtype=torch.int64), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(x, ids)


INDICES = [0, -1, (2, 3), (slice(1, 4), -2), (..., 1), (1, None, slice(0, 2)), ([0, 2], 1)]


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Replicate()], ids=repr)
def test_numbers_in_an_index_are_written_through(mesh, placement):
    start = torch.randn(5, 4)
    for index in INDICES:
        for given in (7.0, torch.randn(start[index].shape), torch.randn(1)):
            x, wanted = lay(start, mesh, [placement]), start.clone()
            wanted[index] = given
            x[index] = lay(given, mesh, [Replicate()]) if isinstance(given, torch.Tensor) else given
            torch.testing.assert_close(value(x), wanted)


def test_a_row_that_is_not_there_is_not_written(mesh):
    x = lay(torch.zeros(5, 4), mesh, [Shard(0)])
    for index in (5, -6, (0, 4), (0, 0, 0)):
        with pytest.raises(IndexError):
            x[index] = 1.0


def test_the_diagonal_is_a_view(mesh):
    for placement in (Shard(0), Shard(1), Replicate()):
        for offset in (-2, 0, 1, 9):
            x, wanted = lay(torch.zeros(5, 4), mesh, [placement]), torch.zeros(5, 4)
            x.diagonal(offset).fill_(1)
            wanted.diagonal(offset).fill_(1)
            assert torch.equal(value(x), wanted)


@pytest.mark.parametrize(
    "placements", [[Replicate(), Shard(0)], [Shard(0), Replicate()], [Replicate(), Shard(1)]]
)
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:4],
        lambda x: x[:, 1:4:2],
        lambda x: x.diagonal(),
        lambda x: x[2:3],
        lambda x: x.split([2, 4])[1],
    ],
)
def test_replicas_of_a_view_are_written_once(square, view, placements):
    values = torch.randn(6, 5)
    x = shardwise.distribute_tensor(values, square, placements)
    view(x).mul_(3).add_(1)
    view(values).mul_(3).add_(1)
    assert torch.equal(whole(x), values)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_the_memory_of_a_leaf_is_not_written_to_through_a_door(mesh, placement):
    """As a view of a leaf on one device; without gradients it may be written to."""
    leaf = shardwise.distribute_tensor(torch.ones(4), mesh, [placement]).requires_grad_()
    with pytest.raises(RuntimeError, match="modified inplace"):
        leaf.to_local().add_(1)
    if placement.is_replicate():
        with pytest.raises(RuntimeError, match="modified inplace"):
            leaf.full_tensor().mul_(2)
    plain = torch.ones(4, requires_grad=True)
    wrapped = shardwise.DTensor.from_local(plain, mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="modified inplace"):
        wrapped.add_(1)
    with torch.no_grad():
        leaf.to_local().add_(1)
    assert torch.equal(whole(leaf), torch.full((4,), 2.0))
    (leaf.to_local() * 3).sum().backward()
    assert torch.equal(whole(leaf.grad), torch.full((4,), 3.0))


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize(
    "call",
    [
        lambda far, fine: F.binary_cross_entropy(far, fine),
        lambda far, fine: F.binary_cross_entropy(fine, far, reduction="none"),
        lambda far, fine: F.binary_cross_entropy(far, fine, fine, reduction="sum"),
        lambda far, fine: torch.normal(0.0, far),
        lambda far, fine: torch.normal(fine, far),
        lambda far, fine: F.batch_norm(far[:, None], fine[:1].requires_grad_(), fine[:1]),
    ],
)
def test_values_that_one_device_refuses(mesh, call, placement):
    values = (torch.tensor([0.1, 0.2, 0.3, -1.5]), torch.rand(4))
    with pytest.raises(RuntimeError):
        call(*values)
    with pytest.raises(RuntimeError):
        call(*(shardwise.distribute_tensor(v.detach(), mesh, [placement]) for v in values))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy_is_that_of_one_device(mesh, reduction, weighted):
    logits, target, weight = torch.randn(5, 3), torch.rand(5, 3), torch.rand(3)
    found = []
    for put in (torch.clone, lambda t: shardwise.distribute_tensor(t, mesh, [Shard(0)])):
        x = put(logits).requires_grad_()
        by = None
        if weighted:
            by = weight if put is torch.clone else lay(weight, mesh, [Replicate()])
        loss = F.binary_cross_entropy(x.sigmoid(), put(target), by, reduction=reduction)
        loss.sum().backward()
        found.append((loss.detach(), x.grad))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(whole(many), one)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("equation", ["ij->ji", "ij->ij", "...i->...i"])
def test_an_einsum_that_only_turns_its_operand_is_a_view(mesh, equation, placement):
    x = lay(torch.zeros(6, 5), mesh, placement)
    torch.einsum(equation, x).add_(1)
    assert torch.equal(whole(x), torch.ones(6, 5))


@pytest.mark.parametrize(
    "copied",
    [
        lambda x: torch.diag(x.squeeze(-1)),
        lambda x: torch.diagonal_copy(x, dim1=0, dim2=1),
        torch.squeeze_copy,
        lambda x: torch.unsqueeze_copy(x, 0),
        lambda x: torch.split_copy(x, 1),
        lambda x: torch.unbind_copy(x),
        lambda x: torch.select_copy(x, 1, 0),
        lambda x: torch.slice_copy(x, 0, 0, 9),
        lambda x: torch.channel_shuffle(x.unsqueeze(1).unsqueeze(1), 1),
        lambda x: torch.permute_copy(x, (0, 2, 1)),
    ],
)
@pytest.mark.parametrize("rows", [4, 3, 1], ids="{} rows".format)
def test_a_copy_is_a_copy_where_a_rank_holds_one_entry_too(mesh, copied, rows):
    x = lay(torch.zeros(rows, 1, 1), mesh, Shard(0))
    results = copied(x)
    for result in [results] if isinstance(results, torch.Tensor) else results:
        result.add_(1)
        assert (whole(result) != 0).any() or not result.numel()
    assert not whole(x).any()


TURNS = {
    "transpose_": lambda t: t.transpose_(0, 1),
    "t_": lambda t: t.t_(),
    "swapaxes_": lambda t: t.swapaxes_(0, 1),
    "swapdims_": lambda t: t.swapdims_(0, 1),
    "unsqueeze_": lambda t: t.unsqueeze_(1),
    "squeeze_": lambda t: t.unsqueeze_(0).squeeze_(),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("turn", TURNS)
def test_a_tensor_that_becomes_its_own_view_has_views(mesh, turn, placement):
    """Gradients and values of views that were taken before, and of the tensor."""

    def run(leaf):
        x = leaf * 2
        part, row = x[1:, :2], x[0]
        TURNS[turn](x)
        part.mul_(3)
        x.add_(1)
        result = (part * part).sum() + (row * row).sum() + (x * x.detach().sin()).sum()
        result.backward()
        return [t.detach() for t in (x, part, row, leaf.grad)]

    start = torch.randn(4, 3)
    expected = run(start.clone().requires_grad_())
    found = run(lay(start, mesh, placement).requires_grad_())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one), other)


def test_a_view_that_becomes_another_view(mesh):
    def run(leaf, factor):
        x = leaf * 2
        part = x[1:]
        part.t_()
        part.mul_(factor)
        (x * x).sum().backward()
        return x.detach(), leaf.grad

    start, factor = torch.randn(4, 3), torch.randn(3, 3)
    expected = run(start.clone().requires_grad_(), factor)
    found = run(lay(start, mesh, Shard(0)).requires_grad_(), lay(factor, mesh, Replicate()))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(whole(one), other)


def test_turning_a_tensor_is_refused_where_one_device_refuses_it(mesh):
    leaf = lay(torch.randn(4, 3), mesh, Shard(0)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        leaf.t_()
    with pytest.raises(RuntimeError, match="view of a leaf"):
        leaf[1:].t_()


@pytest.mark.parametrize(
    "use",
    [lambda leaf: leaf[1:], lambda leaf: leaf[1:].flatten(), torch.exp],
    ids=["view", "view of a view", "result"],
)
def test_a_leaf_that_is_in_use_is_not_turned(mesh, use):
    """Autograd would take the views again of a leaf with other dims."""
    leaf = lay(torch.randn(4, 3), mesh, Shard(0)).requires_grad_()
    used = use(leaf)
    with torch.no_grad(), pytest.raises(shardwise.UnsupportedError, match="still in use"):
        leaf.swapaxes_(0, 1)
    used.sum().backward()
    assert used.grad_fn is not None
    assert leaf.grad.shape == (4, 3)
    del used
    with torch.no_grad():
        leaf.swapaxes_(0, 1)
    assert leaf.shape == (3, 4)


def test_a_tensor_that_is_in_use_and_retains_its_gradient_is_not_turned(mesh):
    x = lay(torch.randn(4, 3), mesh, Shard(0)).requires_grad_() * 1
    used, version = x.clamp(-1, 1), x._version
    x.retain_grad()
    with pytest.raises(UnsupportedError, match="retains its gradient"):
        x.t_()
    assert (x.shape, x._version) == ((4, 3), version)
    del used
    assert x.t_().shape == (3, 4)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)], ids=repr)
def test_torch_s_own_code_turns_tensors_too(mesh, placement):
    """It knows them by no name in Python."""
    value = torch.randn(4, 1, 3)
    x = lay(value, mesh, placement)
    for dim in (0, 1, 2, None):
        for q in (0.3, torch.tensor([0.2, 0.9])):
            with shardwise.implicit_replication():
                found = x.quantile(q, dim)
            torch.testing.assert_close(whole(found), value.quantile(q, dim))
    rows = torch.func.vmap(lambda row: row.mul(2).unsqueeze_(0).squeeze_(1))(x)
    torch.testing.assert_close(whole(rows), (value * 2).view(4, 1, 3))


@pytest.mark.parametrize(
    "placement", [Shard(0), Shard(0, (3, 1, 0, 0)), Shard(1, (0, 2, 0, 1))], ids=repr
)
def test_the_gradient_of_a_leaf_that_was_turned_lies_as_it_does(mesh, placement):
    start, weight = torch.randn(4, 3), torch.randn(3, 4)
    leaf = lay(start, mesh, placement).requires_grad_()
    with torch.no_grad():
        leaf.t_()
    (leaf * lay(weight, mesh, Replicate())).sum().backward()
    torch.testing.assert_close(whole(leaf.grad), weight)
    assert leaf.grad.placements == leaf.placements


@pytest.mark.parametrize("reduce_op", ["sum", "max"])
@pytest.mark.parametrize("write", [lambda x: x.zero_(), lambda x: x.fill_(3)])
def test_a_term_that_is_expanded_is_filled(mesh, reduce_op, write):
    plain = torch.arange(4.0).view(1, 4)
    x = lay(plain, mesh, [Partial(reduce_op)])
    write(x.expand(2, 4))
    assert torch.equal(value(x), write(plain.clone()))


@pytest.mark.parametrize("order", [1.5, 2, 3, float("inf")])
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.neg_(),
        lambda x: x.mul_(-2),
        lambda x: x.fill_(-3),
        lambda x: x.sub_(5),
        lambda x: x.clamp_(-2, -1),
        lambda x: torch._foreach_neg_([x]),
    ],
)
def test_a_norm_may_become_negative(mesh, order, write):
    plain = torch.linspace(0.1, 0.7, 7)
    norm = lay(plain, mesh, [Shard(0)]).norm(order)
    assert any(p.is_partial() for p in norm.placements)
    expected = plain.norm(order)
    write(norm)
    write(expected)
    torch.testing.assert_close(whole(norm), expected)
    torch.testing.assert_close(whole(norm + 1), expected + 1)
    torch.testing.assert_close(whole(norm.view(1).norm(order)), expected.abs())


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=repr)
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.t().mul_(x),
        lambda x: x.mul_(x.t()),
        lambda x: x.add_(x[1]),
        lambda x: x.copy_(x.t()),
        lambda x: torch.Tensor.lerp_(x, x.t(), 0.5),
        lambda x: x.mul_(x.t().detach()),
        lambda x: torch.sin(x.t(), out=x),
        lambda x: torch.sin(x.t().detach(), out=x),
    ],
)
def test_memory_that_is_read_in_another_order_is_not_written_to(mesh, placement, write):
    with pytest.raises(RuntimeError, match="some elements of the input tensor"):
        write(torch.randn(4, 4))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"read|some elements of the input tensor"):
            write(lay(torch.randn(4, 4), mesh, [placement]))


def test_a_tensor_may_be_written_to_itself(mesh):
    plain = torch.randn(4, 4)
    x = lay(plain, mesh, [Shard(0)])
    x.mul_(x)
    x.add_(x.t().t())
    x.add_(x.clone().t())
    once = 2 * plain * plain
    torch.testing.assert_close(whole(x), once + once.t())


@pytest.mark.parametrize("index", [(0, slice(0, 0)), (1, slice(1, 3)), (2, 1)], ids=repr)
@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Replicate(), Shard(1)]], ids=repr)
def test_a_number_of_another_dtype_is_cast(square, placements, index):
    plain, number = torch.zeros(4, 4, dtype=torch.float16), torch.tensor(0.5)
    x = lay(plain, square, placements)
    x[index] = lay(number, square, [Replicate(), Replicate()])
    plain[index] = number
    assert torch.equal(value(x), plain)


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "product", "max", "min"])
def test_a_tensor_does_not_fill_what_is_expanded(mesh, reduce_op):
    """One device refuses it too, though it takes a number."""
    x = shardwise.DTensor.from_local(torch.ones(1), mesh, [Partial(reduce_op)]).expand(2)
    with pytest.raises(shardwise.UnsupportedError, match="one entry stands for all"):
        x[:] = torch.tensor(3.0)


def test_results_are_not_expanded_whatever_a_shape_function_says(mesh, monkeypatch):
    def keeps_strides(x, *_):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    monkeypatch.setitem(infer.SHAPES, torch.ops.aten.diagonal_scatter.default, keeps_strides)
    plain = torch.ones(11, 1)
    x = lay(plain, mesh, [Replicate()]).expand(11, 13)
    found = x.diagonal_scatter(x.diagonal() * 0.5)
    assert torch.equal(value(found), plain.expand(11, 13).diagonal_scatter(torch.full((11,), 0.5)))


def double(x):
    return x.mul_(2)


def squash(x):
    return x.sigmoid_()


def add_up(x):
    return x.cumsum_(0)


@pytest.mark.parametrize("write", [double, squash, add_up])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial(), Partial("max")], ids=repr)
def test_entries_that_share_memory_are_written_where_they_are_or_not_at_all(mesh, placement, write):
    plain = torch.arange(15.0).view(5, 3)
    x = laid_out(plain, mesh, [placement])
    through_a_copy = {
        Shard(0): (add_up,),
        Partial(): (squash,),
        Partial("max"): (double, squash, add_up),
    }
    if write in through_a_copy.get(placement, ()):
        with pytest.raises(UnsupportedError, match="several entries share memory"):
            write(x.unfold(1, 2, 1))
    else:
        write(x.unfold(1, 2, 1))
        write(plain.unfold(1, 2, 1))
    torch.testing.assert_close(whole(x), plain)


def test_windows_that_do_not_share_memory_are_written_to(mesh):
    plain = torch.arange(15.0).view(5, 3)
    x = laid_out(plain, mesh, [Partial("max")])
    x.unfold(0, 2, 2).sigmoid_()
    plain.unfold(0, 2, 2).sigmoid_()
    torch.testing.assert_close(whole(x), plain)


def test_a_write_to_a_turned_tensor_keeps_nothing_for_backward(mesh):
    found = []
    for lay_out in (torch.clone, lambda t: lay(t, mesh, Replicate())):
        x, number = lay_out(torch.ones(2, 3)), lay_out(torch.tensor(0.5)).requires_grad_()
        x.transpose_(0, 1)
        x[:, :] = number
        x.sum().backward()
        (2 * x).sum().backward()
        found.append(number.grad)
    torch.testing.assert_close(value(found[1]), found[0])


VIEWS = {
    "itself": lambda x: x,
    "rows": lambda x: x[:2],
    "a row": lambda x: x[0],
    "turned": lambda x: x.t(),
    "flat": lambda x: x.view(-1),
    "detached": lambda x: x.detach(),
    "rows of detached": lambda x: x.detach()[:2],
}
LENT_WRITES = {
    "tensor": lambda x: x.mul_(2),
    "view": lambda x: x[:2].mul_(2),
    "other view": lambda x: x[2:].t().mul_(2),
    "detached": lambda x: x.detach().mul_(2),
    "row of detached": lambda x: x.detach()[1].mul_(2),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "index": lambda x: x.__setitem__(0, 1.0),
    "data": lambda x: x.data.mul_(2),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=repr)
@pytest.mark.parametrize("write", LENT_WRITES)
@pytest.mark.parametrize("view", VIEWS)
def test_backward_refuses_what_a_write_changed_in_a_tensor_that_was_handed_out(
    view, write, placement
):
    """Of the tensor or a view, a snapshot too; not a write to `x.data`, as on one device."""
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = lay(torch.randn(4, 4), mesh, placement).requires_grad_() * 1
        taken = VIEWS[view](x)
        factor = torch.ones((), requires_grad=True)
        kept = [(read() * factor).sum() for read in (taken.to_local, taken.full_tensor)]
        with torch.no_grad():
            LENT_WRITES[write](x)
        for number, y in enumerate(kept):
            if write == "data" or (number and placement != Replicate()):
                y.backward(retain_graph=True)  # full_tensor() gathers into new memory
                continue
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.backward()


TERM_WRITES = {
    "scaled": lambda x: x.mul_(2),
    "added": lambda x: x.add_(x),
    "reduced before": lambda x: x.cumsum_(0),
    "out": lambda x: torch.mul(x, 2.0, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 2.0),
    "view": lambda x: x[:, :2].mul_(2),
    "detached": lambda x: x.detach().zero_(),
}


@pytest.mark.parametrize("reduced", [False, True], ids=["", "reduced"])
@pytest.mark.parametrize("write", TERM_WRITES)
def test_backward_refuses_what_a_write_changed_in_terms_that_were_handed_out(mesh, write, reduced):
    x = shardwise.DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    factor = torch.ones((), requires_grad=True)
    y = (x.to_local() * factor).sum()
    if reduced:
        x.full_tensor()
        x * x  # keeps the reduction, to which the op is applied as well
    TERM_WRITES[write](x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_nothing_is_written_to_nothing_as_on_one_device(mesh):
    found = lay(torch.zeros(5, 4), mesh, [Shard(1)]).argwhere()
    assert found.mul_(2).shape == (0, 2)
    found = lay(torch.zeros(0, 1), mesh, [Replicate()]).expand(0, 2)
    assert found.mul_(2).shape == (0, 2)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_a_tensor_is_resized_to_its_own_shape_alone(mesh, placement):
    plain = torch.randn(4, 4)
    x = lay(plain.clone(), mesh, [placement])
    assert x.resize_(4, 4) is x
    assert x.resize_as_(torch.ones_like(x)) is x
    torch.testing.assert_close(whole(x), plain)
    for resize in (lambda: x.resize_(2, 8), lambda: x.resize_as_(x[:2])):
        with pytest.raises(LayoutError, match="cannot be resized"):
            resize()
    factors, pivots = torch.zeros_like(x), torch.zeros(4, dtype=torch.int32)
    torch.linalg.lu_factor(x, out=(factors, lay(pivots, mesh, [Replicate()])))
    torch.testing.assert_close(whole(factors), torch.linalg.lu_factor(plain)[0])


def test_a_view_of_the_same_shape_is_copied_to_its_base(mesh):
    """Shards of one row: torch gives their first dim another stride, and copies would overlap."""
    plain = torch.randn(4, 3, 3)
    turned = lay(plain, mesh, [Shard(0)]).transpose(2, 1)
    turned.copy_(turned.reshape(4, 3, 3))
    assert torch.equal(value(turned), plain.transpose(2, 1))


def test_a_view_that_was_copied_is_not_overwritten_by_its_own_entry(mesh):
    """One device raises: the entry is read while its memory is written."""
    x = shardwise.distribute_tensor(torch.arange(8.0).view(2, 4), mesh, [Shard(1)])
    flat = x.flatten()
    with pytest.raises(UnsupportedError, match="reads in another order"):
        flat.copy_(flat.select(-1, 2))
    flat.copy_(flat.select(-1, 2).clone())
    assert torch.equal(x.full_tensor().agreed(), torch.full((2, 4), 2.0))


INSIDE = {
    "bilinear": lambda x: F.bilinear(x[:, :2], x[:, :3], torch.ones_like(x).view(4, 2, 3)),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "einsum of entries": lambda x: torch.einsum("ij,ij->ij", x, x),
    "instance_norm": lambda x: F.instance_norm(x.view(2, 2, 6), eps=0.1),
    "linear": lambda x: F.linear(x.view(2, 2, 6), x, x[0, :4]),
    "linear of a vector": lambda x: F.linear(x[0], x, x[0, :4]),
    "linear of a matrix": lambda x: F.linear(x, x, x[0, :4]),
    "linear without a bias": lambda x: F.linear(x.view(2, 2, 6), x),
    "linear, a bias with gaps": lambda x: F.linear(x.view(2, 2, 6), x, x[:, 0]),
    "linear of what cannot be merged": lambda x: F.linear(x.view(2, 2, 6).mT, x[:, :2], x[0, :4]),
    "linear of what has gaps": lambda x: F.linear(x.view(2, 2, 6)[..., :3], x[:, :3], x[0, :4]),
    "linear, a frozen weight": lambda x: F.linear(x.view(2, 2, 6), x.detach(), x[0, :4]),
    "stft": lambda x: torch.stft(x, 4, return_complex=True, window=torch.ones_like(x[0, :4])),
}


@pytest.mark.parametrize("early", [False, True], ids=["view after", "view before"])
@pytest.mark.parametrize("op", INSIDE)
def test_a_view_of_what_an_op_makes_inside_is_no_view_of_its_result(mesh, op, early):
    """A gradient that the result retains misses what its views, written to, are used for."""

    def retained(x):
        made = INSIDE[op](x)
        before = made[:1] if early else None
        made.retain_grad()
        view = made[:1] if before is None else before
        view.mul_(2)
        view.abs().sum().backward(retain_graph=True)
        first = None if made.grad is None else made.grad.clone()
        made.sin().abs().sum().backward()
        return first, made.grad, x.grad

    value = torch.randn(4, 6, dtype=torch.float64)
    expected = retained(value.clone().requires_grad_())
    found = retained(lay(value, mesh, Shard(0)).requires_grad_())
    for one, many in zip(expected, found, strict=True):
        assert (many is None) == (one is None)
        if one is not None:
            torch.testing.assert_close(whole(many), one)


def test_a_part_of_what_is_written(mesh):
    """One device raises: the part was copied here, and is broadcast over its own memory."""
    x = lay(torch.randn(2), mesh, [Shard(0)])
    with pytest.raises(UnsupportedError, match="reads in another order"):
        x.copy_(x.narrow(0, 0, 1).detach())
    other = lay(torch.randn(2), mesh, [Shard(0)])
    x.copy_(other.narrow(0, 0, 1).detach())
    assert torch.equal(value(x), value(other)[:1].expand(2))


def test_two_views_with_gaps(mesh):
    """One device does not compare memory with gaps; a shard of one entry has none."""
    plain = torch.randn(5, 4)
    x = lay(plain, mesh, [Shard(0)])
    for at in (x, plain):
        diagonal = at.diagonal(-1)
        diagonal.unflatten(-1, (1, 4)).add_(diagonal)
    assert torch.equal(value(x), plain)


@pytest.mark.parametrize("late", [False, True], ids=["none", "one after"])
def test_a_retained_gradient_counts_uses_before_it_was_asked_for(mesh, late):
    def retained(x):
        made = F.linear(x.view(2, 2, 6), x, x[0, :4])
        used = made.sin()
        made.retain_grad()
        if late:
            used = used + made.cos()
        for _ in range(2):
            used.square().sum().backward(retain_graph=True)
        alive = weakref.ref(made)
        return made.grad, x.grad, alive

    plain = torch.randn(4, 6, dtype=torch.float64)
    *expected, _ = retained(plain.clone().requires_grad_())
    *found, alive = retained(lay(plain, mesh, Shard(0)).requires_grad_())
    for one, many in zip(expected, found, strict=True):
        torch.testing.assert_close(whole(many), one)
    assert alive() is None


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_what_batch_norm_saves_is_not_written_to(mesh, placement):
    x = lay(torch.randn(5, 4, 3), mesh, placement).requires_grad_()
    out = F.batch_norm(x.mT, None, None, training=True)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("wrong", ["running_mean", "running_var", "weight", "bias"])
def test_a_batch_norm_refuses_other_numbers_of_channels(mesh, wrong):
    names = ("running_mean", "running_var", "weight", "bias")
    given = {name: lay(torch.ones(1 + (name == wrong)), mesh, Replicate()) for name in names}
    with pytest.raises(RuntimeError, match=f"1 channels: {wrong} .* found 2"):
        F.batch_norm(lay(torch.randn(3, 1, 2), mesh, Shard(0)), **given, training=True)
