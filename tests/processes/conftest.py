"""One set of processes serves all tests of this folder: joining takes a moment."""

import pytest
from launcher import Processes


@pytest.fixture(scope="session")
def _started():
    kept = []
    yield kept
    for processes in kept:
        processes.kill()


@pytest.fixture
def processes(_started):
    """Four gloo processes; call it with a function to run on each."""
    if not _started or not _started[-1].alive:
        _started.append(Processes(4))
    return _started[-1]
