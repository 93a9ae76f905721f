"""Tools of torch that people put around a model: they meet DTensors as they meet tensors."""

import copy

import pytest
import torch
import torch.distributed as dist
from by_hand import lay, value
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.utils import prune

import shardwise
from shardwise import MixedTensorsError, Partial, Replicate, Shard


def pair(mesh, placement):
    """A layer on one device, and the same with its parameters laid out."""
    alone = nn.Linear(8, 6)
    shared = copy.deepcopy(alone)
    for name, parameter in alone.named_parameters():
        laid_out = shardwise.distribute_tensor(parameter.detach(), mesh, [placement])
        setattr(shared, name, nn.Parameter(laid_out))
    return alone, shared


@pytest.mark.parametrize("placement", [Shard(0), Replicate()], ids=repr)
def test_weight_norm(mesh, placement):
    alone, shared = map(nn.utils.parametrizations.weight_norm, pair(mesh, placement))
    x = torch.randn(4, 8)
    alone(x).pow(2).sum().backward()
    shared(lay(x, mesh, [Replicate()])).pow(2).sum().backward()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(value(other.grad), one.grad)


def test_attention_that_returns_its_weights(mesh):
    """Its gradient arrives expanded, and is viewed in memory that a product has laid out."""
    alone = nn.MultiheadAttention(16, 4, batch_first=True)
    shared = copy.deepcopy(alone)
    shardwise.distribute_module(shared, mesh)
    x = torch.randn(8, 6, 16)
    laid_out = lay(x, mesh, [Shard(0)]).requires_grad_()
    x.requires_grad_()
    for layer, batch in ((alone, x), (shared, laid_out)):
        rows, weights = layer(batch, batch, batch, need_weights=True)
        (rows.pow(2).sum() + weights.pow(2).sum()).backward()
    torch.testing.assert_close(value(laid_out.grad), x.grad)
    torch.testing.assert_close(value(shared.in_proj_weight.grad), alone.in_proj_weight.grad)


def test_the_search_for_anomalies(mesh):
    _, shared = pair(mesh, Shard(0))
    x = lay(torch.randn(4, 8), mesh, [Shard(0)])
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        shared(x).sum().backward()
    x = lay(torch.full((4, 8), -1.0), mesh, [Shard(0)]).requires_grad_()
    with (
        pytest.warns(UserWarning, match=r"Anomaly|Error detected"),
        torch.autograd.detect_anomaly(),
        pytest.raises(RuntimeError, match="nan"),
    ):
        x.sqrt().sum().backward()


# torch's own formulas for it are scripted when it is first used.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_forward_mode_gradients(mesh):
    x, direction = torch.randn(8, 4), torch.randn(8, 4)
    laid_out = [lay(t, mesh, [p]) for t, p in ((x, Shard(0)), (direction, Shard(1)))]
    found = torch.func.jvp(torch.sin, (laid_out[0],), (laid_out[1],))
    expected = torch.func.jvp(torch.sin, (x,), (direction,))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(value(one), other)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
        torch.func.hessian,
        lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
        lambda f: lambda x: torch.func.jvp(torch.func.grad(f), (x,), (torch.ones_like(x),))[1],
    ],
    ids=["jvp", "hessian", "jacfwd twice", "product with a hessian"],
)
def test_forward_mode_with_operands_that_have_no_tangent(mesh, transform, placement):
    """Torch makes zeros for them, which have no layout, and some no memory."""
    x, weight = torch.randn(5), torch.randn(5, 7)

    def run(x, weight):
        return transform(lambda x: (x @ weight).sin().sum() + torch.dot(x, weight[:, 0]))(x)

    found = run(lay(x, mesh, [Replicate()]), lay(weight, mesh, [placement]))
    torch.testing.assert_close(value(found), run(x, weight))


def test_tensors_made_inside_of_a_transform(mesh):
    x = torch.randn(5, 6)
    laid_out = lay(x, mesh, [Shard(0)])

    def run(x, other, ones):
        return torch.func.grad(lambda x: (other[:, [1, 3]] * x[:, :2] * ones() + x[:, 2:4]).sum())(
            x
        )

    found = run(laid_out, laid_out, lambda: shardwise.ones(5, 2, device_mesh=mesh))
    torch.testing.assert_close(value(found), run(x, x, lambda: torch.ones(5, 2)))
    for convert in (shardwise.DTensor.from_local, shardwise.distribute_tensor):
        with pytest.raises(shardwise.UnsupportedError, match="Make DTensors before the transform"):
            torch.func.grad(lambda x, f=convert: (x * f(torch.ones(6), mesh, [Replicate()])).sum())(
                laid_out
            )


