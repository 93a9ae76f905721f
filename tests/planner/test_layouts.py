"""Layouts of blocks over hosts: plans and proofs, against trying everything."""

import dataclasses

import numpy as np
import pytest

from shardwise.planner.exact import find_highs
from shardwise.planner.layouts import laid_out
from shardwise.planner.problem import BLOCK, HOST, Bounds, Option, Problem, TooMany
from tests.planner.test_solve import least_cost, make_problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_highs() is None, reason="highspy is not installed"),
]


def asked(bounds, cost_s):
    return laid_out(bounds, cost_s, find_highs())


def free(problem):
    """Without options whose shards are all on one host, which are not always decided."""
    kept = [[option for option in each if option.scope != HOST] for each in problem.options]
    return dataclasses.replace(problem, options=kept)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [35.0, 60.0, 1e9])
@pytest.mark.parametrize(("num_ranks", "per_host"), [(3, None), (4, 2)])
def test_there_is_a_plan_from_the_least_cost_on(seed, capacity, num_ranks, per_host):
    more = {"base_s": 0.5} if seed % 2 else {}
    problem = free(make_problem(seed, 4, num_ranks, per_host, capacity, **more))
    best = least_cost(problem)
    if not np.isfinite(best):
        return
    bounds = Bounds(problem)
    assert asked(bounds, best * (1 - 1e-6)) is None
    found = asked(bounds, best * (1 + 1e-6))
    assert found is not None
    assert found.fits()
    assert found.cost() == pytest.approx(best)


def test_ranks_with_many_pieces():
    # Six pieces of a sixth fill each of two ranks, and leave no place for one more.
    options = [[Option("whole", shards=np.array([[1 / 6, 0.0]]))] for _ in range(12)]
    names = [f"t{i}" for i in range(13)]
    more = [Option("whole", shards=np.array([[0.01, 0.0]]))]
    problem = Problem(names[:12], options, 2, np.array([1.0]), 2)
    assert asked(Bounds(problem), 1.0001) is not None
    problem = Problem(names, [*options, more], 2, np.array([1.0]), 2)
    assert asked(Bounds(problem), 1.006) is None
    assert asked(Bounds(problem), 1.0101) is not None


def test_ranks_that_differ_are_as_good_as_the_best_of_their_host():
    # The load of every rank differs; it may find too much, never too little.
    everywhere = np.array([[0.0, 0.0], [0.5, 0.0]])
    options = [
        [Option("all", everywhere=everywhere)],
        [Option("whole", shards=np.array([[0.5, 0]]))],
    ]
    problem = Problem(["a", "b"], options, 2, np.array([1.0]), 2)
    assert asked(Bounds(problem), 0.51) is not None
    assert asked(Bounds(problem), 0.49) is None


@pytest.mark.parametrize("seed", range(12))
def test_shards_of_one_host(seed):
    # The program may put them on several hosts; then it cannot tell.
    problem = make_problem(seed, 4, 4, 2, 60.0)
    bounds, best = Bounds(problem), least_cost(problem)
    try:
        assert asked(bounds, best * (1 - 1e-6)) is None
        found = asked(bounds, best * (1 + 1e-6))
    except TooMany:
        return
    assert found.fits()
    assert found.cost() == pytest.approx(best)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_and_pieces_that_leave_nothing_empty(seed):
    # Ranks of three hosts beside blocks of different sizes, cut into pieces.
    draw, options = np.random.default_rng(seed), []
    for blocks in ((0.1, 0.17), (0.23,), ()):
        options += [
            [Option("block", shards=np.array([[size, 0.01]] * 4), scope=BLOCK)] for size in blocks
        ]
        for _ in range(4):
            shares = draw.uniform(0.7, 1.3, draw.integers(2, 4))
            for size in (1 - sum(blocks)) * shares / shares.sum():
                options.append([Option("whole", shards=np.array([[size, 0.01]]))])
    order = draw.permutation(len(options)).tolist()
    names = [f"t{i}" for i in order]
    problem = Problem(names, [options[i] for i in order], 12, np.array([1.0]), 4)
    found, again = (asked(Bounds(problem), 1.0 + 1e-6) for _ in range(2))
    assert found.fits()
    assert found.cost() <= 1.0 + 1e-6
    assert found.chosen == again.chosen
    assert [r.tolist() for r in found.ranks] == [r.tolist() for r in again.ranks]


def test_one_piece_more_than_there_is_room_for():
    # Five pieces of 0.6 on four ranks, on average less than full.
    options = [[Option("whole", shards=np.array([[0.6, 0.0]]))] for _ in range(5)]
    problem = Problem([f"t{i}" for i in range(5)], options, 4, np.array([1.0]), 2)
    assert asked(Bounds(problem), 1.19) is None
    assert asked(Bounds(problem), 1.21).cost() == pytest.approx(1.2)


def test_blocks_of_several_hosts_and_pieces_of_no_time():
    block = Option("block", shards=np.array([[0.5, 0.1]] * 4), scope=BLOCK)
    options = [[block], [block], [Option("whole", shards=np.array([[0.0, 0.7]]))]] * 2
    problem = Problem([f"t{i}" for i in range(6)], options, 8, np.array([1.0]), 2)
    assert asked(Bounds(problem), 0.99) is None
    found = asked(Bounds(problem), 1.01)
    assert found.fits()
    assert found.cost() == pytest.approx(1.0)


def test_what_it_cannot_tell():
    with pytest.raises(TooMany):
        asked(Bounds(make_problem(0, 4, at_once=1.5)), 100.0)
    with pytest.raises(TooMany):
        asked(Bounds(make_problem(0, 30, 16, capacity=1e9)), 100.0)
