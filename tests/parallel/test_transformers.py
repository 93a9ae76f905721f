"""Models as Hugging Face writes them, made from a config and sharded by plan."""

import parallel_programs
import pytest
from launcher import Processes

import shardwise

pytest.importorskip("transformers")
models = pytest.importorskip("hugging_face_models")

MODELS = [models.llama, models.tied_llama, models.gpt2, models.mixtral]

pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_as_on_one_device(make, num_ranks):
    with shardwise.simulate(num_ranks):
        parallel_programs.hugging_face(make, num_ranks)


@pytest.fixture(scope="module")
def two_processes():
    """Fewer than elsewhere: each of them imports the library."""
    started = Processes(2)
    yield started
    started.kill()


@pytest.mark.processes
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_in_processes(two_processes, make):
    two_processes(parallel_programs.hugging_face, make, 2, timeout_s=120)
