"""Sharded modules in compiled code: the graph breaks at a sharded weight, and the rest compiles."""

import pytest
import torch
from shard_cases import chunks, per_rank
from shard_models import Towers
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise import DTensor, LocalTensor
from shardwise.shard import ShardingPlan, shard_module, shard_tensor

PLANS = {
    "rows": {"user.weight": chunks(0, 0, 1, 2, 3), "item.weight": chunks(0, 2, 0, 1)},
    "columns": {"user.weight": chunks(1, 0, 1, 2, 3), "item.weight": chunks(1, 3, 1)},
    "dense": {"dense.weight": chunks(0, 0, 1, 2, 3), "dense.bias": chunks(0, 1, 0)},
}


def whole(grad):
    """All of a sharded gradient, or what rank 1 has of a plain one."""
    grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
    return grad.on_rank(1) if isinstance(grad, LocalTensor) else grad


# torch looks at every tensor that crosses a break, also at those that have no `grad`.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_same_as_eager(world, plan):
    model = shard_module(Towers(), ShardingPlan(plan))
    users = per_rank(lambda r, g: torch.randint(0, 11, (5,), generator=g))
    items = per_rank(lambda r, g: torch.randint(0, 9, (5, 3), generator=g))
    counter = CompileCounterWithBackend("aot_eager")
    found = []
    for run in (model, torch.compile(model, backend=counter)):
        model.zero_grad()
        out = run(users, items)
        out.square().mean().backward()
        grads = [whole(p.grad).clone() for p in model.parameters()]
        found.append((out.detach(), grads))
    (out, grads), (compiled_out, compiled_grads) = found
    for rank in range(4):
        torch.testing.assert_close(compiled_out.on_rank(rank), out.on_rank(rank))
    for grad, compiled in zip(grads, compiled_grads, strict=True):
        torch.testing.assert_close(compiled, grad)
    assert counter.frame_count >= 1
    torch._dynamo.reset()


def test_elementwise_ops_keep_the_spec(world):
    st = shard_tensor(torch.randn(11, 6), chunks(0, 2, 0, 1))
    doubled = torch.compile(lambda x: x.tanh() * 2, backend="eager")(st)
    assert doubled.sharding_spec() == st.sharding_spec()
    assert torch.equal(doubled, st.tanh() * 2)
    torch._dynamo.reset()
