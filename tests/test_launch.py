"""run_processes: answers in order, notes on the way, and errors that name their rank."""

import pytest
import torch
import torch.distributed as dist

from shardwise.errors import LayoutError, WorldError
from shardwise.launch import run_processes

pytestmark = pytest.mark.processes


def add_up(note, start):
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    note(dist.get_rank())
    return int(value), dist.get_rank()


def refuse_on_rank_1():
    if dist.get_rank() == 1:
        raise LayoutError("this rank has no room")
    dist.barrier()


def crash():
    raise KeyError("gone")


def test_answers_and_notes():
    notes = []
    answers = run_processes(add_up, 2, 5, on_note=lambda rank, value: notes.append((rank, value)))
    assert answers == [(11, 0), (11, 1)]
    assert sorted(notes) == [(0, 0), (1, 1)]


def test_an_error_on_one_rank_ends_all():
    with pytest.raises(LayoutError, match="no room") as caught:
        run_processes(refuse_on_rank_1, 2)
    assert caught.value.__notes__ == ["On rank 1."]
    with pytest.raises(WorldError, match="KeyError: 'gone'"):
        run_processes(crash, 1)
