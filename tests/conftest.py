"""Settings and fixtures of all tests."""

import gc
import os

import hypothesis
import pytest
import torch
from launcher import Processes

import shardwise

# Two cores at most: threads of tiny ops only wait for each other.
torch.set_num_threads(1)
# Inductor compiles where it is called: its pool would import torch beside each process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The same examples every time: a failure in CI is a failure at the desk.
hypothesis.settings.register_profile(
    "shardwise", derandomize=True, deadline=None, max_examples=100, database=None
)
hypothesis.settings.load_profile("shardwise")


# Imported by tests that skip without transformers; there are no doctests to collect in it.
collect_ignore = ["parallel/hugging_face_models.py"]


def pytest_collection_finish():
    """What was imported and collected stays to the end: the garbage collector passes over it."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def mesh():
    """Four simulated ranks in a row."""
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cpu", (4,))


@pytest.fixture
def square():
    """Four simulated ranks, two by two."""
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))


@pytest.fixture(scope="module")
def processes():
    """Four gloo processes; call it with a function to run on each."""
    started = Processes(4)
    yield started
    started.kill()
