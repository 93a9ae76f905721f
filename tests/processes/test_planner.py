"""Plans in real processes: the first rank's, on all of them."""

import planner_programs
import pytest
from launcher import Failure

from shardwise.planner import NoPlanFits

pytestmark = pytest.mark.processes


def test_all_ranks_get_one_plan(processes):
    found = processes(planner_programs.planned, None)
    assert all(each == found[0] for each in found)


def test_all_ranks_hear_that_no_plan_fits(processes):
    for failure in processes.run(planner_programs.planned, 20_000):
        assert isinstance(failure, Failure)
        assert issubclass(failure.kind, NoPlanFits)
