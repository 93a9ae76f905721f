"""Every plan below a cost, against trying everything."""

import dataclasses

import numpy as np
import pytest

from shardwise.planner.enumeration import enumerated
from shardwise.planner.local_search import TooMany
from shardwise.planner.problem import HOST, Bounds, Option, Problem
from tests.planner.test_solve import least_cost, make_problem


def free(problem):
    """Without options whose shards are all on one host, which are not enumerated."""
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
    assert enumerated(bounds, best * (1 - 1e-6)) is None
    found = enumerated(bounds, best * (1 + 1e-6))
    assert found is not None
    assert found.fits()
    assert found.cost() == pytest.approx(best)


def test_ranks_with_many_pieces():
    # Six pieces of a sixth fill each of two ranks, and leave no place for one more.
    options = [[Option("whole", shards=np.array([[1 / 6, 0.0]]))] for _ in range(12)]
    names = [f"t{i}" for i in range(13)]
    more = [Option("whole", shards=np.array([[0.01, 0.0]]))]
    problem = Problem(names[:12], options, 2, np.array([1.0]), 2)
    assert enumerated(Bounds(problem), 1.0001) is not None
    problem = Problem(names, [*options, more], 2, np.array([1.0]), 2)
    assert enumerated(Bounds(problem), 1.006) is None
    assert enumerated(Bounds(problem), 1.0101) is not None


def test_ranks_that_differ_are_as_good_as_the_best_of_their_host():
    # The load of every rank differs; the enumeration may find too much, never too little.
    everywhere = np.array([[0.0, 0.0], [0.5, 0.0]])
    options = [
        [Option("all", everywhere=everywhere)],
        [Option("whole", shards=np.array([[0.5, 0]]))],
    ]
    problem = Problem(["a", "b"], options, 2, np.array([1.0]), 2)
    assert enumerated(Bounds(problem), 0.51) is not None
    assert enumerated(Bounds(problem), 0.49) is None


def test_what_cannot_be_enumerated():
    with pytest.raises(TooMany):
        enumerated(Bounds(make_problem(0, 3, num_ranks=4, per_host=2)), 100.0)
    with pytest.raises(TooMany):
        enumerated(Bounds(make_problem(0, 4, at_once=1.5)), 100.0)
    with pytest.raises(TooMany):
        enumerated(Bounds(make_problem(0, 30, 16, capacity=1e9)), 100.0)
