"""Same seed, same values as one device, whatever the mesh and placements."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity import place, shard_by, train, whole
from torch import distributions as D
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import DTensor, Partial, Replicate, Shard, random
from shardwise.debug import CommDebugMode
from shardwise.errors import (
    ArgumentError,
    LayoutError,
    MixedTensorsError,
    RankMismatchError,
    UnsupportedError,
)
from shardwise.random import draw_of

pytestmark = pytest.mark.slow

aten = torch.ops.aten
LINE = {
    "even": [Shard(0)],
    "uneven": [Shard(1)],
    "explicit": [Shard(0, (5, 0, 2, 1))],
    "replicated": [Replicate()],
}
SQUARE = {
    "both dims": [Shard(0), Shard(1)],
    "one dim twice": [Shard(1), Shard(1)],
    "half": [Replicate(), Shard(0)],
}


@pytest.fixture(params=[*LINE, *SQUARE])
def layout(request):
    """A mesh, and placements for a tensor of shape (8, 6, ...)."""
    name = request.param
    with shardwise.simulate(4):
        shape = (4,) if name in LINE else (2, 2)
        yield shardwise.init_device_mesh("cpu", shape), {**LINE, **SQUARE}[name]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that small tensors take several."""
    monkeypatch.setattr(random, "CHUNK", 32)


def seeded(fn, *args):
    """What `fn` returns from a fixed seed, and the state that it leaves."""
    torch.manual_seed(11)
    return fn(*args), torch.get_rng_state()


def assert_like_one_device(fn, tensor, mesh, placements):
    """`fn` may write to its argument, and draws from the default generator."""
    expected, after = seeded(fn, tensor.clone())
    found, state = seeded(fn, shardwise.distribute_tensor(tensor, mesh, placements))
    assert torch.equal(whole(found), expected)
    assert found.stride() == expected.stride()
    assert torch.equal(state, after)
    return found


WRITES = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "uniform_": lambda t: t.uniform_(-1.0, 2.0),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(2.0),
    "geometric_": lambda t: t.geometric_(0.3),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(),
    "random_ to": lambda t: t.random_(9),
    "random_ from": lambda t: t.random_(2, 9),
    "bernoulli_ of a tensor": lambda t: t.bernoulli_(t.abs().tanh()),
}
RETURNS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "rand_like of another dtype": lambda t: torch.rand_like(t, dtype=torch.float64),
    "randint_like": lambda t: torch.randint_like(t, 9),
    "randint_like from": lambda t: torch.randint_like(t, 2, 9, dtype=torch.int64),
    "bernoulli": lambda t: torch.bernoulli(t.abs().tanh()),
    "bernoulli p": lambda t: torch.bernoulli(t, 0.3),
    "normal": lambda t: torch.normal(t, t.abs()),
    "normal, one deviation": lambda t: torch.normal(t, 2.0),
    "normal, one mean": lambda t: torch.normal(2.0, t.abs()),
    "poisson": lambda t: torch.poisson(t.abs()),
    "binomial": lambda t: torch.binomial((9 * t.abs()).round(), t.sigmoid()),
    "multinomial": lambda t: torch.multinomial(t.abs(), 3),
    "gumbel softmax": F.gumbel_softmax,
    "rrelu": lambda t: F.rrelu(t, training=True),
    "rrelu in place": lambda t: F.rrelu(t, training=True, inplace=True),
    "rrelu that evaluates": lambda t: F.rrelu(t),
}
DROPOUTS = {
    "dropout": lambda t: F.dropout(t, 0.4),
    "native_dropout": lambda t: torch.native_dropout(t, 0.4, True)[0],
    "the mask of native_dropout": lambda t: torch.native_dropout(t, 0.4, True)[1],
    "everything dropped": lambda t: F.dropout(t, 1.0),
    "alpha dropout": lambda t: F.alpha_dropout(t, 0.4, training=True),
    "in place": lambda t: F.dropout(t * 1, 0.4, inplace=True),
    "alpha dropout in place": lambda t: F.alpha_dropout(t * 1, 0.4, True, inplace=True),
    "a module": nn.Dropout(0.4),
    "a module that evaluates": nn.Dropout(0.4).eval(),
}
FEATURE_DROPOUTS = {
    "dropout1d": lambda t: F.dropout1d(t[..., 0], 0.4),
    "dropout2d": lambda t: F.dropout2d(t, 0.4),
    "dropout3d": lambda t: F.dropout3d(t.unsqueeze(-1), 0.4),
    "feature alpha dropout": lambda t: F.feature_alpha_dropout(t, 0.4, training=True),
    "dropout2d in place": lambda t: F.dropout2d(t * 1, 0.4, inplace=True),
    "a module of dropout1d": lambda t: nn.Dropout1d(0.4)(t[..., 0]),
    "a module of dropout3d, in place": lambda t: nn.Dropout3d(0.4, True)(t.unsqueeze(-1) * 1),
    "a module of feature alpha dropout": nn.FeatureAlphaDropout(0.4),
    "fractional pooling": lambda t: F.fractional_max_pool2d(t, 2, output_size=(2, 1)),
}


