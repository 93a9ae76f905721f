"""Random draws in compiled code: one device's, where the compiler leaves torch's ops in place."""

import pytest
import torch
from by_hand import value
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard

pytestmark = pytest.mark.slow

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def seeded(fn, *args):
    torch.manual_seed(11)
    return fn(*args), torch.get_rng_state()


def dropped(x):
    return F.dropout(x.relu(), 0.4) + torch.rand_like(x)


DRAWS = {
    "dropout": dropped,
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "normal_": lambda x: torch.empty_like(x).normal_(1.0, 2.0) * x,
    "exponential_": lambda x: torch.empty_like(x).exponential_() * x,
    "bernoulli": lambda x: torch.bernoulli(x, 0.3) * x,
    "bernoulli of a tensor": lambda x: torch.bernoulli(x.sigmoid()) * x,
    "bernoulli_ of a tensor": lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()) * x,
    "multinomial": lambda x: torch.multinomial(x.abs(), 2),
    "dropout inside attention": lambda x: F.scaled_dot_product_attention(
        *(x[None, None],) * 3, dropout_p=0.3
    ),
    "normal of a tensor": lambda x: torch.normal(x, 2.0),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "randint_like": lambda x: torch.randint_like(x, 9) * x,
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("placement", [S0, S1, R], ids=repr)
def test_one_devices_numbers(pair, name, placement):
    fast = torch.compile(DRAWS[name], backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (7, 10):
        x = torch.randn(rows, 5)
        expected, after = seeded(DRAWS[name], x)
        found, state = seeded(fast, shardwise.distribute_tensor(x, pair, [placement]))
        torch.testing.assert_close(value(found), expected)
        assert torch.equal(state, after)


def test_gradients_of_compiled_dropout(pair):
    x = torch.randn(7, 5)

    def grad(fn, x):
        x.requires_grad_()
        fn(x).square().sum().backward()
        return x.grad

    expected, _ = seeded(grad, dropped, x.clone())
    fast = torch.compile(dropped, backend="aot_eager", fullgraph=True)
    found, _ = seeded(grad, fast, shardwise.distribute_tensor(x, pair, [S0]))
    torch.testing.assert_close(value(found), expected)


def test_inductor_with_torchs_own_draws(pair):
    x = torch.randn(7, 5)
    expected, after = seeded(dropped, x)
    fast = torch.compile(dropped, fullgraph=True, options={"fallback_random": True})
    found, state = seeded(fast, shardwise.distribute_tensor(x, pair, [S0]))
    torch.testing.assert_close(value(found), expected)
    assert torch.equal(state, after)


def test_inductor_draws_what_it_draws_for_one_device(pair):
    """Its own numbers, other than eager ones, on one device as on many."""
    x = torch.randn(7, 5)
    expected, _ = seeded(torch.compile(dropped, fullgraph=True), x)
    torch._dynamo.reset()
    fast = torch.compile(dropped, fullgraph=True)
    found, _ = seeded(fast, shardwise.distribute_tensor(x, pair, [S0]))
    torch.testing.assert_close(value(found), expected)
