"""Replica exchange: what becomes of the options of a problem, and plans that it finds."""

import itertools

import numpy as np
import pytest

from shardwise.planner.problem import ANY, BLOCK, HOST, Assignment, Option, Problem
from shardwise.planner.replicas import Replicas


def made(options, num_ranks=4, per_host=2, capacity=1.0, cost_s=1.0, **more):
    names = [f"t{i}" for i in range(len(options))]
    problem = Problem(names, options, num_ranks, np.array([capacity]), per_host, **more)
    return Replicas(problem, [list(range(len(each))) for each in options], cost_s)


def found(replicas, cost_s=1.0, rounds=2_000):
    """The first plan within the cost."""
    for plan in replicas.plans(lambda: cost_s, rounds):
        if plan.fits() and plan.cost() <= cost_s * (1 + 1e-6):
            return plan
    return None


def whole(seconds, size=0.0, num=1, **more):
    return Option("whole", shards=np.array([[seconds, size]] * num), **more)


def block(seconds, size=0.0, hosts=1):
    return Option("block", shards=np.array([[seconds, size]] * 2 * hosts), scope=BLOCK)


def test_options_that_fill_all_ranks_are_found():
    # Only with the second option of the first two tables, each on the right host, is there room.
    blocks = [[whole(1.3), block(0.5)], [whole(1.2), block(0.3)]]
    pieces = [[whole(0.7)], [whole(0.7)], [whole(0.5)], [whole(0.3)], [whole(0.2)]]
    plan = found(made(blocks + pieces))
    assert plan is not None
    assert plan.chosen[:2] == [1, 1]
    assert plan.cost() == pytest.approx(1.0)
    assert plan.ranks[0][0] // 2 != plan.ranks[1][0] // 2


def test_blocks_of_several_hosts_and_replicated_tables():
    everywhere = Option("all", everywhere=np.array([0.25, 0.1]))
    options = [
        [block(0.5, hosts=2)],
        [block(0.75)],
        [everywhere],
        *([whole(0.25)] for _ in range(4)),
    ]
    plan = found(made(options, num_ranks=6))
    assert plan is not None
    assert plan.cost() == pytest.approx(1.0)
    hosts = [sorted({rank // 2 for rank in ranks.tolist()}) for ranks in plan.ranks[:2]]
    assert sorted(itertools.chain(*hosts)) == [0, 1, 2]


def test_memory_counts():
    # By seconds each rank could have two of them, by memory one of the larger.
    options = [[whole(0.5, 0.9)], [whole(0.5, 0.9)], [whole(0.5, 0.1)], [whole(0.5, 0.1)]]
    plan = found(made(options, num_ranks=2))
    assert plan is not None
    assert plan.ranks[0] != plan.ranks[1]


@pytest.mark.parametrize("distinct", [False, True])
def test_shards_that_need_ranks_of_their_own_get_them(distinct):
    options = [[whole(0.5, num=2, scope=ANY, distinct=distinct)], [whole(1.0)]]
    plan = found(made(options, num_ranks=2, per_host=1), rounds=50)
    assert (plan is None) == distinct  # both halves on one rank are the only way


def test_no_rank_gets_two_shards_where_others_lack_the_memory():
    # Only the first rank has memory left, and room for both halves.
    full = Option("all", everywhere=np.array([[0.0, 0.1], [0.0, 0.9]]))
    halves = whole(0.2, 0.3, num=2, distinct=True)
    for plan in made([[full], [halves]], num_ranks=2, per_host=1).plans(lambda: 1.0, 50):
        assert plan.ranks[1][0] != plan.ranks[1][1]


def test_blocks_alone():
    plan = found(made([[block(0.6)], [block(0.4)], [block(1.0)]]))
    assert plan is not None
    assert plan.cost() == pytest.approx(1.0)


def test_the_base_of_every_rank_counts():
    options = [[whole(0.5)] for _ in range(4)]
    assert found(made(options, num_ranks=2, base_s=0.5), 1.4, rounds=50) is None
    assert found(made(options, num_ranks=2, base_s=0.5), 1.5, rounds=50) is not None


def test_problems_for_which_there_are_no_replicas():
    pair = whole(0.5, num=2, scope=HOST)
    assert not made([[pair]]).possible
    assert made([[pair, whole(1.0)]]).possible
    assert not made([[whole(1.0)]], at_once=1.0).possible


def test_the_same_plans_each_time():
    options = [[whole(size), block(size * 0.7)] for size in np.linspace(0.2, 0.9, 8)]
    one, other = (list(made(options).plans(lambda: 1.0, 100)) for _ in range(2))
    assert len(one) == len(other) > 1
    for mine, theirs in zip(one, other, strict=True):
        assert isinstance(mine, Assignment)
        assert mine.chosen == theirs.chosen
        assert all(map(np.array_equal, mine.ranks, theirs.ranks))