@pytest.mark.parametrize("name", [*WRITES, *RETURNS, *DROPOUTS])
def test_values(layout, name):
    fn = {**WRITES, **RETURNS, **DROPOUTS}[name]
    assert_like_one_device(fn, torch.randn(8, 6), *layout)


@pytest.mark.parametrize("name", [*WRITES, "rand_like", "randn_like", "dropout"])
def test_values_of_a_tensor_in_another_memory_order(layout, name):
    fn = {**WRITES, **RETURNS, **DROPOUTS}[name]
    assert_like_one_device(fn, torch.randn(6, 8).t(), *layout)


@pytest.mark.parametrize(
    "op",
    [F.logsigmoid, F.rrelu, lambda t: torch.ldexp(t[:, :1], t), lambda t: torch.poisson(t.abs())],
    ids=["logsigmoid", "rrelu", "ldexp", "poisson"],
)
def test_values_after_an_op_with_a_memory_order_of_its_own(layout, op):
    assert_like_one_device(lambda t: op(t).geometric_(0.4), torch.randn(6, 8).t(), *layout)


@pytest.mark.parametrize("name", FEATURE_DROPOUTS)
def test_values_of_feature_dropouts(layout, name):
    assert_like_one_device(FEATURE_DROPOUTS[name], torch.randn(8, 6, 3, 2), *layout)


