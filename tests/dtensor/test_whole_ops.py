"""Norms, attention, products and recurrent nets: the numbers of one device, and little sent."""

import copy

import pytest
import torch
from parity import whole
from torch.nn import functional as F

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor
from shardwise.debug import CommDebugMode


def compare(mesh, fn, tensors, placements, tolerance=1e-4):
    """`fn` of plain tensors and of DTensors: the result, and the gradient of every operand."""
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
    placed = [
        distribute_tensor(t, mesh, p).requires_grad_(t.is_floating_point())
        for t, p in zip(tensors, placements, strict=True)
    ]
    expected, found = fn(*plain), fn(*placed)
    torch.testing.assert_close(whole(found), expected.detach(), rtol=tolerance, atol=tolerance)
    grad = torch.randn(expected.shape)
    expected.backward(grad)
    found.backward(distribute_tensor(grad, mesh, [Replicate()] * mesh.ndim))
    for a, b in zip(plain, placed, strict=True):
        if a.grad is not None:
            torch.testing.assert_close(whole(b.grad), a.grad, rtol=tolerance, atol=tolerance)
    return found


# -- batch norm ------------------------------------------------------------------------------

BATCHES = {
    "batch": [Shard(0), Replicate()],
    "batch twice": [Shard(0), Shard(0)],
    "channels": [Shard(1), Replicate()],
    "batch and channels": [Shard(0), Shard(1)],
    "positions": [Shard(2), Replicate()],
    "nothing on most ranks": [Shard(0, sizes=(5, 0)), Shard(0)],
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("placements", BATCHES.values(), ids=BATCHES)
def test_batch_norm_sees_the_whole_batch(square, placements, training):
    net = torch.nn.BatchNorm2d(6, momentum=0.3).train(training)
    torch.nn.init.normal_(net.weight)
    sharded = shardwise.distribute_module(copy.deepcopy(net), square)
    # Far from zero: sums of squares would lose the variance here.
    x = torch.randn(5, 6, 3, 2) + 300
    plain, placed = x.clone().requires_grad_(), distribute_tensor(x, square, placements)
    placed.requires_grad_()
    expected, found = net(plain), sharded(placed)
    grad = torch.randn(expected.shape)
    expected.backward(grad)
    found.backward(distribute_tensor(grad, square, [Replicate()] * 2))
    torch.testing.assert_close(whole(found), expected.detach(), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole(placed.grad), plain.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole(sharded.weight.grad), net.weight.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(whole(sharded.bias.grad), net.bias.grad, rtol=1e-4, atol=1e-4)
    for name, value in net.named_buffers():
        torch.testing.assert_close(whole(sharded.get_buffer(name)), value, rtol=1e-4, atol=1e-4)


def test_batch_norm_sends_sums_alone(mesh):
    net = shardwise.distribute_module(torch.nn.BatchNorm2d(6), mesh)
    x = distribute_tensor(torch.randn(8, 6, 4, 4), mesh, [Shard(0)]).requires_grad_()
    with CommDebugMode() as forward:
        out = net(x)
    assert out.placements == (Shard(0),)
    assert [e.kind for e in forward.events] == ["all_reduce"] * 2
    with CommDebugMode() as backward:
        out.backward(torch.ones_like(out))
    assert [e.kind for e in backward.events] == ["all_reduce"]


def test_a_second_derivative_of_batch_norm(mesh):
    weight, x = torch.randn(3), torch.randn(4, 3, 2)

    def penalty(x, weight):
        out = F.batch_norm(x, None, None, weight, training=True)
        (grad,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        return grad.square().sum()

    compare(mesh, penalty, [x, weight], [[Shard(0)], [Replicate()]], 1e-3)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Partial()], ids=repr)
@pytest.mark.parametrize("name", ["group", "instance", "rms", "layer"])
def test_norms(mesh, name, placement):
    calls = {
        "group": lambda x, w: F.group_norm(x, 3, w),
        "instance": lambda x, w: F.instance_norm(x, weight=w),
        "rms": lambda x, w: F.rms_norm(x.mT, (6,), w),
        "layer": lambda x, w: F.layer_norm(x.mT, (6,), w),
    }
    start = [Replicate()] if placement.is_partial() else [placement]
    fn = calls[name]

    def call(x, w):
        if isinstance(x, shardwise.DTensor) and placement.is_partial():
            x = x.redistribute(placements=[placement])
        return fn(x, w)

    compare(mesh, call, [torch.randn(5, 6, 7), torch.randn(6)], [start, [Replicate()]])


def test_instance_norm_keeps_running_statistics(mesh):
    net = torch.nn.InstanceNorm1d(6, track_running_stats=True)
    sharded = shardwise.distribute_module(copy.deepcopy(net), mesh)
    x = torch.randn(5, 6, 7)
    expected, found = net(x), sharded(distribute_tensor(x, mesh, [Shard(0)]))
    torch.testing.assert_close(whole(found), expected)
    torch.testing.assert_close(whole(sharded.running_var), net.running_var)


# -- attention -------------------------------------------------------------------------------

ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.parametrize("dims", [(0, 1), (1, 1), (0, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("name", [*ATTENTION, "mask", "mask with gradient", "three dims"])
def test_attention(square, name, dims):
    options = ATTENTION.get(name, {})
    heads = 2 if name == "grouped" else 4
    q, k, v = torch.randn(3, 4, 5, 8), torch.randn(3, heads, 6, 8), torch.randn(3, heads, 6, 8)
    tensors, placed = [q, k, v], [[Shard(d) for d in dims]] * 3
    if name == "three dims":
        tensors, options = [t[:, 0] for t in tensors], {"is_causal": True}
    if name.startswith("mask"):
        tensors.append(torch.randn(3, 1, 5, 6))
        placed = [*placed, [Shard(0), Replicate()]]

    def call(q, k, v, mask=None):
        if mask is not None:
            mask = mask if "gradient" in name else mask.detach()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)

    compare(square, call, tensors, placed)


def test_sharded_heads_need_no_communication(mesh):
    q, k, v = (distribute_tensor(torch.randn(2, 4, 5, 8), mesh, [Shard(1)]) for _ in range(3))
    q.requires_grad_()
    with CommDebugMode() as comm:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().backward(
            torch.ones_like(q)
        )
    assert not comm.events


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(0, 4, 5, 8), (2, 4, 0, 8)])
def test_attention_of_nothing(mesh, shape, causal):
    q = distribute_tensor(torch.randn(2, 4, 3, 8)[: shape[0]], mesh, [Shard(1)]).requires_grad_()
    k = distribute_tensor(torch.randn(shape), mesh, [Shard(1)]).requires_grad_()
    out = F.scaled_dot_product_attention(q, k, k, is_causal=causal)
    out.sum().backward()
    alone = F.scaled_dot_product_attention(
        q.detach().full_tensor().agreed(), torch.randn(shape), torch.randn(shape), is_causal=causal
    )
    assert torch.equal(out.full_tensor().agreed(), alone)
    assert q.grad.shape == q.shape
    assert k.grad.shape == k.shape


# -- products --------------------------------------------------------------------------------

SHAPES = [
    ((6,), (6,)),
    ((5, 6), (6,)),
    ((6,), (3, 6, 4)),
    ((3, 5, 6), (6, 4)),
    ((3, 5, 6), (6,)),
    ((2, 1, 5, 6), (3, 6, 4)),
    ((5, 6), (2, 3, 6, 4)),
]


@pytest.mark.parametrize(("left", "right"), SHAPES, ids=str)
def test_every_shape_that_matmul_takes(mesh, left, right):
    for a in [Replicate(), *(Shard(d) for d in range(len(left)))]:
        for b in [Replicate(), *(Shard(d) for d in range(len(right)))]:
            compare(mesh, torch.matmul, [torch.randn(left), torch.randn(right)], [[a], [b]])


@pytest.mark.parametrize(
    "call",
    [
        torch.matmul,
        lambda x, w: torch.einsum("bsk,kn->bsn", x, w),
    ],
    ids=["matmul", "einsum"],
)
def test_a_sharded_middle_dim_is_not_gathered(mesh, call):
    x = distribute_tensor(torch.randn(2, 8, 6), mesh, [Shard(1)]).requires_grad_()
    w = distribute_tensor(torch.randn(6, 4), mesh, [Replicate()]).requires_grad_()
    with CommDebugMode() as comm:
        out = call(x, w)
        out.backward(torch.ones_like(out))
    assert out.placements == (Shard(1),)
    assert not comm.events
    assert w.grad.placements == (Partial(),)


TERMS = {
    "amax": (lambda x: x.amax(0), "max"),
    "max": (lambda x: x.max(), "max"),
    "amin": (lambda x: x.amin(0, keepdim=True), "min"),
    "prod": (lambda x: x.prod(0), "product"),
    "any": (lambda x: (x > 0).any(0), "max"),
    "all": (lambda x: (x > -9).all(), "min"),
}


@pytest.mark.parametrize("name", TERMS)
def test_a_sharded_dim_is_reduced_where_it_lies(mesh, name):
    """Six rows on four ranks: the last has none. Only the result is communicated."""
    call, reduce_op = TERMS[name]
    x = torch.randn(6, 5)
    placed = distribute_tensor(x, mesh, [Shard(0)])
    with CommDebugMode() as comm:
        found = call(placed)
    assert not comm.events
    assert found.placements == (Partial(reduce_op),)
    torch.testing.assert_close(whole(found), call(x))


def test_the_maximum_of_a_nan_is_a_nan(mesh):
    x = torch.tensor([1.0, torch.nan, -3.0, 2.0, -0.0])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        placed = distribute_tensor(x.to(dtype), mesh, [Shard(0)])
        assert whole(placed.max()).isnan()
        assert whole(placed.amin()).isnan()
        assert whole(placed[2:].max()) == 2
        assert whole(placed[2:].amin()) == -3


@pytest.mark.parametrize(
    ("equation", "shapes"),
    [
        ("bhqd,bhkd->bhqk", [(2, 3, 4, 5), (2, 3, 6, 5)]),
        ("...k,kn->...n", [(2, 3, 5), (5, 4)]),
        ("ab,ac,ad->bcd", [(3, 2), (3, 4), (3, 5)]),
        ("ij->", [(4, 5)]),
        ("ij,k", [(4, 5), (3,)]),
    ],
)
def test_einsum(mesh, equation, shapes):
    def call(*operands):
        return torch.einsum(equation, *operands)

    for dim in (0, 1):
        placements = [[Shard(min(dim, len(s) - 1))] for s in shapes]
        compare(mesh, call, [torch.randn(s) for s in shapes], placements)


def test_a_complex_product(mesh):
    left = torch.complex(torch.randn(3, 4), torch.randn(3, 4))
    right = torch.complex(torch.randn(4, 5), torch.randn(4, 5))

    a, b = left.clone().requires_grad_(), right.clone().requires_grad_()
    c = distribute_tensor(left, mesh, [Shard(1)]).requires_grad_()
    d = distribute_tensor(right, mesh, [Shard(0)]).requires_grad_()
    (a @ b).abs().sum().backward()
    (c @ d).abs().sum().backward()
    torch.testing.assert_close(whole(c.grad), a.grad)
    torch.testing.assert_close(whole(d.grad), b.grad)


# -- recurrent nets --------------------------------------------------------------------------

NETS = {
    "lstm": lambda: torch.nn.LSTM(5, 6, num_layers=2, bidirectional=True),
    "gru": lambda: torch.nn.GRU(5, 6, batch_first=True),
    "rnn": lambda: torch.nn.RNN(5, 6, bias=False),
    "projected": lambda: torch.nn.LSTM(5, 6, proj_size=3),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")  # torch says so of plain tensors too
@pytest.mark.parametrize("weights", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
@pytest.mark.parametrize("name", NETS)
def test_recurrent_nets(mesh, name, placement, weights):
    net = NETS[name]()
    sharded = copy.deepcopy(net)
    for key, parameter in list(sharded.named_parameters()):
        placed = distribute_tensor(parameter.detach(), mesh, [weights])
        setattr(sharded, key, torch.nn.Parameter(placed))
    x = torch.randn(3, 5, 5)
    plain, placed = x.clone().requires_grad_(), distribute_tensor(x, mesh, [placement])
    placed.requires_grad_()
    (expected, _), (found, _) = net(plain), sharded(placed)
    expected.square().sum().backward()
    found.square().sum().backward()
    torch.testing.assert_close(whole(found), expected.detach())
    torch.testing.assert_close(whole(placed.grad), plain.grad, rtol=1e-4, atol=1e-5)
    for key, parameter in net.named_parameters():
        ours = whole(sharded.get_parameter(key).grad)
        torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-5)


# -- memory ----------------------------------------------------------------------------------


IMAGES = {
    "conv2d": lambda x, w: F.conv2d(x, w, padding=1),
    "conv_transpose2d": F.conv_transpose2d,
    "pool": lambda x, w: F.adaptive_avg_pool2d(F.relu(x), 1),
    "reflected": lambda x, w: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "rolled": lambda x, w: x.roll(1, 2),
    "group_norm": lambda x, w: F.group_norm(x, 2),
    "instance_norm": lambda x, w: F.instance_norm(x),
    "scattered": lambda x, w: x.scatter(1, torch.zeros_like(x).long(), x * 2),
}
#: What one device lays out so too; of the others torch's shape functions say something else.
LAID_ALIKE = ("conv2d", "conv_transpose2d", "group_norm", "scattered")


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
def test_images_whose_channels_stand_last(mesh, name, placement):
    """What a tensor says of its memory is so on every rank: flatten asks it, and may only view."""
    x = torch.randn(8, 4, 6, 6).contiguous(memory_format=torch.channels_last)
    alone, weight = x.clone().requires_grad_(), torch.randn(4, 4, 3, 3)
    shared = distribute_tensor(x, mesh, [placement]).requires_grad_()
    expected = IMAGES[name](alone, weight)
    found = IMAGES[name](shared, distribute_tensor(weight, mesh, [Replicate()]))
    if name in LAID_ALIKE:
        assert found.stride() == expected.stride()
    for each in (expected, found):
        (each.flatten(1).pow(2).sum() + each.permute(0, 2, 3, 1).flatten(1).sin().sum()).backward()
    torch.testing.assert_close(whole(found.detach()), expected.detach())
    torch.testing.assert_close(whole(shared.grad), alone.grad, rtol=1e-4, atol=1e-4)
    assert shared.grad.is_contiguous(memory_format=torch.channels_last)


def test_a_second_call_lies_in_memory_as_the_first(mesh):
    x = distribute_tensor(
        torch.randn(8, 4, 6, 6).contiguous(memory_format=torch.channels_last), mesh, [Shard(0)]
    )
    strides = [x.roll(shifts, 2)._local._parts[0].stride() for shifts in (1, 1, 1)]
    assert set(strides) == {x.roll(1, 2).stride()}


@pytest.mark.parametrize("asked", [(True, False), (False, True), (True, True)], ids=repr)
@pytest.mark.parametrize("dims", [2, 3])
def test_a_part_of_the_gradients_of_grid_sample_where_ranks_hold_nothing(mesh, dims, asked):
    planes, places = torch.randn(2, 3, *[4] * dims), torch.randn(2, *[5] * dims, dims)
    found = []
    for put in (torch.clone, lambda t: distribute_tensor(t, mesh, [Shard(0)])):
        leaves = [
            put(t).requires_grad_(wanted) for t, wanted in zip((planes, places), asked, strict=True)
        ]
        F.grid_sample(*leaves, align_corners=False).square().sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for one, many in zip(*found, strict=True):
        assert (one is None) == (many is None)
        if one is not None:
            torch.testing.assert_close(many.full_tensor().agreed(), one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=repr)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_batch_norm_with_a_bias_and_no_weight(mesh, placement, dtype):
    value, shift = torch.randn(6, 3, 2).to(dtype), torch.randn(3).to(dtype)
    found = []
    for put in (torch.clone, lambda t: distribute_tensor(t, mesh, [placement])):
        x = put(value).requires_grad_()
        bias = shift.clone() if put is torch.clone else distribute_tensor(shift, mesh, [Shard(0)])
        bias.requires_grad_()
        out = F.batch_norm(x, None, None, None, bias, True)
        (out * out).sum().backward()
        found.append((out.detach(), x.grad, bias.grad))
    for one, many in zip(*found, strict=True):
        torch.testing.assert_close(many.full_tensor().agreed(), one, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=repr)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_rms_norm_adds_what_one_device_adds_to_small_values(mesh, placement, dtype):
    value = torch.linspace(-2e-3, 2e-3, 24).reshape(6, 4).to(dtype)
    found = F.rms_norm(distribute_tensor(value, mesh, [placement]), (4,))
    torch.testing.assert_close(whole(found), F.rms_norm(value, (4,)), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)], ids=repr)
