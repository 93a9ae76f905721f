"""Ops without a rule of their own are taken apart; numbers stay one device's."""

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.dtensor.fallback import DECOMPOSITIONS

CALLS = {
    "mse_loss": F.mse_loss,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "l1_loss": F.l1_loss,
    "binary_cross_entropy": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "with_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "kl_div": lambda x, y: F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "glu": lambda x, y: F.glu(x, 1).sum() + y.sum(),
    "einsum": lambda x, y: torch.einsum("ij,kj->ik", x, y).exp().sum(),
    "matmul": lambda x, y: (x.view(1, 5, 6) @ y.t()).pow(2).sum(),
    "norm": lambda x, y: (x * y).norm(),
    "logsumexp": lambda x, y: (x + y).logsumexp(1).sum(),
    "cumsum": lambda x, y: (x.cumsum(0) * y).sum(),
    "pad": lambda x, y: F.pad(x * y, (1, 1)).pow(2).sum(),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_losses_and_others_give_the_numbers_of_one_device(mesh, name, placement):
    call = CALLS[name]
    alone = [torch.randn(5, 6, dtype=torch.float64).requires_grad_() for _ in range(2)]
    expected = call(*alone)
    expected.backward()
    sharded = [
        shardwise.distribute_tensor(t.detach(), mesh, [placement]).requires_grad_() for t in alone
    ]
    found = call(*sharded)
    found.backward()
    torch.testing.assert_close(found.full_tensor().detach().agreed(), expected.detach())
    for leaf, one in zip(sharded, alone, strict=True):
        torch.testing.assert_close(leaf.grad.full_tensor().agreed(), one.grad)


@torch.library.custom_op("shardwise_tests::gelu_of", mutates_args=())
def gelu_of(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def test_what_the_backend_has_no_kernel_for_is_its_own_error(mesh, monkeypatch):
    """In an op that is decomposed too, where it could be taken for a missing rule."""
    op = torch.ops.shardwise_tests.gelu_of.default
    monkeypatch.setitem(DECOMPOSITIONS, op, F.gelu)
    whole = torch.ones(4, 4)
    x = shardwise.distribute_tensor(whole, mesh, [Shard(0)])
    torch.testing.assert_close(op(x).full_tensor(), F.gelu(whole))
    with pytest.raises(NotImplementedError) as alone:
        op(whole.long())
    with pytest.raises(NotImplementedError) as found:
        op(x.long())
    assert str(found.value) == str(alone.value)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_foreach_optimizers(mesh, make):
    whole = [torch.randn(5, 3), torch.randn(4)]
    grads = [torch.randn(5, 3), torch.randn(4)]
    alone = [w.clone().requires_grad_() for w in whole]
    sharded = [shardwise.distribute_tensor(w, mesh, [Shard(0)]).requires_grad_() for w in whole]
    for one, many, grad in zip(alone, sharded, grads, strict=True):
        one.grad = grad.clone()
        many.grad = shardwise.distribute_tensor(grad, mesh, [Shard(0)])
    for parameters in (alone, sharded):
        optimizer = make(parameters, lr=0.1, foreach=True)
        for _ in range(3):
            optimizer.step()
    for one, many in zip(alone, sharded, strict=True):
        torch.testing.assert_close(many.full_tensor().detach().agreed(), one.detach())


def test_foreach_writes_replicas_once(mesh):
    """Played ranks share a replica and not a shard; both are in one list."""
    placed = [
        shardwise.distribute_tensor(torch.zeros(4), mesh, [p]) for p in (Replicate(), Shard(0))
    ]
    torch._foreach_add_(placed, 1.0)
    assert [t.full_tensor().agreed().tolist() for t in placed] == [[1.0] * 4] * 2


def test_foreach_on_local_tensors_that_are_shared_differently_is_refused(mesh):
    shared = shardwise.distribute_tensor(torch.zeros(4), mesh, [Replicate()]).to_local()
    apart = shardwise.distribute_tensor(torch.zeros(4), mesh, [Shard(0)]).to_local()
    with pytest.raises(shardwise.RankMismatchError, match="one tensor at a time"):
        torch._foreach_add_([shared, apart], 1.0)


def test_what_cannot_be_taken_apart_says_so(mesh):
    @torch.library.custom_op("shardwise_tests::opaque", mutates_args=())
    def opaque(x: torch.Tensor) -> torch.Tensor:
        return x.flip(0)

    x = shardwise.distribute_tensor(torch.eye(4), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="does not have a sharding strategy registered"):
        opaque(x)
