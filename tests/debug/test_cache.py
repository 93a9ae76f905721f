"""Plans are made once and reused."""

import dataclasses
import itertools

import pytest
import torch
from by_hand import lay
from torch import nn
from torch.nn import functional as F

import shardwise
from shardwise import Replicate, Shard
from shardwise.debug import CacheStats, cache_stats
from shardwise.dispatch import plan


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_long_training_plans_nothing_new(mesh, optimizer):
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))

    def shard(name, module, mesh):
        for key, parameter in list(module.named_parameters(recurse=False)):
            to = Shard(0) if name == "0" else Replicate()
            placed = shardwise.distribute_tensor(parameter.data, mesh, [to])
            module.register_parameter(key, nn.Parameter(placed))

    shardwise.distribute_module(model, mesh, shard)
    x = lay(torch.randn(4, 6), mesh, [Shard(0)])
    target = lay(torch.tensor([0, 1, 2, 0]), mesh, [Shard(0)])
    steps = optimizer(model.parameters(), lr=0.01)
    history = []
    for _ in range(200):
        steps.zero_grad()
        F.cross_entropy(model(x), target).backward()
        steps.step()
        history.append(cache_stats())
    third, last = history[2], history[-1]
    assert (last.misses, last.size) == (third.misses, third.size)
    assert last.hits > third.hits
    # Each step makes the same calls.
    per_step = {b.hits - a.hits for a, b in itertools.pairwise(history[2:])}
    assert len(per_step) == 1


def test_a_new_layout_is_a_miss_and_then_a_hit(mesh):
    x = lay(torch.ones(8), mesh, [Shard(0)])
    before = cache_stats()
    for _ in range(3):
        x.relu()
    after = cache_stats()
    assert after.misses == before.misses + 1
    assert after.hits == before.hits + 2
    assert after.size == before.size + 1
    assert after.limit > after.size


def test_counts_outlive_a_world():
    with shardwise.simulate(2):
        mesh = shardwise.init_device_mesh("cpu", (2,))
        x = lay(torch.ones(8), mesh, [Shard(0)])
        for _ in range(5):
            x.relu()
        inside = cache_stats()
    after = cache_stats()
    assert (after.hits, after.misses, after.size) == (inside.hits, inside.misses, 0)


def test_a_full_cache_is_emptied(mesh, monkeypatch):
    monkeypatch.setattr(plan, "_MAX_ENTRIES", 4)
    x = lay(torch.ones(12), mesh, [Shard(0)])
    sizes = []
    before = cache_stats()
    for number in range(10):
        x.add(number)
        sizes.append(cache_stats().size)
    assert max(sizes) <= 4
    assert cache_stats().misses > before.misses


def test_stats_are_a_value():
    assert dataclasses.is_dataclass(CacheStats)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cache_stats().hits = 0
