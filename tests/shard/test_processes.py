"""The same in four real processes as in one that plays them; and no rank is left waiting."""

import pytest
import shard_programs as programs
from both_worlds import assert_close, both

from shardwise.errors import (
    BatchError,
    IdRangeError,
    LayoutError,
    PlanError,
    RankMismatchError,
)

pytestmark = pytest.mark.processes


def test_moves(processes):
    assert_close(*both(processes, programs.moves))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("number", range(4))
def test_lookups(processes, number, mode):
    assert_close(*both(processes, programs.lookups, number, mode))


@pytest.mark.parametrize("number", range(4))
def test_weighted_bags(processes, number):
    assert_close(*both(processes, programs.weighted_bags, number))


def test_training(processes):
    assert_close(*both(processes, programs.training))


def test_sharders_and_outputs(processes):
    assert_close(*both(processes, programs.sharders_and_outputs))


def test_pieces_of_ones_own(processes):
    assert_close(*both(processes, programs.pieces_of_ones_own))


def test_sparse_gradients(processes):
    assert_close(*both(processes, programs.sparse_gradients))


def test_compiled(two_processes):
    for counts in two_processes(programs.compiled, timeout_s=120):
        for eager, fast in counts:
            assert fast == eager


@pytest.mark.parametrize(("backend", "local"), [("inductor", True), ("aot_eager", False)])
def test_compiled_outputs_that_are_laid_out(two_processes, backend, local):
    """Ranks have other code, which inductor may sort otherwise, and communicate in one order."""
    # The first size, all others, 0, and an input of two dims.
    assert set(two_processes(programs.laid_out, backend, local, timeout_s=300)) <= {3, 4}


def test_making_and_keeping(processes):
    assert_close(*both(processes, programs.making_and_keeping))


def test_state_of_another_plan(processes):
    assert_close(*both(processes, programs.state_of_another_plan))


def test_a_spec_of_ones_own(processes):
    assert_close(*both(processes, programs.a_spec_of_ones_own))


def test_checkpoints_of_torch_hold_any_spec(processes, tmp_path):
    processes(programs.in_checkpoints_of_torch, str(tmp_path))


def test_a_group_of_some_ranks(processes):
    processes(programs.on_a_group)


@pytest.mark.parametrize(
    ("program", "error", "said"),
    [
        (programs.disagreeing_specs, LayoutError, "Rank 0 has: .*rank:1/cpu, rank:0/cpu.* Rank 2"),
        (programs.disagreeing_sharders, LayoutError, "HalfAndHalf.rows=.*rank:0.*Rank 2 has: .*"),
        (programs.disagreeing_shapes, LayoutError, r"\(11, 4\).*Rank 1 has.*\(12, 4\)"),
        (programs.one_rank_with_a_wrong_path, LayoutError, "rank 3: PathError.*'weight'"),
        (programs.one_rank_with_an_empty_plan, LayoutError, "Rank 0 has: nothing more"),
        (programs.one_rank_whose_sharder_fails, LayoutError, "On rank 1: .*had enough"),
        (programs.one_rank_whose_sharder_fails_late, LayoutError, "On rank 1: .*had enough"),
        (programs.conflict_on_all_ranks, PlanError, "should not conflict"),
        (programs.one_rank_with_bad_offsets, BatchError, "rank 1: the last offset is 9"),
        (programs.one_rank_with_a_bad_id, IdRangeError, "11 rows"),
        (programs.one_rank_without_a_batch, BatchError, "On rank 2: ids are .* found NoneType"),
        (programs.one_rank_with_pieces_that_overlap, LayoutError, "overlap"),
        (
            programs.disagreeing_sources,
            ValueError,
            "does not match with src_rank=0",
        ),
        (programs.pieces_of_which_some_require_grad, ValueError, "requires_grad"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_all_ranks_raise_the_same(processes, program, error, said):
    answers = processes.run(program)
    assert len({answer.message for answer in answers}) == 1
    for answer in answers:
        assert issubclass(answer.kind, error)
        with pytest.raises(error, match=said):
            raise answer.kind(answer.message)
    assert processes(programs.sum_over_ranks) == [6] * 4


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("frozen", [False, True])
def test_an_input_that_trains_on_some_ranks(processes, dim, frozen):
    processes(programs.input_that_trains_on_some_ranks, dim, frozen)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("trained", ["weight", "bias"])
def test_a_layer_that_trains_on_one_rank(two_processes, dim, trained):
    two_processes(programs.layer_that_trains_on_one_rank, dim, trained)


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_that_train_on_some_ranks(processes, dim):
    processes(programs.weights_that_train_on_some_ranks, dim)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", programs.TRAINED_ALONE)
def test_bags_that_train_on_one_rank(two_processes, dim, name):
    two_processes(programs.bags_that_train_on_one_rank, dim, name, timeout_s=40)


def test_an_output_that_trains_on_one_rank(two_processes):
    two_processes(programs.output_that_trains_on_one_rank, timeout_s=40)


@pytest.mark.parametrize("name", programs.NEED_ALL_RANKS)
@pytest.mark.parametrize(
    ("how", "compiled"), [("no_grad", False), ("no_grad", True), ("frozen", True)]
)
def test_a_rank_that_records_no_backward(two_processes, name, how, compiled):
    """All ranks say so in forward: else those that need its backward wait for it."""
    args = programs.without_backward_on_one_rank, name, how, compiled
    answers = two_processes.run(*args, timeout_s=60)
    assert len({answer.message for answer in answers}) == 1
    for answer in answers:
        assert issubclass(answer.kind, RankMismatchError)
        assert "rank 1 will need the backward of all ranks, and rank 0 cannot" in answer.message
    assert two_processes(programs.sum_over_ranks) == [1] * 2
