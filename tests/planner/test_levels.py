"""The program of levels: its bounds against trying everything, and plans made of its solutions."""

import dataclasses

import numpy as np
import pytest

from shardwise.planner.exact import find_highs
from shardwise.planner.levels import Levels
from shardwise.planner.problem import BLOCK, HOST, Bounds, Option, Problem, TooMany
from tests.planner.test_solve import least_cost, make_problem

pytestmark = pytest.mark.skipif(find_highs() is None, reason="highspy is not installed")


def solved(problem, cost_s, gap=1e-6):
    """The bound, and the cheapest plan that the solutions lead to."""
    allowed = [list(range(len(each))) for each in problem.options]
    levels, plans = Levels(problem, allowed, 0.0, cost_s), []

    def better(values):
        plan = levels.plan(values, 0.9 * cost_s, cost_s)
        if plan is not None:
            plans.append(plan)

    answer = levels.program.solve(find_highs(), seconds=20.0, gap=gap, better=better)
    return levels.seconds(answer.bound), min(plans, key=lambda plan: plan.cost(), default=None)


def whole(seconds, size=0.0, num=1, **more):
    return Option("whole", shards=np.array([[seconds, size]] * num), **more)


def block(seconds, size=0.0, hosts=1):
    return Option("block", shards=np.array([[seconds, size]] * 2 * hosts), scope=BLOCK)


def made(options, num_ranks=4, capacity=1.0, **more):
    names = [f"t{i}" for i in range(len(options))]
    return Problem(names, options, num_ranks, np.array([capacity]), 2, **more)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("capacity", [30.0, 200.0])
@pytest.mark.parametrize(("num_ranks", "per_host"), [(4, 2), (3, None)])
def test_bounds_are_below_the_best_plan(seed, capacity, num_ranks, per_host):
    more = {"base_s": 0.5} if seed % 2 else {}
    problem = make_problem(seed, 3, num_ranks, per_host, capacity, **more)
    best = least_cost(problem)
    if not np.isfinite(best):
        return
    bound, plan = solved(problem, best * 1.05)
    assert bound <= best * (1 + 1e-6)
    if plan is not None and plan.fits():
        assert plan.cost() >= best * (1 - 1e-9)


def test_shards_are_whole():
    # Three tables of 4 on two hosts of two ranks: with blocks of 3, some rank has 4 + 3.
    options = [*([whole(4.0)] for _ in range(3)), *([block(3.0)] for _ in range(2))]
    problem = made(options)
    assert Bounds(problem).best().seconds == pytest.approx(6.0)
    bound, plan = solved(problem, 8.0)
    assert bound == pytest.approx(7.0)
    assert plan.cost() == pytest.approx(7.0)
    assert solved(problem, 6.9)[0] == np.inf


def test_blocks_go_where_the_pieces_leave_room():
    # A level of 0.9 leaves no room for a block of 0.2, though the rooms add up to enough.
    options = [*([whole(0.9)] for _ in range(2)), [block(0.55)], [block(0.55)]]
    assert solved(made(options), 1.05)[0] == np.inf
    bound, plan = solved(made(options), 1.2)
    assert bound <= 1.1 * (1 + 1e-6)
    assert plan.cost() == pytest.approx(1.1)


def test_options_that_fill_all_ranks_are_found():
    blocks = [[whole(1.3), block(0.5)], [whole(1.2), block(0.3)]]
    pieces = [[whole(0.7)], [whole(0.7)], [whole(0.5)], [whole(0.3)], [whole(0.2)]]
    _, plan = solved(made(blocks + pieces), 1.01)
    assert plan.chosen[:2] == [1, 1]
    assert plan.cost() == pytest.approx(1.0)


def test_blocks_of_several_hosts_and_replicated_tables():
    everywhere = Option("all", everywhere=np.array([0.25, 0.1]))
    options = [[block(0.5, hosts=2)], [block(0.75)], [everywhere], *([whole(0.25)],) * 4]
    _, plan = solved(made(options, num_ranks=6), 1.01)
    assert plan.cost() == pytest.approx(1.0)
    assert plan.fits()


def test_memory_counts():
    # By seconds one rank could have both of the larger tables.
    options = [[whole(0.5, 0.9)], [whole(0.5, 0.9)], [whole(0.5, 0.1)], [whole(0.5, 0.1)]]
    _, plan = solved(made(options, num_ranks=2), 1.01)
    assert plan.ranks[0] != plan.ranks[1]
    assert plan.fits()


@pytest.mark.parametrize("distinct", [False, True])
def test_shards_that_need_ranks_of_their_own_get_them(distinct):
    options = [[whole(0.5, num=2, distinct=distinct)], [whole(1.0)]]
    bound, _ = solved(made(options, num_ranks=2), 1.2)
    assert (bound == np.inf) == distinct  # both halves on one rank are the only way


def test_what_has_no_plan():
    pair = made([[whole(0.5, num=2, scope=HOST)]])
    assert solved(pair, 1.0)[1] is None  # the program may give its shards to two hosts
    many = dataclasses.replace(make_problem(0, 30, 16, 8, 1e9))
    with pytest.raises(TooMany):
        solved(many, 100.0)
