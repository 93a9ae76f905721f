"""A program gives the same in four real processes and in one that plays them."""

import functools

import programs
import pytest
import torch
from both_worlds import assert_bits, assert_close, both
from programs import S0, S1, R

import shardwise
from shardwise import Shard

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (1, 2)], ids=str)
def test_moves(processes, shape):
    assert_bits(*both(processes, programs.moves, shape))


def test_moves_on_a_grid(processes):
    assert_bits(*both(processes, programs.moves_on_a_grid))


@pytest.mark.parametrize("shape", [(8, 4), (5, 3)], ids=str)
def test_moves_that_are_awaited_later(processes, shape):
    assert_bits(*both(processes, programs.moves_apart, shape))


@pytest.mark.parametrize("number", range(len(programs.CUBES)))
def test_moves_on_a_cube(processes, number):
    assert_bits(*both(processes, programs.moves_on_a_cube, number))


def test_every_dtype(processes):
    assert_bits(*both(processes, programs.moves_of_dtypes))


def test_distribute_tensor(processes):
    assert_bits(*both(processes, programs.distributed_from_other_ranks))


@pytest.mark.parametrize("reduce_op", ["max", "min"])
def test_order_does_not_matter_to_max_and_min(processes, reduce_op):
    assert_bits(*both(processes, programs.reductions, reduce_op, torch.float32))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16], ids=str)
@pytest.mark.parametrize("reduce_op", ["sum", "product"])
def test_integers_are_exact(processes, reduce_op, dtype):
    assert_bits(*both(processes, programs.reductions, reduce_op, dtype))


@pytest.mark.parametrize("reduce_op", ["sum", "avg", "product"])
def test_float_sums_are_close(processes, reduce_op):
    assert_close(*both(processes, programs.reductions, reduce_op, torch.float32))


@pytest.mark.parametrize("batch", [R, S0], ids=repr)
def test_mlp_step(processes, batch):
    assert_close(*both(processes, programs.mlp_step, batch))


@pytest.mark.parametrize("ids", [R, S0], ids=repr)
@pytest.mark.parametrize("placement", [S0, S1, Shard(0, (0, 9, 2, 0))], ids=repr)
def test_table_step(processes, placement, ids):
    assert_close(*both(processes, programs.table_step, placement, ids))


def test_table_on_a_grid_step(processes):
    assert_close(*both(processes, programs.table_on_a_grid_step))


def test_a_step_with_moves_that_are_awaited_later(processes):
    assert_close(*both(processes, programs.apart_step))


@pytest.mark.parametrize("batch", [R, S0], ids=repr)
def test_block_steps(processes, batch):
    assert_close(*both(processes, programs.block_steps, batch, "Adam"))


@pytest.mark.parametrize("optimizer", [name for name in programs.OPTIMIZERS if name != "Adam"])
def test_optimizers(processes, optimizer):
    assert_close(*both(processes, programs.block_steps, R, optimizer))


def test_an_infinity_on_one_rank_skips_a_scaled_step(processes):
    assert_close(*both(processes, programs.scaled_step))


def test_compiled_steps(two_processes):
    """Every rank compiles for itself; none waits for a graph that another does not have."""
    answers = two_processes(programs.compiled_steps, timeout_s=120)
    expected = programs.steps_of_one_device()
    for rank, held in enumerate(answers):
        said = functools.partial("rank {}: {}".format, rank)
        torch.testing.assert_close(held, expected, msg=said)


@pytest.mark.parametrize(
    "program",
    [
        programs.convolutional_net,
        programs.attention_and_recurrence,
        programs.picked_and_written,
        programs.mapped_over_parts,
        programs.plain_parameters,
    ],
    ids=lambda program: program.__name__,
)
def test_layers_and_whole_ops(processes, program):
    assert_close(*both(processes, program))


def test_what_was_saved_in_a_simulated_world_is_loaded_in_processes(processes):
    with shardwise.simulate(4):
        content = programs.saved()
    for requires_grad, placements, whole, shape in processes(programs.loaded, content):
        assert requires_grad
        assert placements == (S0,)
        assert whole.tolist() == list(range(10))
        assert shape == (2,)


def test_a_part_saved_by_a_process_is_no_whole_tensor(processes):
    contents = processes(programs.saved)
    for _, _, whole, _ in processes(programs.loaded_mine, contents):
        assert whole.tolist() == list(range(10))
    with shardwise.simulate(4), pytest.raises(shardwise.WorldError, match="full_tensor"):
        programs.loaded(contents[0])


def test_expanded_gradients(processes):
    held, real = both(processes, programs.expanded_gradients)
    assert_close(held, real)
    for rank in range(4):
        torch.testing.assert_close(real["whole grad"][rank], real["expected"][rank])
        torch.testing.assert_close(real["product"][rank], real["expected product"][rank])


def test_terms_that_do_not_pass(processes):
    held, real = both(processes, programs.terms_that_do_not_pass)
    assert_bits(held, real)
    expected = {"long": 2, "bool": False, "inf": float("inf"), "over zero": float("inf")}
    for name, number in (*expected.items(), ("factors", 2)):
        assert [part.item() for part in real[name]] == [number] * 4


def test_bits(processes):
    assert_close(*both(processes, programs.bits))


def test_half_precision_moves_under_autocast(processes):
    assert processes(programs.half_precision_under_autocast) == [(True, "torch.float16")] * 4


@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("name", ["group_norm", "instance_norm", "batch_norm", "layer_norm"])
def test_norms_with_a_bias_and_no_weight(processes, name, rows):
    found = processes(programs.norms_with_a_bias_alone, name, rows, timeout_s=30)
    assert found == [[True, True]] * 4


def test_infinite_factors_of_some_ranks(processes):
    expected = [2.0, 2.0, 3.0, float("inf")]
    assert processes(programs.infinite_factors_of_some_ranks) == [expected] * 4
    assert processes(programs.sum_over_ranks) == [[6]] * 4
