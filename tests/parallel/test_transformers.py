"""Models as Hugging Face writes them, made from a config and sharded by plan."""

from copy import deepcopy

import parallel_programs
import pytest
import torch
from parallel_models import whole

import shardwise
from shardwise.parallel import check_plan, parallelize_module

pytest.importorskip("transformers")
models = pytest.importorskip("hugging_face_models")

MODELS = [models.llama, models.tied_llama, models.gpt2, models.mixtral]

pytestmark = pytest.mark.filterwarnings("default")


def steps(model, ids, num=5):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for _ in range(num):
        result = model(input_ids=ids, labels=ids)
        optimizer.zero_grad()
        result.loss.backward()
        grads = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
        history.append({"loss": whole(result.loss), "logits": whole(result.logits), **grads})
        optimizer.step()
    return history


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_as_on_one_device(make, num_ranks):
    model, plan = make()
    ids = torch.randint(1, 61, (2, 10))
    reference = deepcopy(model)
    expected = steps(reference, ids)
    with shardwise.simulate(num_ranks):
        mesh = shardwise.init_device_mesh("cpu", (num_ranks,))
        assert not check_plan(model, plan, mesh).mistakes
        parallelize_module(model, mesh, plan, strict=True)
        found = steps(model, ids)
        for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            for name, tensor in theirs.items():
                torch.testing.assert_close(
                    ours[name],
                    tensor,
                    rtol=1e-3,
                    atol=1e-5,
                    msg=lambda m, n=name, i=number: f"{n} in step {i}: {m}",
                )
        options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
        tokens = whole(model.eval().generate(ids, **options))
    assert torch.equal(tokens, reference.eval().generate(ids, **options))


@pytest.mark.processes
@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_in_processes(processes, make):
    processes(parallel_programs.hugging_face, make, make.__name__, timeout_s=120)