@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("shape", [(4, 5, 3), (4, 5, 2, 3)], ids=str)
def test_the_gradient_of_a_loss_by_position_lies_as_on_one_device(mesh, loss, shape, placement):
    values = torch.randn(shape)
    target = torch.randint(0, 5, (shape[0], *shape[2:]))

    def grad(x, target):
        (found,) = torch.autograd.grad(loss(x, target, reduction="none").sin().sum(), x)
        return found

    one = grad(values.clone().requires_grad_(), target)
    x = shardwise.distribute_tensor(values, mesh, [placement]).requires_grad_()
    sharded = grad(x, shardwise.distribute_tensor(target, mesh, [Replicate()]))
    assert sharded.stride() == one.stride()
    torch.testing.assert_close(sharded.full_tensor().agreed(), one)


def test_a_loss_copies_positions_that_are_not_contiguous_as_one_device_does(mesh):
    """So a write to the scores before backward is no error."""
    values, target = torch.randn(3, 5, 4), torch.randint(0, 5, (4, 3))

    def grad(place):
        x = place(values).requires_grad_()
        with torch.no_grad():
            x.transpose_(0, 2).transpose_(1, 2).transpose_(1, 2)
        loss = F.nll_loss(x, place(target))
        with torch.no_grad():
            x.add_(1)
        loss.backward()
        return x.grad

    sharded = grad(lambda t: shardwise.distribute_tensor(t, mesh, [Replicate()]))
    torch.testing.assert_close(sharded.full_tensor().agreed(), grad(torch.clone))


