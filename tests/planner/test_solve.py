"""The solver against every plan there is, on problems small enough to try them all."""

import dataclasses
import itertools

import numpy as np
import pytest

from benchmarks.planner import simplified, undominated
from shardwise.planner.exact import ExactProblem, find_highs
from shardwise.planner.packing import Packing
from shardwise.planner.problem import (
    ANY,
    BLOCK,
    HOST,
    Assignment,
    Bounds,
    Option,
    Problem,
)
from shardwise.planner.solve import NoPlanFits, solve

SOLVERS = [False, True] if find_highs() is not None else [False]


def make_problem(seed, num_tables=5, num_ranks=3, per_host=None, capacity=60.0, **more):
    """Tables that lie whole, on two ranks, on all, or on each rank of a host."""
    draw = np.random.default_rng(seed)
    options = []
    for _ in range(num_tables):
        cost, size = draw.uniform(1, 9), draw.uniform(5, 40)
        whole = np.array([[cost, size]])
        half = np.repeat(np.array([[0.6 * cost, size / 2]]), 2, 0)
        everywhere = np.array([0.5 * cost, size])
        each = [Option("whole", shards=whole), Option("half", shards=half)]
        each.append(Option("all", everywhere=everywhere))
        if per_host is not None:
            block = np.repeat(np.array([[0.7 * cost, size / per_host]]), per_host, 0)
            each.append(Option("block", shards=block, scope=BLOCK))
            each.append(Option("host", shards=half * 0.95, scope=HOST))
        options.append(each)
    names = [f"t{i}" for i in range(num_tables)]
    return Problem(names, options, num_ranks, np.array([capacity]), per_host or num_ranks, **more)


