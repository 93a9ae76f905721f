"""A torchrec model's tables, plan and optimizer state, in real processes."""

import pytest
import torchrec_programs as programs
from launcher import Processes

pytest.importorskip("torchrec", reason="torchrec is not installed")
pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pair():
    processes = Processes(2)
    yield processes
    processes.kill()


@pytest.mark.parametrize("optimizer", ["rowwise", "adagrad"])
def test_training_goes_on_here_and_there(pair, optimizer):
    for plan in pair(programs.there_and_back, optimizer, timeout_s=240):
        assert plan == {
            "a": {"kind": "table_wise", "rank": 1},
            "b": "row_wise",
            "c": {"kind": "column_wise", "ranks": [0, 1]},
            "d": "data_parallel",
        }