@pytest.mark.parametrize("name", ["normal_", "uniform_", "randn_like", "dropout"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_dtypes(layout, name, dtype):
    fn = {**WRITES, **RETURNS, **DROPOUTS}[name]
    assert_like_one_device(fn, torch.randn(8, 6).to(dtype), *layout)


@pytest.mark.parametrize("name", ["normal_", "uniform_", "bernoulli_ of a tensor", "dropout"])
@settings(max_examples=25)
@given(
    shape=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    axes=st.sampled_from([(5,), (2, 3)]),
    data=st.data(),
)
def test_any_shape(name, shape, axes, data):
    """Ranks that own nothing, tensors without values, fewer than 16."""
    place_of = st.one_of(
        st.just(Replicate()), st.integers(0, len(shape) - 1).map(lambda dim: Shard(dim))
    )
    placements = [data.draw(place_of) for _ in axes]
    fn = {**WRITES, **DROPOUTS}[name]
    with shardwise.simulate(torch.Size(axes).numel()):
        mesh = shardwise.init_device_mesh("cpu", axes)
        expected, after = seeded(fn, torch.ones(shape))
        found, state = seeded(fn, shardwise.distribute_tensor(torch.ones(shape), mesh, placements))
        assert torch.equal(whole(found), expected)
        assert torch.equal(state, after)


RANGES = [(0, 9), (0, 2**50), (-(2**31), 2**31), (0, 2**31), (-5, None)]


@pytest.mark.parametrize("ranges", [RANGES, RANGES[::-1]], ids=["narrow first", "wide first"])
def test_integers_of_narrow_and_wide_ranges(ranges):
    """They take one number or two, and what nobody holds is skipped."""
    random_from = getattr(aten.random_, "from")
    random._words.clear()
    for args in ranges:
        expected, after = seeded(lambda a=args: torch.zeros(40, 32, dtype=torch.int64).random_(*a))
        block = random.DrawnShard((30, 0), torch.zeros(10, 32, dtype=torch.int64))
        whole_draw = random.Whole((40, 32), (32, 1), torch.int64)
        _, state = seeded(
            random.fill_exactly, whole_draw, [block], draw_of(random_from, args, None)
        )
        assert torch.equal(block.part, expected[30:])
        assert torch.equal(state, after)


def test_a_view_is_written_in_its_own_order(mesh):
    def fn(t):
        t[:, ::2].normal_()
        return t

    assert_like_one_device(fn, torch.zeros(8, 10), mesh, [Shard(0)])


# -- Partial ---------------------------------------------------------------------------------


def partial(mesh, shape, reduce_op="sum"):
    terms = shardwise.LocalTensor.per_rank(lambda rank: torch.full(shape, float(rank)))
    return DTensor.from_local(terms, mesh, [Partial(reduce_op)])


@pytest.mark.parametrize("reduce_op", ["sum", "max", "product"])
def test_a_partial_tensor_is_written_in_place(mesh, reduce_op):
    expected, after = seeded(lambda: torch.empty(8, 6).normal_())
    x = partial(mesh, (8, 6), reduce_op)
    _, state = seeded(x.normal_)
    assert x.placements == (Partial(reduce_op),)
    assert torch.equal(whole(x), expected)
    assert torch.equal(state, after)


def test_ranks_that_share_a_term_cannot_be_written_to(mesh):
    x = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    with pytest.raises(RankMismatchError, match=r"per_rank\(lambda rank"):
        x.normal_()


@pytest.mark.parametrize("fn", [torch.rand_like, lambda t: torch.bernoulli(t, 0.3)])
def test_a_new_tensor_is_never_partial(mesh, fn):
    expected, _ = seeded(fn, torch.zeros(8, 6))
    with CommDebugMode() as comm:
        found, _ = seeded(fn, partial(mesh, (8, 6)))
        moved = [event.kind for event in comm.events if "draw" not in event.op]
    assert found.placements == (Replicate(),)
    assert not moved
    assert torch.equal(whole(found), expected)


@pytest.mark.parametrize("name", ["dropout", "native_dropout", "in place"])
def test_dropout_lets_a_sum_through(mesh, name):
    expected, _ = seeded(DROPOUTS[name], torch.full((8, 6), 6.0))
    found, _ = seeded(DROPOUTS[name], partial(mesh, (8, 6)))
    assert found.placements == (Partial(),)
    torch.testing.assert_close(whole(found), expected)


# -- factories and generators ----------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda lib, **to: lib.rand(8, 6, **to),
        lambda lib, **to: lib.randn((8, 6), **to),
        lambda lib, **to: lib.randn(8, 6, dtype=torch.complex64, **to),
        lambda lib, **to: lib.randint(3, 9, (8, 6), **to),
        lambda lib, **to: lib.rand(8, 6, generator=torch.Generator().manual_seed(4), **to),
    ],
)
def test_factories(layout, make):
    mesh, placements = layout
    expected, after = seeded(make, torch)
    found, state = seeded(lambda: make(shardwise, device_mesh=mesh, placements=placements))
    assert found.placements == tuple(placements)
    assert torch.equal(whole(found), expected)
    assert torch.equal(state, after)


def test_randperm(mesh):
    expected, after = seeded(torch.randperm, 10)
    found, state = seeded(lambda: shardwise.randperm(10, device_mesh=mesh, placements=[Shard(0)]))
    assert torch.equal(whole(found), expected)
    assert torch.equal(state, after)


INTO = {
    "rand": lambda **to: torch.rand(8, 6, **to),
    "rand of a generator": lambda **to: torch.rand(8, 6, generator=generator(), **to),
    "randn": lambda **to: torch.randn(8, 6, **to),
    "randn of a generator": lambda **to: torch.randn((8, 6), generator=generator(), **to),
    "randint": lambda **to: torch.randint(9, (8, 6), **to),
    "randint from": lambda **to: torch.randint(3, 9, (8, 6), generator=generator(), **to),
    "normal": lambda **to: torch.normal(1.0, 2.0, (8, 6), **to),
    "eye": lambda **to: torch.eye(8, 6, **to),
    "full": lambda **to: torch.full((8, 6), 2.5, **to),
    "ones": lambda **to: torch.ones(8, 6, **to),
    "zeros": lambda **to: torch.zeros(8, 6, **to),
}


