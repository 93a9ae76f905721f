"""Bad input is a clear error on every rank: none is left waiting for the others."""

import programs
import pytest
import torch
from launcher import Failure, Processes
from programs import S0, R

import shardwise

pytestmark = pytest.mark.processes


def failures(processes, fn, *args):
    """The Failure of each rank, or None; the processes must be in step afterwards."""
    results = processes.run(fn, *args, timeout_s=30)
    assert processes(programs.sum_over_ranks, timeout_s=30) == [[6]] * 4
    return [result if isinstance(result, Failure) else None for result in results]


@pytest.mark.parametrize(
    ("fn", "kind", "text"),
    [
        (programs.wrong_number_of_placements, ValueError, "2 placements [S(0), S(1)]"),
        (programs.dim_out_of_range, ValueError, "Shard(2) on axis 'line' is out of range"),
        (programs.sizes_that_do_not_add_up, ValueError, "add up to 5, but dim 0"),
        (programs.no_such_source, ValueError, "src_data_rank=4"),
        (programs.mesh_larger_than_the_world, RuntimeError, "8 ranks"),
        (programs.op_without_a_rule, NotImplementedError, "sharding strategy registered"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_all_ranks_refuse(processes, fn, kind, text):
    for failure in failures(processes, fn):
        assert failure is not None
        assert issubclass(failure.kind, kind)
        assert text in failure.message


@pytest.mark.parametrize(
    "odd",
    [torch.ones(2, 2), torch.ones(2, 3, dtype=torch.float64), torch.ones(3, 3), torch.ones(2)],
    ids=["another length", "another dtype", "another size elsewhere", "fewer dims"],
)
def test_one_local_tensor_that_does_not_fit(processes, odd):
    for failure in failures(processes, programs.one_rank_brings, odd):
        assert failure is not None
        assert issubclass(failure.kind, shardwise.LayoutError)
        assert "from_local" in failure.message


def test_an_uneven_part_of_another_length(processes):
    for failure in failures(processes, programs.uneven_part_of_another_length):
        assert failure is not None
        assert "coordinate (3,)" in failure.message


@pytest.mark.parametrize("placement", [R, S0], ids=repr)
def test_one_bad_id(processes, placement):
    """A batch-sharded bad id is on one rank only, but all have asked for the same lookup."""
    for failure in failures(processes, programs.one_bad_id, placement):
        assert failure is not None
        assert issubclass(failure.kind, IndexError)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("index", IndexError, "77"),
        ("index_select", IndexError, "out of range"),
        ("gather", RuntimeError, "77"),
        ("gather along another dim", RuntimeError, "77"),
        ("scatter_", RuntimeError, "77"),
        ("index_add", RuntimeError, "77"),
        ("take", IndexError, "77"),
        ("cross_entropy", IndexError, "77"),
        ("multi_margin_loss", RuntimeError, "target out of range"),
        ("binary_cross_entropy", RuntimeError, "between 0 and 1"),
        ("normal", RuntimeError, "std >= 0.0"),
        ("bernoulli", RuntimeError, "p_in"),
        ("//", RuntimeError, "ZeroDivisionError"),
        ("%", RuntimeError, "ZeroDivisionError"),
        ("number // tensor", RuntimeError, "ZeroDivisionError"),
        ("number % tensor", RuntimeError, "ZeroDivisionError"),
        ("cholesky", torch.linalg.LinAlgError, "cholesky"),
        ("cholesky_ex", torch.linalg.LinAlgError, "cholesky_ex"),
        ("eigh", torch.linalg.LinAlgError, "eigh"),
        ("eigvals", RuntimeError, "infs or NaNs"),
        ("svd", torch.linalg.LinAlgError, "svd"),
        ("pinv", torch.linalg.LinAlgError, "svd"),
        ("lu_unpack", RuntimeError, "pivots"),
        ("sorter", RuntimeError, "out of range"),
        ("unpool", RuntimeError, "77"),
    ],
)
def test_what_one_rank_refuses_all_refuse(processes, name, kind, text):
    """As one device does; rank 3 alone holds the value, and says what is wrong with it."""
    heard = failures(processes, programs.refused_on_rank_3, name)
    assert len({failure and failure.message for failure in heard}) == 1
    for failure in heard:
        assert failure is not None
        assert failure.kind is kind
        if name != "cholesky":  # which all ranks factor
            assert failure.message.startswith("On rank 3: ")
        assert text in failure.message


@pytest.mark.parametrize("name", ["index", "index_put", "index_add", "index_copy"])
def test_a_rank_without_entries_refuses_too(processes, name):
    """Its kernel has nothing to look up, and does not look at the index."""
    for failure in failures(processes, programs.refused_but_on_rank_3, name):
        assert failure is not None
        assert "out of bounds" in failure.message


def test_ranks_outside_the_mesh_run_the_same_program(processes):
    """With empty tensors, and random numbers that stay in step."""
    results = processes(programs.mesh_of_two_ranks, timeout_s=30)
    assert [held for held, _, _ in results[2:]] == [[0] * 6] * 2
    assert results[0][0] == [3, 3, 5, 3, 3, 3]
    assert torch.equal(results[0][1], results[1][1])
    assert results[2][1].numel() == 0
    assert [drawn for *_, drawn in results] == [results[0][2]] * 4


def test_ranks_outside_the_mesh_train_along(processes):
    """Modules stay their own there, and tables give zeros of the right shapes."""
    results = processes(programs.train_on_two_ranks, timeout_s=60)
    assert results[0][:2] == results[1][:2]
    assert [held for *_, held in results] == [20, 20, 0, 0]
    assert len({shapes for _, shapes, _ in results}) == 1
    for rank in (2, 3):
        assert results[rank][0] != results[0][0]


def test_ranks_outside_the_mesh_have_no_values(processes):
    results = processes.run(programs.value_outside_the_mesh, timeout_s=30)
    assert results[:2] == [5.0] * 2
    for rank, result in enumerate(results[2:], start=2):
        assert isinstance(result, Failure)
        assert issubclass(result.kind, shardwise.WorldError)
        assert f"Rank {rank} is not in mesh" in result.message
    assert processes(programs.sum_over_ranks) == [[6]] * 4


def test_tensors_and_meshes_of_a_world_that_is_gone():
    """A destroyed process group, a stale mesh and a layout of another world, on every rank."""
    processes = Processes(4)
    try:
        answers = processes(
            programs.errors_of_a_world_that_is_gone, processes._store.port, timeout_s=90
        )
    finally:
        processes.kill()
    for errors, values in answers:
        for name, error in errors.items():
            assert error is not None, f"{name} did not raise"
            assert issubclass(error[0], shardwise.ShardwiseError), (name, error)
            assert "world" in error[1] or "mesh" in error[1] or "process group" in error[1], error
        assert values == list(range(8))


def test_one_rank_that_runs_out_of_memory():
    """It says so at once; the others give up within the timeout and point at it."""
    processes = Processes(4, timeout_s=10)
    try:
        results = processes.run(programs.one_rank_runs_out_of_memory, 2, timeout_s=60)
    finally:
        processes.kill()
    for rank, result in enumerate(results):
        assert isinstance(result, Failure)
        assert issubclass(result.kind, shardwise.CollectiveError)
        assert "all_gather over axis 'line'" in result.message
        assert f"failed on rank {rank}" in result.message
    assert "can't allocate memory" in results[2].message
