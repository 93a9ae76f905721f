"""Settings and fixtures of all tests."""

import gc
import os
import re
import sys

import hypothesis
import pytest
import torch
import torch._functorch.config as functorch
from _pytest.doctest import DoctestModule
from launcher import Processes, forked_python

import shardwise

# Two cores at most: threads of tiny ops only wait for each other.
torch.set_num_threads(1)
# What is not there needs no seed, but torch would keep one for later with the stack of the call.
for device in (torch.cuda, torch.mtia, torch.xpu):
    if not device.is_available():
        device.manual_seed_all = lambda seed: None
# Inductor compiles where it is called: its pool would import torch beside each process.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# The same examples every time: a failure in CI is a failure at the desk.
hypothesis.settings.register_profile(
    "shardwise", derandomize=True, deadline=None, max_examples=100, database=None
)
hypothesis.settings.load_profile("shardwise")


#: How a file says that all of it is slow.
_ALL_SLOW = re.compile(r"^pytestmark = \[?\s*pytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path, config):
    """Slow files that are left out are not imported either: models and compilers above all."""
    asked = config.option.markexpr
    if "not slow" in asked and " or " not in asked and collection_path.suffix == ".py":
        return True if _ALL_SLOW.search(collection_path.read_text()) else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Examples are in the package and on its pages: none is searched for in the tests."""
    found = yield
    return [each for each in found if not isinstance(each, DoctestModule)]


def pytest_collection_modifyitems(items):
    """First what needs processes, then what takes long.

    Each worker begins with a stretch of the list and ends with the others' last tests: one alone
    starts processes, and none is left with a long test at the end.
    """
    for marker in ("slow", "processes"):
        items.sort(key=lambda item: item.get_closest_marker(marker) is None)


def pytest_collection_finish():
    """What was imported and collected stays to the end: the garbage collector passes over it."""
    if "torch._dynamo" in sys.modules:
        import unlogged_compiler  # noqa: F401
    gc.collect()
    gc.freeze()
    # What tests import later, the compiler above all, makes full passes slow: fewer of them.
    gc.set_threshold(5_000, 20, 50)


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _freeze():
    """What a file leaves, the compiler's caches above all, stays to the end like what it imported.

    Otherwise each full garbage collection, and each search for tied modules, takes up to a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def fresh_compiler():
    """Nothing is compiled before the test, nor left after it."""
    torch._dynamo.reset()
    # Older compilers fail over sizes that an op with effects keeps; see docs/concepts/compile.md.
    with functorch.patch(donated_buffer=torch.__version__ >= "2.13"):
        yield
    torch._dynamo.reset()


@pytest.fixture
def mesh():
    """Four simulated ranks in a row."""
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cpu", (4,))


@pytest.fixture(scope="module")
def mesh_of():
    """Meshes of one simulated world of 12 ranks, by shape."""
    with shardwise.simulate(12):
        yield lambda shape: shardwise.DeviceMesh(
            "cpu", torch.arange(torch.Size(shape).numel()).view(shape)
        )


@pytest.fixture
def square():
    """Four simulated ranks, two by two."""
    with shardwise.simulate(4):
        yield shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "cols"))


@pytest.fixture(scope="module")
def _started():
    """By number of ranks, the processes that serve all tests of a file.

    Not longer: each group of ranks has threads that wake up a hundred times a second.
    """
    started = {}
    yield started
    for each in started.values():
        each.kill()


def _running(started, size):
    if size not in started or not started[size].alive:
        started[size] = Processes(size)
    return started[size]


@pytest.fixture
def processes(_started):
    """Four gloo processes; call it with a function to run on each."""
    return _running(_started, 4)


@pytest.fixture
def two_processes(_started):
    """Two gloo processes: for programs that every rank compiles for itself."""
    return _running(_started, 2)


@pytest.fixture(scope="module")
def python():
    """A program that does what Python does, in a process forked with torch imported."""
    with forked_python() as path:
        yield path