def generator():
    return torch.Generator().manual_seed(4)


def test_tensors_made_into_another(layout):
    for name, make in INTO.items():
        expected, after = seeded(lambda m=make: m(out=torch.ones(8, 6)))
        out = shardwise.ones(8, 6, device_mesh=layout[0], placements=layout[1])
        found, state = seeded(lambda m=make, o=out: m(out=o))
        assert found is out
        assert found.placements == tuple(layout[1])
        assert torch.equal(whole(found), expected), name
        assert torch.equal(state, after), name
    with pytest.raises(LayoutError, match="cannot be resized"):
        torch.rand(9, 6, out=out)


SAMPLED = {
    "Normal": lambda t: D.Normal(t, t.abs() + 0.1).sample((2,)),
    "Bernoulli": lambda t: D.Bernoulli(logits=t).sample((2,)),
    "Categorical": lambda t: D.Categorical(logits=t).sample((3,)),
    "Exponential": lambda t: D.Exponential(t.abs() + 0.1).rsample(),
    "Laplace": lambda t: D.Laplace(t, t.abs() + 0.1).rsample(),
    "Cauchy": lambda t: D.Cauchy(t, t.abs() + 0.1).rsample(),
    "Weibull": lambda t: D.Weibull(t.abs() + 1, t.abs() + 1).sample(),
    "Geometric": lambda t: D.Geometric(t.sigmoid()).sample(),
    "Poisson": lambda t: D.Poisson(t.abs()).sample(),
    "Gamma": lambda t: D.Gamma(t.abs() + 0.1, t.abs() + 0.2).rsample(),
    "Beta": lambda t: D.Beta(t.abs() + 0.1, t.abs() + 0.2).rsample(),
    "Dirichlet": lambda t: D.Dirichlet(t.abs() + 0.1).rsample(),
    "Multinomial": lambda t: D.Multinomial(4, logits=t).sample(),
    "OneHotCategorical": lambda t: D.OneHotCategorical(logits=t).sample(),
    # These draw with torch.rand or torch.randn; their values meet the parameters as plain tensors.
    "Normal.rsample": lambda t: D.Normal(t, t.abs() + 0.1).rsample((2,)),
    "Uniform": lambda t: D.Uniform(t, t + 1).rsample(),
    "Gumbel": lambda t: D.Gumbel(t, t.abs() + 0.1).rsample(),
    "Binomial": lambda t: D.Binomial(5, logits=t).sample(),
    "StudentT": lambda t: D.StudentT(t.abs() + 1).rsample(),
}


def assert_sample_of_one_device(fn, x, layout):
    def both(x):
        x.requires_grad_()
        y = fn(x)
        if y.requires_grad:
            y.square().sum().backward()
        return y, x.grad

    (expected, grad), after = seeded(both, x.clone())
    (found, found_grad), state = seeded(both, shardwise.distribute_tensor(x, *layout))
    torch.testing.assert_close(whole(found), expected.detach())
    assert torch.equal(state, after)
    if grad is not None:
        torch.testing.assert_close(whole(found_grad), grad)


@pytest.mark.parametrize("name", SAMPLED)
def test_distributions(layout, name):
    assert_sample_of_one_device(SAMPLED[name], torch.randn(8, 6), layout)


def test_an_unknown_option(mesh):
    with pytest.raises(TypeError, match="colour"):
        shardwise.rand(3, device_mesh=mesh, colour="red")


