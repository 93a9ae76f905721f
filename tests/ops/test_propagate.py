"""The plan of a call: the cheapest of all combinations of choices."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import shardwise
from shardwise import Partial, Replicate, Shard, distribute_tensor
from shardwise.dispatch import plan, propagate

R, S0, S1 = Replicate(), Shard(0), Shard(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "placements"),
    [
        ((4,), [[S0], [S1], [R], [Partial()]]),
        ((2, 2), list(itertools.product([S0, S1, R], repeat=2))),
        ((2, 2, 2), [[S0, R, S1], [S1, S0, S0], [R, S1, Partial()]]),
    ],
    ids=str,
)
def test_the_bound_leaves_out_nothing_that_is_cheaper(monkeypatch, shape, placements):
    planned = []

    def with_and_without_bound(*args, **kwargs):
        found = propagate.propagate(*args, **kwargs)
        with monkeypatch.context() as patch:
            patch.setattr(propagate, "_least_s", lambda *_: 0.0)
            assert propagate.propagate(*args, **kwargs) == found
        planned.append(found)
        return found

    monkeypatch.setattr(plan, "propagate", with_and_without_bound)
    monkeypatch.setattr(plan, "_decisions", {})
    with shardwise.simulate(8):
        mesh = shardwise.init_device_mesh("cpu", shape)
        whole = [R] * len(shape)
        for each in placements:
            x = distribute_tensor(torch.randn(6, 5), mesh, whole).redistribute(placements=each)
            w = distribute_tensor(torch.randn(5, 5), mesh, whole).requires_grad_()
            out = F.softmax(F.linear(x, w, w[0]), 0) + F.embedding(x[:2].int() % 5, w).sum(0)[:1]
            out.square().sum().backward()
    assert len(planned) > 20
