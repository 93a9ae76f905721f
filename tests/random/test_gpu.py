"""One device's random numbers on a GPU, in a simulated world of four."""

import pytest
import torch
from devices import needs_cuda
from parity import place, shard_by, train, whole
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import Partial, Replicate, Shard
from shardwise.debug import check_rng
from shardwise.errors import UnsupportedError

pytestmark = needs_cuda
aten = torch.ops.aten


@pytest.fixture
def cuda():
    torch.ones(1, device="cuda")  # a mesh warns when no device was used before
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cuda", (4,))


def seeded(fn, *args):
    """What `fn` returns from a fixed seed, and the state that it leaves."""
    torch.manual_seed(11)
    return fn(*args), torch.cuda.get_rng_state()


DRAWS = {
    "normal_": lambda t: t.normal_(1.0, 2.0),
    "uniform_": lambda t: t.uniform_(-1.0, 2.0),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(2.0),
    "geometric_": lambda t: t.geometric_(0.3),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(2, 9),
    "bernoulli_ of a tensor": lambda t: t.bernoulli_(t.abs().tanh()),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 9),
    "bernoulli": lambda t: torch.bernoulli(t.abs().tanh()),
    "normal": lambda t: torch.normal(t, t.abs()),
    "dropout": lambda t: F.dropout(t, 0.4),
    "the mask of dropout": lambda t: torch.native_dropout(t, 0.4, True)[1],
    "dropout in place": lambda t: F.dropout(t * 1, 0.4, inplace=True),
    "alpha dropout": lambda t: F.alpha_dropout(t, 0.4, training=True),
    "dropout2d": lambda t: F.dropout2d(t[:, :, None, None], 0.4),
    "kaiming_uniform_": nn.init.kaiming_uniform_,
    "trunc_normal_": nn.init.trunc_normal_,
    "poisson": lambda t: torch.poisson(t.abs()),
    "multinomial": lambda t: torch.multinomial(t[:, :64].abs(), 3),
}


# The second fills the threads of a GPU several times over: values then repeat their threads.
@pytest.mark.parametrize("shape", [(8, 6), (3001, 1025)], ids=str)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), "explicit", Replicate()], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_values(cuda, name, placement, shape):
    if placement == "explicit":
        placement = Shard(0, (5, 0, shape[0] - 8, 3))
    x = torch.randn(shape, device="cuda")
    expected, after = seeded(DRAWS[name], x.clone())
    found, state = seeded(DRAWS[name], shardwise.distribute_tensor(x, cuda, [placement]))
    assert torch.equal(whole(found), expected)
    assert torch.equal(state, after)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["normal_", "uniform_", "dropout", "bernoulli_"])
@pytest.mark.parametrize("turned", [False, True])
def test_dtypes_and_memory_orders(cuda, name, dtype, turned):
    x = torch.randn(1000, 1030, device="cuda").to(dtype)
    x = x.t() if turned else x
    expected, after = seeded(DRAWS[name], x.clone())
    found, state = seeded(DRAWS[name], shardwise.distribute_tensor(x, cuda, [Shard(0)]))
    assert torch.equal(whole(found), expected)
    assert torch.equal(state, after)


def test_a_generator_of_ones_own(cuda):
    ours, theirs = (torch.Generator("cuda").manual_seed(7) for _ in range(2))
    for _ in range(2):
        found = shardwise.randn(50, 6, device_mesh=cuda, placements=[Shard(0)], generator=ours)
        expected = torch.randn(50, 6, device="cuda", generator=theirs)
        assert torch.equal(whole(found), expected)
        assert torch.equal(ours.get_state(), theirs.get_state())


def test_factories(cuda):
    to = {"device_mesh": cuda, "placements": [Shard(0)]}
    for ours, theirs in (
        (lambda: shardwise.rand(50, 6, **to), lambda: torch.rand(50, 6, device="cuda")),
        (
            lambda: shardwise.randint(3, 9, (50, 6), **to),
            lambda: torch.randint(3, 9, (50, 6), device="cuda"),
        ),
        (lambda: shardwise.randperm(500, **to), lambda: torch.randperm(500, device="cuda")),
    ):
        expected, after = seeded(theirs)
        found, state = seeded(ours)
        assert torch.equal(whole(found), expected)
        assert torch.equal(state, after)