GENERATED = {
    "normal_": lambda t, g: t.normal_(generator=g),
    "uniform_": lambda t, g: t.uniform_(generator=g),
    "exponential_": lambda t, g: t.exponential_(generator=g),
    "geometric_": lambda t, g: t.geometric_(0.3, generator=g),
    "cauchy_": lambda t, g: t.cauchy_(generator=g),
    "log_normal_": lambda t, g: t.log_normal_(generator=g),
    "random_": lambda t, g: t.random_(2, 9, generator=g),
    "bernoulli": lambda t, g: torch.bernoulli(t.sigmoid(), generator=g),
    "bernoulli_": lambda t, g: t.bernoulli_(0.3, generator=g),
    "normal": lambda t, g: torch.normal(t, 2.0, generator=g),
    "multinomial": lambda t, g: torch.multinomial(t.abs(), 2, generator=g),
    "poisson": lambda t, g: torch.poisson(t.abs(), generator=g),
    "kaiming": lambda t, g: nn.init.kaiming_uniform_(t, generator=g),
}


@pytest.mark.parametrize("name", GENERATED)
def test_a_generator_of_ones_own(layout, name):
    x = torch.randn(8, 6)
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    default = torch.get_rng_state()
    for _ in range(2):  # the plan of the first call serves the second
        expected = GENERATED[name](x.clone(), theirs)
        found = GENERATED[name](shardwise.distribute_tensor(x, *layout), ours)
        assert torch.equal(whole(found), expected)
        assert torch.equal(ours.get_state(), theirs.get_state())
    other = torch.Generator().manual_seed(8)
    found = GENERATED[name](shardwise.distribute_tensor(x, *layout), other)
    expected = GENERATED[name](x.clone(), torch.Generator().manual_seed(8))
    assert torch.equal(whole(found), expected)
    assert torch.equal(torch.get_rng_state(), default)


# -- initialisation --------------------------------------------------------------------------

INITS = {
    "uniform_": nn.init.uniform_,
    "normal_": nn.init.normal_,
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "kaiming_normal_": nn.init.kaiming_normal_,
    "xavier_uniform_": nn.init.xavier_uniform_,
    "xavier_normal_": nn.init.xavier_normal_,
    "trunc_normal_": nn.init.trunc_normal_,
    "orthogonal_": nn.init.orthogonal_,
    "trunc_normal_ far out": lambda t: nn.init.trunc_normal_(t, a=1.0, b=3.0),
    "sparse_": lambda t: nn.init.sparse_(t, 0.4),
    "constant_": lambda t: nn.init.constant_(t, 0.5),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "eye_": nn.init.eye_,
}


@pytest.mark.parametrize("name", INITS)
def test_init(layout, name):
    found = assert_like_one_device(INITS[name], torch.empty(8, 6).fill_(0), *layout)
    assert found.placements == tuple(layout[1])


@pytest.mark.parametrize("groups", [1, 2])
def test_init_of_kernels(layout, groups):
    def fill(t):
        return nn.init.dirac_(nn.init.kaiming_normal_(t), groups)

    assert_like_one_device(fill, torch.zeros(8, 6, 3, 1), *layout)


def test_a_plain_index_of_anybody_else_is_refused(mesh):
    """Only what torch draws itself for `sparse_` is known to be the same on every rank."""
    table = shardwise.zeros(8, 6, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(MixedTensorsError, match="implicit_replication"):
        table[torch.randperm(8)[:3], 2] = 0


def test_truncated_normals_are_not_gathered():
    """Whether all are in range is asked of every rank: one number each.

    Older versions of torch bring them into range by a formula, and nothing is asked.
    """
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (4,))
        table = shardwise.zeros(1000, 8, device_mesh=mesh, placements=[Shard(0)])
        with CommDebugMode() as comm:
            nn.init.trunc_normal_(table)
    assert all(event.num_bytes <= 32 for event in comm.events), comm.events


def make_model():
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.LayerNorm(8),
        nn.Embedding(8, 6),
        nn.Conv1d(8, 8, 3),
        nn.Bilinear(8, 6, 8),
    )


