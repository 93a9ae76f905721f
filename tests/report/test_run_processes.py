"""run_processes: answers in order, notes on the way, and errors that name their rank."""

import process_programs
import pytest

from shardwise.errors import LayoutError, WorldError
from shardwise.report.processes import run_processes

pytestmark = pytest.mark.processes


def test_answers_and_notes():
    notes = []
    answers = run_processes(
        process_programs.add_up, 2, 5, on_note=lambda rank, value: notes.append((rank, value))
    )
    assert answers == [(11, 0), (11, 1)]
    assert sorted(notes) == [(0, 0), (1, 1)]


def test_an_error_on_one_rank_ends_all():
    with pytest.raises(LayoutError, match="no room") as caught:
        run_processes(process_programs.refuse_on_rank_1, 2)
    assert caught.value.__notes__ == ["On rank 1."]
    with pytest.raises(WorldError, match="KeyError: 'gone'"):
        run_processes(process_programs.crash, 1)