def placements(problem, option):
    if option.shards is None:
        return [()]
    num, per_host = len(option.shards), problem.ranks_per_host
    if option.scope == BLOCK:
        hosts = itertools.combinations(range(problem.num_hosts), num // per_host)
        return [tuple(h * per_host + i for h in each for i in range(per_host)) for each in hosts]
    found = itertools.combinations(range(problem.num_ranks), num)
    if option.scope == HOST:
        return [each for each in found if len({r // per_host for r in each}) == 1]
    return list(found)


def least_cost(problem):
    """By trying everything."""
    ways = [
        [(c, np.array(r, int)) for c, o in enumerate(each) for r in placements(problem, o)]
        for each in problem.options
    ]
    best = np.inf
    for picked in itertools.product(*ways):
        found = Assignment(problem, [c for c, _ in picked], [r for _, r in picked])
        if found.fits():
            best = min(best, found.cost())
    return best


@pytest.mark.parametrize("exact", SOLVERS)
@pytest.mark.parametrize("seed", range(6))
def test_finds_the_best_plan_and_proves_it(seed, exact):
    problem = make_problem(seed, num_tables=4)
    best = least_cost(problem)
    found = solve(problem, gap=1e-6, exact=exact)
    assert found.assignment.fits()
    assert found.bound_s <= best * (1 + 1e-6)
    assert found.cost_s >= best * (1 - 1e-9)
    assert found.cost_s <= best * (1 + (1e-6 if exact else 0.1))
    if exact:
        assert found.gap < 1e-4


@pytest.mark.parametrize("exact", SOLVERS)
@pytest.mark.parametrize("seed", range(3))
def test_hosts(seed, exact):
    problem = make_problem(seed, num_tables=3, num_ranks=4, per_host=2, base_s=0.5)
    best = least_cost(problem)
    found = solve(problem, gap=1e-6, exact=exact)
    assert found.assignment.fits()
    assert found.bound_s <= best * (1 + 1e-6)
    assert best * (1 - 1e-9) <= found.cost_s <= best * (1 + (1e-6 if exact else 0.15))


@pytest.mark.parametrize("exact", SOLVERS)
def test_shards_that_load_every_rank_too(exact):
    """As a table on one rank does, whose rows every rank asks for."""
    problem = make_problem(0, num_tables=4)
    for each in problem.options:
        each[0] = dataclasses.replace(each[0], everywhere=np.array([0.2, 1.0]))
    best = least_cost(problem)
    found = solve(problem, gap=1e-6, exact=exact)
    assert found.bound_s <= best * (1 + 1e-6)
    assert best * (1 - 1e-9) <= found.cost_s <= best * (1 + (1e-6 if exact else 0.1))


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_share_cores(seed):
    problem = make_problem(seed, num_tables=4, at_once=1.5, base_s=1.0)
    best = least_cost(problem)
    found = solve(problem, gap=1e-6)
    assert found.bound_s <= best * (1 + 1e-6)
    assert best * (1 - 1e-9) <= found.cost_s <= best * 1.1


@pytest.mark.parametrize("seed", range(8))
def test_bounds_hold(seed):
    problem = make_problem(seed, num_tables=4, capacity=45.0)
    bound = Bounds(problem).best()
    best = least_cost(problem)
    if bound is None:
        assert best == np.inf
    else:
        assert bound.seconds <= best * (1 + 1e-9)


def test_memory_that_no_plan_fits():
    with pytest.raises(NoPlanFits, match="memory"):
        solve(make_problem(0, capacity=10.0))


def test_the_same_answer_each_time():
    first, second = (
        solve(make_problem(7, num_tables=12, capacity=200.0), gap=0.0) for _ in range(2)
    )
    assert first.assignment.chosen == second.assignment.chosen
    assert all(map(np.array_equal, first.assignment.ranks, second.assignment.ranks))


def test_answers_get_better_and_the_first_comes_at_once():
    told = []
    found = solve(make_problem(3, num_tables=12, capacity=200.0), gap=0.0, tell=told.append)
    costs = [each.cost_s for each in told]
    assert costs == sorted(costs, reverse=True)
    assert told[-1].cost_s == found.cost_s
    hurried = solve(make_problem(3, num_tables=12, capacity=200.0), gap=0.0, seconds=0.0)
    assert hurried.timed_out
    assert hurried.cost_s >= found.cost_s


def test_options_that_others_are_as_good_as():
    shard = np.array([[1.0, 5.0]])
    options = [
        Option("a", shards=shard),
        Option("b", shards=shard * 2),
        simplified(Option("c", shards=shard, scope=HOST), 2, 2),
        Option("d", everywhere=np.array([0.5, 5.0])),
        Option("e", shards=np.array([[2.0, 1.0]])),
    ]
    assert options[2].scope == ANY
    assert [options[i].label for i in undominated(options)] == ["a", "d", "e"]


def test_a_block_on_all_hosts_lies_everywhere():
    option = Option("x", shards=np.ones((4, 2)), scope=BLOCK)
    assert simplified(option, 2, 2).everywhere.tolist() == [1.0, 1.0]


@pytest.mark.skipif(find_highs() is None, reason="highspy is not installed")
@pytest.mark.parametrize("by_host", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", [30.0, 200.0])
def test_bounds_of_the_solver_are_below_the_best_plan(seed, by_host, capacity):
    problem = make_problem(seed, num_tables=3, num_ranks=4, per_host=2, capacity=capacity)
    best = least_cost(problem)
    if not np.isfinite(best):
        return
    allowed = [list(range(len(each))) for each in problem.options]
    model = ExactProblem(problem, allowed, 0.0, best * 1.05, by_host=by_host)
    answer = model.solve(find_highs(), seconds=20.0, gap=1e-6)
    assert answer.bound_s <= best * (1 + 1e-6)
    if not by_host:
        assert answer.bound_s >= best * (1 - 1e-3)


@pytest.mark.skipif(find_highs() is None, reason="highspy is not installed")
def test_hosts_first_sees_that_shards_are_whole():
    # Three whole tables of 4 on two hosts of two ranks: with the blocks, some rank has 4 + 3.
    whole = [[Option("whole", shards=np.array([[4.0, 1.0]]))] for _ in range(3)]
    blocks = [[Option("block", shards=np.full((2, 2), 3.0), scope=BLOCK)] for _ in range(2)]
    names = [f"t{i}" for i in range(5)]
    problem = Problem(names, whole + blocks, 4, np.array([100.0]), 2)
    assert Bounds(problem).best().seconds == pytest.approx(6.0)
    model = ExactProblem(problem, [[0]] * 5, 0.0, 8.0, by_host=True)
    answer = model.solve(find_highs(), seconds=20.0, gap=1e-6)
    assert answer.bound_s == pytest.approx(7.0, rel=1e-4)
    packing = Packing(problem, 8.0)
    assert packing.fill_hosts(answer.found.chosen, answer.found.ranks)
    assert packing.highest == pytest.approx(7.0)


@pytest.mark.skipif(find_highs() is None, reason="highspy is not installed")
@pytest.mark.parametrize("by_host", [True, False])
def test_idle_ranks_cost_the_solver_nothing(by_host):
    # Three tables of at most eight shards cannot use more ranks, so the program has no others.
    sizes = []
    for num_ranks in (800, 8_000):
        problem = make_problem(5, 3, num_ranks, per_host=8, capacity=1e9)
        everything = [list(range(len(each))) for each in problem.options]
        model = ExactProblem(problem, everything, 0.0, 100.0, by_host=by_host).model
        sizes.append((len(model.costs), len(model.entries)))
        found = solve(problem, gap=1e-6, seconds=10.0)
        assert found.gap <= 1e-6
    assert sizes[0] == sizes[1]
    assert sizes[0][0] < 2_000