def test_meta_device_then_reset_parameters(layout):
    mesh, placements = layout
    torch.manual_seed(2)
    expected = make_model()
    after = torch.get_rng_state()
    with torch.device("meta"):
        model = make_model()

    def partition(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            fits = parameter.dim() > 1 and tuple(parameter.shape[:2]) == (8, 6)
            placed = placements if fits else [Replicate()] * mesh.ndim
            sharded = shardwise.distribute_tensor(parameter, mesh, placed)
            module.register_parameter(key, nn.Parameter(sharded))

    shardwise.distribute_module(model, mesh, partition)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(2)
    for module in model:
        module.reset_parameters()
    assert torch.equal(torch.get_rng_state(), after)
    for (name, found), parameter in zip(
        model.named_parameters(), expected.parameters(), strict=True
    ):
        assert isinstance(found, DTensor)
        assert torch.equal(whole(found), parameter), name


def test_new_tensor_is_replicated(mesh):
    x = shardwise.zeros(4, 6, dtype=torch.float64, device_mesh=mesh, placements=[Shard(0)])
    found = x.new_tensor([1, 2])
    assert found.placements == (Replicate(),)
    assert whole(found).tolist() == [1.0, 2.0]
    assert found.dtype == torch.float64
    assert x.new_tensor(3.5).item() == 3.5


def test_nothing_is_drawn_on_the_meta_device(mesh):
    before = torch.get_rng_state()
    x = shardwise.distribute_tensor(torch.empty(8, 6, device="meta"), mesh, [Shard(0)])
    assert x.normal_().is_meta
    assert torch.rand_like(x).is_meta
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_on_local_tensors_are_the_programs_own(mesh):
    """One after the other for the ranks of a simulated world."""
    local = shardwise.zeros(8, 3, device_mesh=mesh, placements=[Shard(0)]).to_local()
    torch.manual_seed(1)
    local.uniform_()
    torch.manual_seed(1)
    expected = [torch.rand(2, 3) for _ in range(4)]
    assert all(torch.equal(local.on_rank(rank), expected[rank]) for rank in range(4))


def test_the_first_draw_on_a_mesh_compares_generators():
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("compared", "once"))
        with CommDebugMode() as comm:
            x = shardwise.rand(8, 6, device_mesh=mesh, placements=[Shard(0), Shard(1)])
            F.dropout(x, 0.5)
    assert [event.kind for event in comm.events] == ["all_gather_into_tensor"] * 2
    assert all(event.op == "the first random draw on a mesh" for event in comm.events)


def test_bounds_of_rrelu_that_torch_refuses(mesh):
    x = shardwise.ones(4, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(RuntimeError, match=r"[Ll]ower bound"):
        F.rrelu(x, 0.5, 0.1)


@pytest.mark.parametrize("inplace", [False, True])
def test_backward_refuses_what_a_write_changed_in_the_input_of_rrelu(mesh, inplace):
    for placement in (Replicate(), Shard(0), Partial()):
        x = shardwise.distribute_tensor(torch.randn(4, 3), mesh, [placement])
        x = x.requires_grad_() * 1
        made = F.rrelu(x, training=True, inplace=inplace)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            made.sum().backward()


# -- dropout in training ---------------------------------------------------------------------


@pytest.mark.parametrize("name", [*DROPOUTS, *FEATURE_DROPOUTS])
def test_gradients_of_dropout(layout, name):
    fn = {**DROPOUTS, **FEATURE_DROPOUTS}[name]
    shape = (8, 6, 3, 2) if name in FEATURE_DROPOUTS else (8, 6)
    x = torch.randn(shape)

    def grads(x):
        x.requires_grad_()
        y = fn(x)
        if y.requires_grad:  # a mask does not
            (y * y).sum().backward()
        return x.grad

    expected, _ = seeded(grads, x.clone())
    found, _ = seeded(grads, shardwise.distribute_tensor(x, *layout))
    if expected is not None:
        torch.testing.assert_close(whole(found), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]])
