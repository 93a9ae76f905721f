"""The specs and programs that these tests share stand beside them."""

import sys
from pathlib import Path

import pytest
from launcher import Processes

import shardwise

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def world():
    """Four simulated ranks."""
    with shardwise.simulate(4):
        yield


@pytest.fixture(scope="module")
def processes():
    """Four gloo processes; call it with a function to run on each."""
    started = Processes(4)
    yield started
    started.kill()
