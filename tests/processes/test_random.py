"""Random numbers in four real processes, and what happens when their generators differ."""

import sys

import pytest
import random_programs
import torch
from both_worlds import assert_bits, assert_close, both
from launcher import Failure

from shardwise import RankMismatchError

pytestmark = pytest.mark.processes


def test_both_worlds_draw_the_same(processes):
    assert_bits(*both(processes, random_programs.draws))


def test_both_worlds_draw_the_same_fast(processes):
    assert_bits(*both(processes, random_programs.fast_draws))


def test_a_step_that_recomputes(processes):
    assert_close(*both(processes, random_programs.recomputed_step))


def test_compiled(processes):
    held, real = both(processes, random_programs.compiled_dropout)
    assert_bits(held, real)
    expected, after = random_programs.eager_dropout()
    torch.testing.assert_close(torch.cat(held["dropped"]), expected)
    assert all(torch.equal(state, after) for state in (*held["after"], *real["after"]))


@pytest.mark.parametrize(
    "program",
    [
        random_programs.draw_after_another_seed,
        random_programs.sparse_after_another_seed,
        random_programs.check_after_another_seed,
        random_programs.check_a_given_generator,
    ],
    ids=lambda program: program.__name__,
)
def test_all_ranks_are_told_which_differ(processes, program):
    for result in processes.run(program, 2):
        assert isinstance(result, Failure)
        assert issubclass(result.kind, RankMismatchError)
        assert "ranks [0, 1, 3]; one on ranks [2]" in result.message
        assert "torch.manual_seed(seed)" in result.message
    assert processes(random_programs.check_when_all_is_well) == [True] * 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_the_whole_is_never_in_memory(processes):
    num_rows, row = 8192, 4096
    for growth, part in processes(random_programs.peak_growth_of_an_initialisation, num_rows, row):
        assert part == num_rows * row
        assert part <= growth < part * 1.25
