"""Sharded tables in real processes."""

import programs
import pytest
from both_worlds import assert_bits, assert_close, both
from launcher import Failure
from programs import S0, S1, R

from shardwise import Shard

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_exchanged_ids(processes, sparse):
    assert_close(*both(processes, programs.exchanged_table_steps, sparse))


@pytest.mark.parametrize("ids_placement", [R, S0], ids=repr)
@pytest.mark.parametrize("placement", [S0, S1, R, Shard(0, (0, 2, 9, 0))], ids=repr)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags(processes, mode, placement, ids_placement):
    assert_close(*both(processes, programs.bag_steps, mode, placement, ids_placement))


def test_bags_with_nan(processes):
    assert_bits(*both(processes, programs.maximum_with_nan))


def test_short_bags(processes):
    assert_close(*both(processes, programs.short_bag_steps))


def all_raise_index_errors(processes, program, *args):
    for failure in processes.run(program, *args, timeout_s=30):
        assert isinstance(failure, Failure)
        assert issubclass(failure.kind, IndexError), failure.trace
    assert processes(programs.sum_over_ranks) == [[6]] * 4


@pytest.mark.parametrize("placement", [S0, S1, R, Shard(0, (0, 500, 0, 0))], ids=repr)
def test_every_rank_hears_of_a_bad_id(processes, placement):
    all_raise_index_errors(processes, programs.one_bad_id_of_many, placement)


def test_every_rank_of_a_grid_hears_of_a_bad_id(processes):
    all_raise_index_errors(processes, programs.one_bad_id_on_a_grid)


@pytest.mark.parametrize("ids_placement", [R, S0], ids=repr)
def test_no_rank_holds_the_gradient_of_others_rows(processes, ids_placement):
    """A rank owns 64 MB of the table. The whole table's gradient would be 256 MB."""
    for peak in processes(programs.peak_of_a_table_step, ids_placement):
        assert 60e6 < peak < 120e6
