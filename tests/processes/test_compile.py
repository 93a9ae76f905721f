"""torch.compile in real processes: ranks whose shards differ in length stay in step."""

import pytest
import torch
from compiled_programs import (
    beside_a_gradient,
    collectives_of_graphs,
    exported,
    graphs_of_batches,
    loaded,
    made_inside,
    sparse_steps,
    uneven_lookups,
)

import shardwise
from shardwise import Shard

pytestmark = pytest.mark.processes


def test_ranks_with_other_numbers_of_ids_stay_in_step(two_processes):
    """The second length makes sizes symbolic, on some ranks earlier than on others."""
    answers = two_processes(uneven_lookups, "aot_eager", (4, 5, 3, 1, 2, 7), timeout_s=300)
    for by_rank in zip(*answers, strict=True):
        sent = {tuple(kinds) for _, kinds in by_rank}
        assert len(sent) == 1
        assert sent != {()}
    assert [[held for held, _ in answer] for answer in answers] == [
        [2, 3, 2, 1, 1, 4],
        [2, 2, 1, 0, 1, 3],
    ]


def test_one_graph_serves_batches_that_divide_and_that_do_not(two_processes):
    for counts in two_processes(graphs_of_batches, (8, 12, 19, 11, 20), timeout_s=300):
        assert counts == [1, 2, 2, 2, 2]


def test_lookups_with_sparse_gradients(two_processes):
    """Ids and rows are sharded: they are exchanged, and their numbers differ between ranks."""
    for found, expected in two_processes(sparse_steps, False, Shard(0), Shard(0), timeout_s=300):
        torch.testing.assert_close(found, expected)


def test_tensors_made_inside(two_processes):
    for eager, compiled in two_processes(made_inside, "aot_eager", timeout_s=300):
        for one, other in zip(eager, compiled, strict=True):
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other)
            else:
                assert one[:2] == other[:2]
                assert torch.equal(one[2], other[2])


def test_graphs_hold_the_collectives_that_eager_code_issues(two_processes):
    for answer in two_processes(collectives_of_graphs, timeout_s=300):
        for in_graphs, expected, found in answer:
            assert found == expected
            assert in_graphs == sorted(expected + ["wait_tensor"] * len(expected))
        assert answer[0][1] == ["all_reduce"] * 2
        assert answer[1][1] == [
            "all_gather_into_tensor",
            "all_to_all_single",
            "all_to_all_single",
            "reduce_scatter_tensor",
        ]


def test_a_program_exported_in_a_simulated_world_runs_in_processes(two_processes):
    x = torch.randn(6, 10)
    with shardwise.simulate(2):
        file, expected = exported(x, shardwise.init_device_mesh("cpu", (2,)))
    for found in two_processes(loaded, file, x):
        torch.testing.assert_close(found, expected.agreed())


def test_an_input_that_has_a_gradient(two_processes):
    for grad in two_processes(beside_a_gradient, timeout_s=300):
        assert torch.equal(grad, torch.full((9, 4), 5.0))
