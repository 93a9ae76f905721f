"""What all tests of compiled code start from."""

import pytest
import torch

import shardwise


@pytest.fixture(autouse=True)
def _forget():
    """Each test starts without compiled code."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def pair():
    """Two simulated ranks: half the compile time of four."""
    with shardwise.simulate(2):
        yield shardwise.init_device_mesh("cpu", (2,))