def test_a_sum_passes_through_dropout(cuda):
    x = shardwise.distribute_tensor(torch.randn(64, 32, device="cuda"), cuda, [Replicate()])
    expected, _ = seeded(lambda: F.dropout(whole(x), 0.5))
    found, _ = seeded(lambda: F.dropout(x.redistribute(placements=[Partial()]), 0.5))
    assert found.placements == (Partial(),)
    torch.testing.assert_close(whole(found), expected)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation(cuda, use_reentrant):
    weight, x = torch.randn(8, 6, device="cuda"), torch.randn(5, 6, device="cuda")

    def grads(x, weight):
        weight.requires_grad_()
        y = checkpoint(
            lambda x, w: F.dropout(F.relu(F.linear(x, w)), 0.5),
            x,
            weight,
            use_reentrant=use_reentrant,
        )
        (F.dropout(y, 0.2) ** 2).sum().backward()
        return weight.grad

    expected, after = seeded(grads, x, weight.clone())
    found, state = seeded(
        grads,
        shardwise.distribute_tensor(x, cuda, [Replicate()]),
        shardwise.distribute_tensor(weight, cuda, [Shard(0)]),
    )
    torch.testing.assert_close(whole(found), expected)
    assert torch.equal(state, after)


def test_dropout_inside_attention_takes_the_math_path(cuda):
    tensors = [torch.randn(2, 4, 5, 8, device="cuda") for _ in range(3)]

    def attend(*qkv):
        return F.scaled_dot_product_attention(*qkv, dropout_p=0.3)

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, after = seeded(attend, *tensors)
    found, state = seeded(
        attend, *(shardwise.distribute_tensor(t, cuda, [Shard(1)]) for t in tensors)
    )
    torch.testing.assert_close(whole(found), expected)
    assert torch.equal(state, after)


def test_a_fused_kernel_with_dropout_is_refused(cuda):
    half = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.float16)
    q = shardwise.distribute_tensor(half, cuda, [Shard(1)])
    with pytest.raises(UnsupportedError, match="sharding strategy"):
        aten._scaled_dot_product_flash_attention.default(q, q, q, 0.3)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.4)

    def forward(self, x):
        return x + self.dropout(self.down(self.dropout(F.relu(self.up(x)))))


def test_twenty_steps_with_dropout(cuda):
    batches = [
        (torch.randn(6, 8, device="cuda"), torch.randn(6, 8, device="cuda")) for _ in range(20)
    ]
    plan = {"up.weight": [Shard(0)], "up.bias": [Shard(0)], "down.weight": [Shard(1)]}

    def loss(model, x, y):
        return F.mse_loss(model(x), y)

    def history(sharded):
        torch.manual_seed(4)
        model = Block().to("cuda")
        if not sharded:
            return train(model, loss, batches, lr=0.1)
        shardwise.distribute_module(model, cuda, shard_by(plan))
        return train(model, loss, place(batches, cuda), lr=0.1)

    expected = history(sharded=False)
    torch.testing.assert_close(history(sharded=True), expected)


def test_fast_draws_repeat(cuda):
    def drawn(placements):
        torch.manual_seed(0)
        x = shardwise.randn(80, 60, device_mesh=cuda, placements=placements)
        return whole(F.dropout(x, 0.5))

    with shardwise.rng("fast"):
        assert torch.equal(drawn([Shard(0)]), drawn([Shard(0)]))
        assert not torch.equal(drawn([Shard(0)]), drawn([Shard(1)]))


def test_check_rng(cuda):
    check_rng()
    check_rng(cuda)
    check_rng(generator=torch.Generator("cuda").manual_seed(1))