def test_recomputation_draws_the_same_again(mesh, use_reentrant, placements):
    weight, x = torch.randn(8, 6), torch.randn(5, 6)

    def grads(x, weight):
        weight.requires_grad_()

        def block(x, weight):
            return F.dropout(F.relu(F.linear(x, weight)), 0.5)

        y = checkpoint(block, x, weight, use_reentrant=use_reentrant)
        (F.dropout(y, 0.2) ** 2).sum().backward()
        return weight.grad

    expected, after = seeded(grads, x, weight.clone())
    found, state = seeded(
        grads,
        shardwise.distribute_tensor(x, mesh, [Replicate()]),
        shardwise.distribute_tensor(weight, mesh, placements),
    )
    torch.testing.assert_close(whole(found), expected)
    assert torch.equal(state, after)


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Shard(2)], [Replicate()]])
def test_dropout_inside_attention(mesh, placements):
    tensors = [torch.randn(2, 4, 5, 8) for _ in range(3)]

    def attend(*qkv):
        return F.scaled_dot_product_attention(*qkv, dropout_p=0.3)

    expected, after = seeded(attend, *tensors)
    placed = [shardwise.distribute_tensor(t, mesh, placements) for t in tensors]
    found, state = seeded(attend, *placed)
    torch.testing.assert_close(whole(found), expected)
    assert torch.equal(state, after)


def test_a_fused_kernel_does_not_draw_for_parts(mesh):
    q = shardwise.distribute_tensor(torch.randn(2, 4, 5, 8), mesh, [Shard(0)])
    with pytest.raises(UnsupportedError, match="sharding strategy"):
        aten._scaled_dot_product_flash_attention.default(q, q, q, 0.3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.inner, self.outer = nn.Dropout(0.4), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.outer(self.down(self.inner(F.relu(self.up(x)))))


PLANS = {
    "tensor parallel": {
        "up.weight": [Shard(0)],
        "up.bias": [Shard(0)],
        "down.weight": [Shard(1)],
    },
    "rows": {"up.weight": [Shard(0)], "down.weight": [Shard(0)], "down.bias": [Shard(0)]},
    "replicated": {},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("batch", [[Replicate()], [Shard(0)]], ids=["whole batch", "sharded batch"])
def test_twenty_steps_with_dropout(mesh, plan, batch):
    batches = [(torch.randn(6, 8), torch.randn(6, 8)) for _ in range(20)]

    def loss(model, x, y):
        return F.mse_loss(model(x), y)

    def history(sharded):
        torch.manual_seed(4)
        model = Block()
        if not sharded:
            return train(model, loss, batches, lr=0.1)
        shardwise.distribute_module(model, mesh, shard_by(PLANS[plan]))
        return train(model, loss, place(batches, mesh, batch), lr=0.1)

    expected = history(sharded=False)
    torch.testing.assert_close(history(sharded=True), expected)


# -- fast ------------------------------------------------------------------------------------


def test_fast_draws_repeat_per_layout_and_differ_between_layouts(mesh):
    def drawn(placements):
        torch.manual_seed(0)
        x = shardwise.randn(8, 6, device_mesh=mesh, placements=placements)
        return whole(x), whole(F.dropout(x, 0.5))

    exact = drawn([Shard(0)])
    with shardwise.rng("fast"):
        rows, again, columns = drawn([Shard(0)]), drawn([Shard(0)]), drawn([Shard(1)])
    assert all(map(torch.equal, rows, again))
    assert not torch.equal(rows[0], columns[0])
    assert not torch.equal(rows[0], exact[0])
    assert all(map(torch.equal, exact, drawn([Shard(0)]))), "the setting ends with its block"


def test_fast_draws_differ_between_shards_and_agree_between_replicas(square):
    with shardwise.rng("fast"):
        local = shardwise.rand(
            4, 6, device_mesh=square, placements=[Shard(0), Replicate()]
        ).to_local()
    parts = [local.on_rank(rank) for rank in range(4)]
    assert torch.equal(parts[0], parts[1])
    assert torch.equal(parts[2], parts[3])
    assert not torch.equal(parts[0], parts[2])


def test_fast_as_a_setting(mesh):
    before = shardwise.rng("fast")
    try:
        torch.manual_seed(0)
        fast = whole(shardwise.rand(8, device_mesh=mesh, placements=[Shard(0)]))
    finally:
        shardwise.rng("exact")
    torch.manual_seed(0)
    assert not torch.equal(fast, torch.rand(8))
    assert before is not None
    torch.manual_seed(0)
    found = whole(shardwise.rand(8, device_mesh=mesh, placements=[Shard(0)]))
    torch.manual_seed(0)
    assert torch.equal(found, torch.rand(8))


def test_fast_checkpoints_recompute_the_same(mesh):
    x = shardwise.distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)]).requires_grad_()
    with shardwise.rng("fast"):
        y = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=False)
        y.sum().backward()
    assert torch.equal(whole(x.grad), whole(y))