def test_a_mean_over_soft_targets_without_classes_is_nan(mesh):
    scores = shardwise.distribute_tensor(torch.zeros(4, 0, 3), mesh, [Shard(0)])
    assert F.cross_entropy(scores, scores).full_tensor().agreed().isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
def test_the_gradient_of_logsigmoid_reads_what_forward_kept(mesh, placement, dtype):
    """Also where the operand was written to in between, unseen by autograd."""
    values = torch.randn(8, 3).to(dtype)

    def grad(x):
        y = F.logsigmoid(x)
        x.data.mul_(-0.75)
        (found,) = torch.autograd.grad(y.sin().sum(), x)
        return found

    sharded = grad(shardwise.distribute_tensor(values.clone(), mesh, [placement]).requires_grad_())
    one = grad(values.clone().requires_grad_())
    torch.testing.assert_close(sharded.full_tensor().agreed(), one)


@pytest.mark.filterwarnings("ignore:.*index_reduce")
@pytest.mark.parametrize("placement", [Replicate(), Shard(1)], ids=repr)
def test_products_by_index_of_columns_on_ranks_of_their_own(mesh, placement):
    """torch's kernel fails on bfloat16 slices of one entry."""
    values, source = torch.randn(5, 4).bfloat16(), torch.randn(2, 4).bfloat16()
    index = torch.tensor([3, 3])
    expected = values.clone().index_reduce_(0, index, source, "prod")
    x = shardwise.distribute_tensor(values.clone(), mesh, [placement])
    others = [shardwise.distribute_tensor(t, mesh, [Replicate()]) for t in (index, source)]
    x.index_reduce_(-2, *others, "prod")
    assert torch.equal(x.full_tensor().agreed(), expected)


def test_backward_of_batch_norm_under_autocast_to_another_narrow_dtype(mesh):
    values = torch.randn(8, 3).half()

    def grad(x):
        y = F.batch_norm(x, None, None, scale, shift, training=True, eps=0.1)
        with torch.autocast("cpu", torch.bfloat16):
            (found,) = torch.autograd.grad((y.float() * weights).sum(), x)
        return found

    weights, scale, shift = torch.randn(8, 3), torch.rand(3).half(), torch.rand(3).half()
    one = grad(values.clone().requires_grad_())
    weights = shardwise.distribute_tensor(weights, mesh, [Shard(0)])
    scale, shift = (shardwise.distribute_tensor(t, mesh, [Replicate()]) for t in (scale, shift))
    sharded = grad(shardwise.distribute_tensor(values, mesh, [Shard(0)]).requires_grad_())
    eps = torch.finfo(torch.float16).eps
    torch.testing.assert_close(sharded.full_tensor().agreed(), one, rtol=0, atol=2 * eps)
