"""Programs in the manner of torch's and torchrec's tutorials, moved to shardwise."""

import importlib.util
import logging
import os
import re
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
from launcher import Processes
from torch import nn

import shardwise
from shardwise import interop
from shardwise.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

HERE = Path(__file__).parent
pytestmark = pytest.mark.processes

#: The modules of torch and torchrec, and ours in their place.
MODULES = {
    "torch.distributed.tensor.parallel": "shardwise.parallel",
    "torch.distributed.tensor.debug": "shardwise.debug",
    "torch.distributed.tensor": "shardwise",
    "torch.distributed.device_mesh": "shardwise",
    "torchrec": "shardwise.interop.torchrec",
    "torchrec.distributed": "shardwise.interop.torchrec",
    "torchrec.distributed.embeddingbag": "shardwise.interop.torchrec",
    "torchrec.distributed.sharding_plan": "shardwise.interop.torchrec",
    "torchrec.distributed.types": "shardwise.interop.torchrec",
    "fbgemm_gpu.split_embedding_configs": "shardwise.interop.torchrec",
}


def moved(text):
    """A program with its imports changed, and how many lines that changed."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = re.match(r"from ([\w.]+) import", line)
        if found and found[1] in MODULES:
            lines[number] = line.replace(found[1], MODULES[found[1]], 1)
    changed = sum(a != b for a, b in zip(text.splitlines(), lines, strict=True))
    return "\n".join(lines), changed


def program(name, ours):
    text = (HERE / f"{name}.py").read_text()
    made = types.ModuleType(f"moved_{name}_{ours}")
    sys.modules[made.__name__] = made
    exec(compile(moved(text)[0] if ours else text, f"{name}.py", "exec"), made.__dict__)
    return made


def run(name, ours, *args):
    return program(name, ours).main(*args)


@pytest.fixture(scope="module")
def pair():
    processes = Processes(2)
    yield processes
    processes.kill()


def test_only_imports_change():
    names = ("transformer", "checkpoint", "dlrm")
    changes = {name: moved((HERE / f"{name}.py").read_text())[1] for name in names}
    assert changes == {"transformer": 4, "checkpoint": 2, "dlrm": 6}


def test_a_tensor_parallel_transformer(pair):
    here, there = (pair(run, "transformer", ours, timeout_s=120) for ours in (True, False))
    for (losses, parameters), (expected, others) in zip(here, there, strict=True):
        torch.testing.assert_close(losses, expected)
        assert losses[-1] < losses[0] + 1
        for one, other in zip(parameters, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reader", [True, False], ids=["read here", "read by torch"])
@pytest.mark.parametrize("writer", [True, False], ids=["written here", "written by torch"])
def test_a_checkpoint_of_dtensors(pair, tmp_path, writer, reader):
    folder = str(tmp_path / "saved")
    written = pair(run, "checkpoint", writer, folder, True, timeout_s=120)
    read = pair(run, "checkpoint", reader, folder, False, timeout_s=120)
    for one, other in zip(written, read, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


# -- a DLRM of torchrec ------------------------------------------------------------------------

#: The losses of `dlrm.py` on two ranks, with torchrec 1.8.0.
TORCHREC_LOSSES = [
    [0.8037645220756531, 0.8653380870819092, 0.589073121547699, 0.8478835225105286, 0.787290394],
    [0.8923874497413635, 0.7163267135620117, 0.5254728198051453, 0.7134807705879211, 0.645323097],
]


def losses_of_dlrm(ours):
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    os.environ.setdefault("LOCAL_WORLD_SIZE", "2")
    try:
        return run("dlrm", ours)
    finally:
        logging.disable(logging.NOTSET)


def test_a_dlrm(pair):
    torch.testing.assert_close(pair(losses_of_dlrm, True, timeout_s=120), TORCHREC_LOSSES)


@pytest.mark.skipif(not importlib.util.find_spec("torchrec"), reason="torchrec is not installed")
def test_a_dlrm_of_torchrec(pair):
    torch.testing.assert_close(pair(losses_of_dlrm, False, timeout_s=240), TORCHREC_LOSSES)


# -- a checkpoint of FSDP2 ---------------------------------------------------------------------


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def write_with_fsdp2(folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import fully_shard

    model = make()
    fully_shard(model, mesh=shardwise.init_device_mesh("cpu", (2,)))
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def read_otherwise(folder, plan):
    """The checkpoint in a tensor-parallel layout."""
    mesh = shardwise.init_device_mesh("cpu", (2,))
    model = make()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    nn.init.zeros_(model[0].weight)
    parallelize_module(model, mesh, plan)
    state = {"model": model.state_dict()}
    interop.load_torch_checkpoint(state, folder, trusted=True)
    model.load_state_dict(state["model"])
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(whole, expected[name]), name
    return str(getattr(model[0].weight, "placements", None))


@pytest.mark.parametrize(
    ("plan", "placements"),
    [
        ({"0": ColwiseParallel(), "1": RowwiseParallel()}, "(Shard(0),)"),
        ({"0": RowwiseParallel()}, "(Shard(1),)"),
        ({}, "None"),
    ],
    ids=["columns, rows", "rows", "plain"],
)
def test_a_checkpoint_of_fsdp2(pair, tmp_path, plan, placements):
    folder = str(tmp_path / "saved")
    pair(write_with_fsdp2, folder, timeout_s=120)
    assert pair(read_otherwise, folder, plan, timeout_s=120) == [placements] * 2


# -- a loop of accelerate ----------------------------------------------------------------------


def on_one_device():
    """The losses of the loop of `accelerated.py`, and its weights, without ranks."""
    ours = program("accelerated", True)
    model, data = ours.make(), ours.make_data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    losses = []
    for number in range(4):
        rows = [i for i in range(32) if i // 2 // 4 == number]  # four of each rank, which alternate
        x, target = data[rows]
        loss = nn.functional.mse_loss(model(x), target) / 2
        loss.backward()
        losses.append(loss.item())
        if number % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses, model.state_dict()


@pytest.mark.parametrize("fully", [False, True], ids=["replicas", "fully sharded"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str
)
def test_a_loop_of_accelerate(pair, tmp_path, fully, dtype, tolerance):
    folder = str(tmp_path / "saved")
    losses, weights = on_one_device()
    for found, whole in pair(run, "accelerated", True, folder, fully, dtype, timeout_s=120):
        torch.testing.assert_close(found, losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(whole, dict(weights), rtol=tolerance, atol=tolerance)
