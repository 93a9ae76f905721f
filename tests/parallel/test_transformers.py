"""Models as Hugging Face writes them, made from a config and sharded by plan."""

from collections import Counter

import parallel_programs
import pytest
import torch

import shardwise
from shardwise.debug import CommDebugMode
from shardwise.parallel import parallelize_module

pytest.importorskip("transformers")
models = pytest.importorskip("hugging_face_models")

MODELS = [models.llama, models.tied_llama, models.gpt2, models.mixtral]
MORE_MODELS = [models.llama_prepared, models.qwen3]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make", MODELS + MORE_MODELS, ids=lambda make: make.__name__)
def test_as_on_one_device(make, num_ranks):
    with shardwise.simulate(num_ranks):
        parallel_programs.hugging_face(make, num_ranks)


@pytest.mark.processes
@pytest.mark.parametrize("num_ranks", [4, 2])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_in_processes(processes, make, num_ranks):
    processes(parallel_programs.hugging_face, make, num_ranks, timeout_s=120)


#: What the table in docs/howto/parallel.md says of a layer, and of what runs once: how many
#: collectives of so many hidden widths for each token. Forward, then backward.
LAYER = {
    "llama": ([1] * 2, [1] * 5),
    "llama_prepared": ([1] * 2, [1] * 2),
    "gpt2": ([0.75, 1, 1], [0.25, 1, 1]),
    "mixtral": ([1] * 2, [1] * 3 + [1, 2 / 32]),
}


@pytest.mark.parametrize("name", LAYER)
def test_what_a_layer_sends(name):
    """One layer more sends what the table says, in units of one activation."""
    sent = {}
    for num_layers in (1, 2):
        torch.manual_seed(0)
        model, plan = getattr(models, name)(num_layers=num_layers)
        ids = torch.randint(1, 61, (2, 10))
        with shardwise.simulate(4):
            parallelize_module(model, shardwise.init_device_mesh("cpu", (4,)), plan, strict=True)
            model(input_ids=ids, labels=ids).loss.backward()  # the first checks plain gradients
            with CommDebugMode() as comm:
                loss = model(input_ids=ids, labels=ids).loss
                forward = len(comm.events)
                loss.backward()
        activation = ids.numel() * 32 * 4
        sizes = [event.num_bytes / activation for event in comm.events]
        sent[num_layers] = Counter(sizes[:forward]), Counter(sizes[forward:])
    for found, more, expected in zip(sent[1], sent[2], LAYER[name], strict=True):
        assert more - found == Counter(expected)
