"""Filling ranks anew: what a plan keeps, what it may not pass, and packings without waste."""

import numpy as np
import pytest

from shardwise.planner.local_search import Filler
from shardwise.planner.problem import ANY, BLOCK, Assignment, Option, Problem


def whole(seconds, size=0.0):
    return Option("whole", shards=np.array([[seconds, size]]))


def on_rank_0(options, num_ranks=4, per_host=None, capacity=1.0):
    """A plan with the first option of each table, all shards on the first ranks."""
    names = [f"t{i}" for i in range(len(options))]
    problem = Problem(names, options, num_ranks, np.array([capacity]), per_host or num_ranks)
    ranks = [
        np.arange(each[0].num_shards)
        if each[0].scope == BLOCK
        else np.zeros(each[0].num_shards, int)
        for each in options
    ]
    return Assignment(problem, [0] * len(options), ranks)


def refilled(plan, cost_s=1.0, width=200):
    return Filler(plan.problem).refilled(plan, cost_s, width)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_can_be_full_become_full(seed):
    # 16 ranks cut into one to four pieces each, and a block that one host has besides them.
    draw = np.random.default_rng(seed)
    sizes, block = [], np.array([[0.2, 0.0]]).repeat(8, 0)
    for rank in range(16):
        cuts = np.sort(draw.uniform(0.05, 0.95, draw.integers(0, 4)))
        sizes += (np.diff([0.0, *cuts, 1.0]) * (0.8 if rank < 8 else 1.0)).tolist()
    options = [[Option("block", shards=block, scope=BLOCK)]]
    options += [[whole(size)] for size in draw.permutation(sizes).tolist()]
    plan = on_rank_0(options, 16, 8)
    found = refilled(plan, 1.01)
    assert found is not None
    assert found.cost() <= 1.01 * (1 + 1e-9)
    assert found.chosen == plan.chosen
    assert (found.ranks[0] == plan.ranks[0]).all()
    assert found.loads().sum() == pytest.approx(plan.loads().sum())


def test_no_rank_passes_its_memory():
    options = [[whole(0.4, 0.9)], [whole(0.4, 0.9)], [whole(0.5, 0.05)], [whole(0.5, 0.05)]]
    found = refilled(on_rank_0(options, 2))
    assert found is not None
    assert found.fits()
    options.append([whole(0.01, 0.9)])
    assert refilled(on_rank_0(options, 2)) is None


def test_shards_that_need_ranks_of_their_own_get_them():
    halves = np.array([[0.5, 0.0], [0.5, 0.0]])
    for distinct in (True, False):
        split = Option("split", shards=halves, scope=ANY, distinct=distinct)
        options = [[split], [whole(0.4)], [whole(0.4)]]
        found = refilled(on_rank_0(options, 2))
        assert found is not None
        assert not distinct or len(set(found.ranks[0].tolist())) == 2
    # Both halves on one rank are the only way here.
    for distinct in (True, False):
        split = Option("split", shards=halves, scope=ANY, distinct=distinct)
        assert (refilled(on_rank_0([[split], [whole(0.8)]], 2)) is None) == distinct


def test_what_cannot_be_filled():
    assert refilled(on_rank_0([[whole(0.6)] for _ in range(5)], 4)) is None  # too large in pairs
    assert refilled(on_rank_0([[whole(1.1)]], 4)) is None  # too large alone
    assert refilled(on_rank_0([[whole(0.01)] for _ in range(65)], 4)) is None  # too many pieces
    everywhere = Option("all", everywhere=np.array([1.2, 0.0]))
    assert refilled(on_rank_0([[everywhere], [whole(0.1)]], 4)) is None  # full before
    assert refilled(on_rank_0([[everywhere]], 4), 2.0) is None  # nothing to place


def test_the_base_of_every_rank_counts():
    plan = on_rank_0([[whole(0.5)], [whole(0.5)]], 1)
    problem = Problem(plan.problem.names, plan.problem.options, 1, np.array([1.0]), 1, base_s=0.5)
    with_base = Assignment(problem, plan.chosen, plan.ranks)
    assert refilled(with_base, 1.4) is None
    found = refilled(with_base, 1.51)
    assert found is not None
    assert found.cost() == pytest.approx(1.5)