def test_a_number_is_formatted_as_one(mesh):
    x = lay(torch.arange(10.0), mesh, [Shard(0)])
    loss = x.sum()
    assert f"{loss:.2f}" == "45.00"
    assert f"{x}" == str(x)
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{x:.2f}"
    assert f"{loss}" == str(loss)


def test_a_collective_on_a_distributed_tensor_is_refused(mesh):
    x = lay(torch.ones(8), mesh, [Shard(0)])
    with pytest.raises(shardwise.UnsupportedError, match="to_local"):
        dist.all_reduce(x)
    assert torch.equal(value(x), torch.ones(8))


@pytest.mark.parametrize("sizes", [(6, 6), (8, 3), (3, 8)])
@pytest.mark.parametrize("map_name", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights(mesh, map_name, sizes):
    """Torch swallows a NotImplementedError here, and would go on with other numbers."""
    alone, shared = nn.Linear(*sizes), nn.Linear(*sizes)
    shared.weight = nn.Parameter(lay(alone.weight.detach(), mesh, [Shard(0)]))
    for layer in (alone, shared):
        torch.manual_seed(1)
        nn.utils.parametrizations.orthogonal(layer, orthogonal_map=map_name)
    torch.testing.assert_close(value(shared.weight.detach()), alone.weight.detach())


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu"}], ids=str)
def test_an_encoder_without_gradients(mesh, options):
    """Torch then calls one op for a whole layer."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **options)
    alone = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    shared = shardwise.distribute_module(copy.deepcopy(alone), mesh)
    x, causal = torch.randn(5, 4, 8), torch.ones(4, 4).triu(1).bool()
    padded = torch.tensor([[False, False, False, True]] * 5)
    for mask, padding in ((None, None), (causal, None), (None, padded), (causal, padded)):
        laid_out = [m if m is None else lay(m, mesh, [Replicate()]) for m in (mask, padding)]
        with torch.no_grad():
            wanted = alone(x, mask, padding)
            found = shared(lay(x, mesh, [Shard(0)]), *laid_out)
        torch.testing.assert_close(value(found), wanted)


def test_attention_without_gradients_returns_its_weights(mesh):
    alone = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    shared = shardwise.distribute_module(copy.deepcopy(alone), mesh)
    x = torch.randn(5, 4, 8)
    y = lay(x, mesh, [Shard(0)])
    for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        with torch.no_grad():
            wanted, found = alone(x, x, x, **options), shared(y, y, y, **options)
        torch.testing.assert_close(value(found[0]), wanted[0])
        assert (found[1] is None) == (wanted[1] is None)
        if found[1] is not None:
            torch.testing.assert_close(value(found[1]), wanted[1])


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_functions_that_make_tensors_of_their_own(mesh, placement):
    x = torch.randn(8, 6)
    y = lay(x, mesh, [placement])
    torch.manual_seed(1)
    _, wanted, _ = torch.pca_lowrank(x, 4)
    torch.manual_seed(1)
    _, found, _ = torch.pca_lowrank(y, 4)
    torch.testing.assert_close(value(found), wanted)
    wanted = torch.masked.var(x, 1, unbiased=True)
    torch.testing.assert_close(value(torch.masked.var(y, 1, unbiased=True)), wanted)


def test_a_plain_tensor_given_to_such_a_function_is_refused(mesh):
    x = lay(torch.randn(8, 6), mesh, [Shard(0)])
    with pytest.raises(shardwise.MixedTensorsError):
        torch.svd_lowrank(x, 4, M=torch.ones(8, 6))


def test_sequences_are_padded(mesh):
    rows = [torch.randn(3, 2), torch.randn(5, 2)]
    laid_out = [lay(row, mesh, [Shard(0)]) for row in rows]
    for side in ("right", "left"):
        options = {"batch_first": True, "padding_value": -1.0, "padding_side": side}
        wanted = nn.utils.rnn.pad_sequence(rows, **options)
        assert torch.equal(value(nn.utils.rnn.pad_sequence(laid_out, **options)), wanted)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_values_written_entry_by_entry(mesh, placement):
    x = lay(torch.zeros(5, 4), mesh, [placement])
    nn.init.eye_(x)
    assert torch.equal(value(x), torch.eye(5, 4))
    kernel = lay(torch.zeros(4, 4, 3), mesh, [placement])
    nn.init.dirac_(kernel)
    assert torch.equal(value(kernel), nn.init.dirac_(torch.zeros(4, 4, 3)))


@pytest.mark.parametrize("placement", [Shard(0), Partial(), Replicate()], ids=repr)
def test_one_hot(mesh, placement):
    x = torch.tensor([0, 2, 1, 2, 0])
    y = lay(x, mesh, [placement])
    assert torch.equal(value(nn.functional.one_hot(y, 4)), nn.functional.one_hot(x, 4))
    assert torch.equal(value(nn.functional.one_hot(y)), nn.functional.one_hot(x))
    for wrong in (x - 1, x + 2):
        with pytest.raises(RuntimeError, match="Class values"):
            nn.functional.one_hot(lay(wrong, mesh, [placement]), 4)
    for num_classes in (0, -2):
        with pytest.raises(RuntimeError, match="Class values"):
            nn.functional.one_hot(y, num_classes)


@pytest.mark.parametrize("num", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_vander_of_few_columns(mesh, size, dtype, num):
    x = torch.arange(size, dtype=dtype)
    for increasing in (False, True):
        wanted = torch.vander(x, num, increasing)
        found = torch.vander(lay(x, mesh, [Shard(0)]), num, increasing)
        assert torch.equal(value(found), wanted)
        assert found.dtype == wanted.dtype


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
def test_a_diagonal_is_filled(mesh, placement):
    x, wanted = lay(torch.zeros(5, 4), mesh, [placement]), torch.zeros(5, 4)
    assert torch.equal(value(x.fill_diagonal_(3)), wanted.fill_diagonal_(3))
    tall = lay(torch.zeros(9, 2), mesh, [placement])
    with pytest.raises(NotImplementedError, match="wrap"):
        tall.fill_diagonal_(3, wrap=True)


def test_ops_whose_tensors_are_no_floats(mesh):
    places = torch.tensor([5, 0, 7])
    wanted = torch.unravel_index(places, (2, 4))
    found = torch.unravel_index(lay(places, mesh, [Shard(0)]), (2, 4))
    assert [value(f).tolist() for f in found] == [w.tolist() for w in wanted]
    x = torch.randn(3, 6, 5, dtype=torch.complex64)
    window = torch.rand(10) + 0.5
    wanted = torch.istft(x, 10, window=window)
    found = torch.istft(lay(x, mesh, [Shard(0)]), 10, window=lay(window, mesh, [Shard(0)]))
    torch.testing.assert_close(value(found), wanted)


@pytest.mark.parametrize("sorted_", [True, False], ids=["sorted", "unsorted"])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(mesh, kind, placement, sorted_):
    alone = kind(6, 4, num_layers=2, bidirectional=True, batch_first=True)
    shared = shardwise.distribute_module(copy.deepcopy(alone), mesh)
    x, lengths = torch.randn(3, 5, 6), torch.tensor([5, 3, 2] if sorted_ else [2, 5, 3])

    def run(layer, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=sorted_)
        outputs, ends = layer(packed)
        padded, found = nn.utils.rnn.pad_packed_sequence(
            outputs, True, padding_value=0.5, total_length=6
        )
        assert found.tolist() == lengths.tolist()
        loss = padded.square().sum() + (ends[1] if kind is nn.LSTM else ends).sum()
        return [padded, *torch.autograd.grad(loss, [x, *layer.parameters()])]

    expected = run(alone, x.clone().requires_grad_(), lengths)
    laid_out = lay(x, mesh, [placement]).requires_grad_()
    found = run(shared, laid_out, lay(lengths, mesh, [Replicate()]))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(value(ours), theirs)


def test_lengths_of_packed_sequences_are_the_same_on_every_rank(mesh):
    x = lay(torch.randn(3, 5, 6), mesh, [Shard(0)])
    with pytest.raises(MixedTensorsError, match=r"argument 1 \(lengths\)"):
        nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
    with shardwise.implicit_replication():
        packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3, 2], batch_first=True)
    assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
    lengths = lay(torch.tensor([2, 3, 5]), mesh, [Replicate()])
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("placements", [[Shard(0), Shard(0)], [Shard(0), Shard(1)]])
def test_cells_start_from_zeros_and_step_on(square, cell, placements):
    alone = cell(4, 3)
    shared = copy.deepcopy(alone)
    for name, weight in list(shared.named_parameters()):
        own = placements if weight.dim() > 1 else [Shard(0), Replicate()]
        setattr(shared, name, nn.Parameter(lay(weight.detach(), square, own)))
    x = torch.randn(5, 4)
    for layer, batch in ((alone, x), (shared, lay(x, square, [Shard(0), Replicate()]))):
        state = layer(batch, layer(batch))
        sum(
            part.pow(2).sum() for part in (state if isinstance(state, tuple) else [state])
        ).backward()
    for one, other in zip(alone.parameters(), shared.parameters(), strict=True):
        torch.testing.assert_close(value(other.grad), one.grad)
    with pytest.raises(RuntimeError, match="inconsistent"):
        shared(lay(torch.randn(5, 3), square, [Shard(0), Replicate()]))
    plain = torch.ones(5, 3)
    with pytest.raises(MixedTensorsError):
        shared(lay(x, square, [Replicate()] * 2), (plain, plain) if cell is nn.LSTMCell else plain)


def test_attention_to_a_zero_and_to_learnt_keys(mesh):
    alone = nn.MultiheadAttention(8, 2, kdim=3, vdim=5, add_bias_kv=True, add_zero_attn=True)
    shared = shardwise.distribute_module(copy.deepcopy(alone), mesh)
    inputs = [torch.randn(4, 2, 8), torch.randn(6, 2, 3), torch.randn(6, 2, 5)]
    laid_out = [lay(x, mesh, [Shard(1)]) for x in inputs]
    for one, other in zip(alone(*inputs), shared(*laid_out), strict=True):
        torch.testing.assert_close(value(other), one)
    with pytest.raises(MixedTensorsError):
        shared(*laid_out, attn_mask=torch.zeros(4, 6))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.distributions.Normal(x, 0.5).rsample((2,)),
        lambda x: torch.distributions.Uniform(x, x + 1).rsample(),
        lambda x: torch.distributions.MultivariateNormal(x, torch.diag_embed(x)).rsample(),
        lambda x: torch.distributions.StudentT(x + 2).rsample(),
        lambda x: torch.distributions.RelaxedOneHotCategorical(0.5, logits=x).rsample(),
        lambda x: torch.distributions.LogNormal(0.0, x).rsample(),
        lambda x: torch.distributions.Gumbel(x, 2.0).log_prob(x),
    ],
)
def test_distributions_draw_what_one_device_draws(mesh, draw):
    whole = torch.rand(4, 3) + 0.5
    one, shared = whole.clone().requires_grad_(), lay(whole, mesh, [Shard(0)]).requires_grad_()
    for x in (one, shared):
        torch.manual_seed(0)
        draw(x).pow(2).sum().backward()
    torch.testing.assert_close(value(shared.grad), one.grad)


def test_a_distribution_of_plain_and_distributed_parameters_is_refused(mesh):
    with pytest.raises(MixedTensorsError, match="broadcast_tensors"):
        torch.distributions.Normal(torch.ones(4), lay(torch.ones(4), mesh, [Shard(0)]))
    made = torch.distributions.Normal(lay(torch.ones(4), mesh, [Shard(0)]), 1.0)
    made.loc = torch.ones(4)
    with pytest.raises(MixedTensorsError):
        made.rsample()


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_and_columns_are_pruned_alike(mesh, dim):
    alone, shared = pair(mesh, Shard(0))
    for layer in (alone, shared):
        torch.manual_seed(0)
        prune.random_structured(layer, "weight", 0.4, dim)
        prune.ln_structured(layer, "weight", 0.3, 2, dim)
    assert torch.equal(value(shared.weight_mask), alone.weight_mask)


@pytest.mark.parametrize("fn", [lambda u: (u**3).sum(), lambda u: u.softmax(1).pow(2).sum()])
def test_second_derivatives_forward_over_reverse(mesh, fn):
    whole = torch.rand(4, 3) + 0.5
    found = torch.func.hessian(fn)(lay(whole, mesh, [Shard(0)]))
    torch.testing.assert_close(value(found), torch.func.hessian(fn)(whole))


FORWARD = {
    "inverse": torch.func.jacfwd(lambda x: 1 / x),
    "quotient": torch.func.jacfwd(lambda x: 2.5 / (x + 1) - x / x.sum()),
    "hessian": torch.func.hessian(lambda x: (1 / x).sum()),
    "twice": torch.func.jacfwd(torch.func.jacfwd(lambda x: x**3)),
    "forward over reverse": torch.func.jacfwd(torch.func.jacrev(torch.exp)),
    "reverse over forward": torch.func.jacrev(torch.func.jacfwd(torch.sin)),
    # The tangent has other strides than the value, and torch copies it.
    "linear": torch.func.hessian(lambda x: F.linear(x.view(2, 3), x.view(2, 3)).sin().sum()),
    "of a view": torch.func.jacfwd(lambda x: F.softmax(x.view(2, 3).mT, 0) * x.view(2, 3).mT),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FORWARD)
def test_forward_derivatives(mesh, name):
    """Torch takes a tangent that is not there as a plain zero without memory."""
    x = torch.rand(6) + 0.5
    for placement in (Shard(0), Replicate()):
        torch.testing.assert_close(
            value(FORWARD[name](lay(x, mesh, [placement]))), FORWARD[name](x)
        )


#: Ops with a kernel above autograd, of a matrix and a vector of indices.
KERNELS_ABOVE = {
    "linear": lambda x, ids: F.linear(x, x),
    "matmul": lambda x, ids: x @ x.mT,
    "einsum": lambda x, ids: torch.einsum("ij,kj->ik", x, x),
    "embedding": lambda x, ids: F.embedding(ids, x),
    "cross entropy": lambda x, ids: F.cross_entropy(x[:3], ids),
    "layer norm": lambda x, ids: F.layer_norm(x, (4,)),
    "sgn": lambda x, ids: x * x.sgn(),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
@pytest.mark.parametrize("name", KERNELS_ABOVE)
def test_tangents_pass_through_kernels_above_autograd(mesh, name, placement, requires_grad):
    fn, ids = KERNELS_ABOVE[name], torch.tensor([3, 0, 2])

    def tangent(x, direction, ids):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.requires_grad_(requires_grad), direction)
            return forward_ad.unpack_dual(fn(dual, ids)).tangent.detach()

    values = torch.randn(5, 4), torch.randn(5, 4)
    expected = tangent(*values, ids)
    found = tangent(
        *(lay(x.detach(), mesh, [placement]) for x in values), lay(ids, mesh, [Shard(0)])
    )
    torch.testing.assert_close(value(found), expected)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_jacobian_in_forward_mode_of_a_linear_layer(mesh):
    x, weight = torch.randn(3, 4), torch.randn(2, 4)

    def jacobian(x, weight):
        ways = {"vectorize": True, "strategy": "forward-mode"}
        return torch.autograd.functional.jacobian(lambda x: F.linear(x, weight), x, **ways)

    found = jacobian(lay(x, mesh, [Shard(0)]), lay(weight, mesh, [Shard(0)]))
    torch.testing.assert_close(value(found), jacobian(x, weight))


@pytest.mark.parametrize(
    "convert",
    [
        lambda x: x.redistribute(placements=[Replicate()]),
        lambda x: x.full_tensor(),
        lambda x: x.to_local(),
    ],
    ids=["redistribute", "full_tensor", "to_local"],
)
def test_a_conversion_refuses_a_tangent(mesh, convert):
    x = lay(torch.randn(4, 2), mesh, [Shard(0)])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(shardwise.UnsupportedError, match="of a tensor with a tangent"):
            convert(dual)
        local = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        with pytest.raises(shardwise.UnsupportedError, match="of a tensor with a tangent"):
            shardwise.DTensor.from_local(local, mesh, [Replicate()])
        convert(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_linearized_function_says_that_it_is_not_there(mesh):
    with pytest.raises(shardwise.UnsupportedError, match="does not have a sharding strategy"):
        torch.func.linearize(torch.sin, lay(torch.rand(6), mesh, [Shard(0)]))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("placement", [Shard(0), Replicate()])
def test_many_gradients_at_once(mesh, placement):
    """Torch batches them in a tensor that stands around DTensors."""
    functional, x = torch.autograd.functional, torch.rand(6) + 0.5

    def fn(y):
        return torch.stack([y, y * y]).softmax(0) * y.sum()

    for ways in ({"vectorize": True}, {"vectorize": True, "strategy": "forward-mode"}):
        found = functional.jacobian(fn, lay(x, mesh, [placement]), **ways)
        torch.testing.assert_close(value(found), functional.jacobian(fn, x))
    found = functional.hessian(lambda y: fn(y).sum(), lay(x, mesh, [placement]), vectorize=True)
    torch.testing.assert_close(value(found), functional.hessian(lambda y: fn(y).sum(), x))
