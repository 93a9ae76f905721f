"""The specs and programs that these tests share stand beside them."""

import sys
from pathlib import Path

import pytest

import shardwise

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def world():
    """Four simulated ranks."""
    with shardwise.simulate(4):
        yield