def test_an_unknown_mode():
    with pytest.raises(ArgumentError, match="'exact' or 'fast'"):
        shardwise.rng("quick")


STRIDES = {
    "rms_norm": lambda x: F.rms_norm(x, (4,)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, None, None, True),
    "instance_norm": lambda x: F.instance_norm(x),
    "one_hot": lambda x: F.one_hot((x * 0).long(), 3),
    "tile": lambda x: x.tile(2, 1, 2),
    "complex": lambda x: torch.complex(x, x).real,
    "polar": lambda x: torch.polar(x, x).imag,
    "normal, mean": lambda x: torch.normal(x, 1.0),
    "normal, deviation": lambda x: torch.normal(0.0, x),
    "normal, both": lambda x: torch.normal(x, x.contiguous()),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x: F.rrelu_(x - 0.5, training=True),
    "dropout": lambda x: F.dropout(x, 0.5),
}


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(2)], ids=repr)
@pytest.mark.parametrize("order", [(2, 1, 0), (0, 2, 1), (1, 0, 2)], ids=repr)
@pytest.mark.parametrize("name", STRIDES)
def test_draws_after_ops_on_a_permuted_tensor(mesh, name, order, placement):
    """A draw goes through memory: results lie there as those of one device do."""
    back = sorted(range(3), key=lambda d: order[d])
    value = torch.rand([(6, 3, 4)[d] for d in order]).permute(back) + 0.1
    found = []
    for x in (value, shardwise.distribute_tensor(value, mesh, [placement])):
        torch.manual_seed(1)
        made = STRIDES[name](x)
        drawn = F.dropout(made.float(), 0.5)
        found.append((made, drawn, torch.get_rng_state()))
    (made, drawn, state), (placed, placed_drawn, placed_state) = found
    assert placed.stride() == made.stride()
    torch.testing.assert_close(placed.full_tensor().agreed(), made)
    torch.testing.assert_close(placed_drawn.full_tensor().agreed(), drawn)
    assert torch.equal(state, placed_state)


def test_a_draw_into_a_sum_that_was_reduced_before_draws_once(mesh):
    torch.manual_seed(1)
    expected, state = torch.empty(3).normal_(), torch.get_rng_state()
    x = shardwise.distribute_tensor(torch.rand(4, 3), mesh, [Shard(0)]).sum(0)
    assert x.placements[0].is_partial()
    _ = x.abs()  # it remembers what this reduced
    torch.manual_seed(1)
    x.normal_()
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x.full_tensor().agreed(), expected)
    assert torch.equal(x.abs().full_tensor().agreed(), expected.abs())


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=repr)
@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.normal(x, 0.5),
        lambda x: torch.normal(0.5, x),
        lambda x: torch.normal(x, x[:1]),
    ],
    ids=["mean", "deviation", "both"],
)
def test_normal_values_send_zeros_through_what_came_before(mesh, draw, placement):
    weight = torch.rand(3, 3)
    placed_weight = shardwise.distribute_tensor(weight, mesh, [Replicate()])
    leaf = torch.rand(4, 3).requires_grad_()
    placed = shardwise.distribute_tensor(leaf.detach(), mesh, [placement]).requires_grad_()
    expected, state = seeded(draw, F.linear(leaf, weight))
    moved = F.linear(placed, placed_weight).redistribute(mesh, [Shard(1)])
    found, placed_state = seeded(draw, moved)
    torch.testing.assert_close(whole(found), expected)
    assert torch.equal(state, placed_state)
    found.sum().backward()
    assert placed.grad.placements == (placement,)
    assert torch.equal(whole(placed.grad), torch.zeros(4, 3))


def test_a_draw_without_entries_checks_its_range():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        empty = shardwise.zeros(0, 3, dtype=torch.bool, device_mesh=mesh, placements=[Shard(1)])
        with pytest.raises(RuntimeError, match="out of bounds for bool"):
            torch.randint_like(empty, 5)
        assert torch.randint_like(empty, 2).shape == (0, 3)
