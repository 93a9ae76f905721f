"""What one rank finds wrong, all ranks raise; in gloo processes: tests/processes."""

import pytest
import torch

import shardwise
from shardwise import LayoutError, LocalTensor
from shardwise.comm.agreement import (
    Fault,
    Faults,
    Meeting,
    agree,
    gather,
    gather_numbers,
    gather_texts,
    is_agreed,
    joint_error,
    raise_together,
)
from shardwise.core.mesh import grid_of
from shardwise.debug import CommDebugMode
from shardwise.errors import BatchError, CollectiveError, IdRangeError
from shardwise.testing import Corrupt


@pytest.fixture(params=[(4,), (2, 2)], ids=str)
def grid(request):
    with shardwise.simulate(4):
        yield grid_of(shardwise.init_device_mesh("cpu", request.param))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({0: "a", 1: "a", 2: "a"}, "x: a"),
        ({2: "a"}, "x: On rank 2: a"),
        ({2: "b", 0: "a"}, "x: On rank 0: a\nOn rank 2: b"),
        ({1: "a", 2: "a"}, "x: On ranks 1-2: a"),
    ],
)
def test_ranks_are_named_unless_all_say_the_same(texts, said):
    error = joint_error("x: ", {rank: Fault(text) for rank, text in texts.items()}, 3)
    assert isinstance(error, LayoutError)
    assert str(error) == said
    assert is_agreed(error)


def test_the_first_rank_decides_the_kind():
    faults = {3: Fault("a", BatchError), 1: Fault("b", IdRangeError)}
    assert isinstance(joint_error("", faults, 4), IdRangeError)


def each_own_rank():
    return LocalTensor.per_rank(torch.tensor)


def test_numbers_of_all_ranks(grid):
    with CommDebugMode() as comm:
        found = gather_numbers(grid, "x", lambda mine: ([int(mine), 7], None), each_own_rank())
    assert found == [(rank, 7) for rank in range(4)]
    # One gather along each axis, of the two numbers and the status.
    assert len(comm.events) == grid.num_axes
    assert comm.events[0].num_bytes == 3 * 8


def test_a_fault_of_one_rank_is_the_error_of_all(grid):
    def tell(mine):
        return [0], "ünfit" if int(mine) == 2 else None

    with CommDebugMode() as comm, pytest.raises(LayoutError, match=r"^x: On rank 2: ünfit$"):
        gather_numbers(grid, "x", tell, each_own_rank())
    assert len(comm.events) == 2 * grid.num_axes  # and one for the text


def test_texts_of_different_lengths(grid):
    assert gather_texts(grid, "x", lambda rank: "é" * rank) == ["", "é", "éé", "ééé"]
    assert gather_texts(grid, "x", lambda rank: "") == [""] * 4


def test_rows_to_each_and_to_all():
    with shardwise.simulate(3):
        grid = grid_of(shardwise.init_device_mesh("cpu", (3,)))
        rows = LocalTensor.per_rank(lambda r: torch.tensor([[10 * r + to] for to in range(3)]))
        meeting = Meeting(grid, 0, rows, LocalTensor.per_rank(lambda r: torch.tensor([r, 5])))
        arrived, told = meeting.finish()
        assert arrived.on_rank(1).tolist() == [[1], [11], [21]]
        assert told.tolist() == [[0, 5], [1, 5], [2, 5]]


def test_a_kind_of_error_travels_with_the_text(grid):
    faults = Faults(grid, "x")

    def row(rank):
        return [faults.status(rank, Fault("no row", IdRangeError) if rank else None)]

    statuses = gather(grid, "x", row).flatten().tolist()
    assert [bool(status) for status in statuses] == [False, True, True, True]
    with pytest.raises(IdRangeError, match=r"^On ranks 1-3: no row$"):
        faults.check(statuses)


def test_what_all_ranks_refuse_is_raised_as_it_is(grid):
    def fail():
        raise raised

    raised = KeyError("x")
    with pytest.raises(KeyError) as caught:
        raise_together(grid, range(grid.num_axes), fail)
    assert caught.value is raised
    with CommDebugMode() as comm:
        assert raise_together(grid, [0], lambda: 5) == 5
    assert [(event.kind, event.num_bytes) for event in comm.events] == [("all_reduce", 8)]


def test_one_mistake_everywhere_is_raised_as_it_is(grid):
    problem = ValueError("no")
    with CommDebugMode() as comm, pytest.raises(ValueError, match="no") as caught:
        agree(grid, "x", "y", problem)
    assert caught.value is problem
    assert is_agreed(problem)
    agree(grid, "x", "y")
    assert len(comm.events) == grid.num_axes


def test_with_another_default_device(grid):
    with torch.device("meta"):
        agree(grid, "x", "y")
        assert gather_texts(grid, "x", str) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("bit", [0, 40, 62, 63, 64, 130])
def test_what_arrives_damaged_is_said(bit):
    """A status or a digest that was changed on its way: an error of ours, on all ranks alike."""
    with shardwise.simulate(4, faults=[Corrupt(2, at=0, bit=bit)]):
        grid = grid_of(shardwise.init_device_mesh("cpu", (4,)))
        with pytest.raises(CollectiveError, match="the plan arrived changed"):
            agree(grid, "the plan", "one line")
