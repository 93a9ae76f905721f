"""Files with our tensors, loaded without running code in a process that only says the import."""

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import Partial, Replicate, Shard, shard
from shardwise.embedding import Adam, EmbeddingBagCollection, Jagged, Table
from shardwise.errors import PlanError

WORLD = """
import sys
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
LOAD = """
assert not [name for name in sys.modules if name.startswith(("shardwise.dtensor", "shardwise.fr"))]
state = torch.load(sys.argv[1], weights_only=True)
local = torch.arange(4.0)
assert all(torch.equal(x.full_tensor(), local) for x in [*state["dtensors"], state["sharded"]])
assert [type(x).__name__ for x in state["tables"].values()] == ["DTensor"]
"""
# Sorted imports put shardwise first. Many ask whether there is a torch without importing it.
SHARDWISE_FIRST = """
import sys, shardwise
from importlib.util import find_spec
assert find_spec("torch") is not None
assert "torch" not in sys.modules
finders = len(sys.meta_path)
import torch
assert len(sys.meta_path) == finders - 1
"""


def run(program, *args):
    subprocess.run([sys.executable, "-c", program, *args], check=True, timeout=120)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A file that one real process wrote: this one, with a process group of its own."""
    path = str(tmp_path_factory.mktemp("saved") / "state.pt")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        torch.save(make_state(), path)
    finally:
        dist.destroy_process_group()
    return path


def make_state():
    mesh = shardwise.init_device_mesh("cpu", (1,))
    tables = EmbeddingBagCollection([Table("user", 10, 4)], optimizer=Adam(0.1))
    tables.shard(mesh, "row_wise")
    tables(Jagged.from_lists({"user": [[1], [2, 3]]}))["user"].sum().backward()
    layer = shardwise.distribute_module(torch.nn.Linear(2, 2), mesh)
    optimizer = torch.optim.Adam(layer.parameters())
    layer(shardwise.ones(1, 2, device_mesh=mesh)).sum().backward()
    optimizer.step()
    local = torch.arange(4.0)
    return {
        "dtensors": [
            shardwise.DTensor.from_local(local, mesh, [placement])
            for placement in (Shard(0), Shard(0, sizes=(4,)), Replicate(), Partial())
        ],
        "sharded": shard.shard_tensor(local, shard.ChunkShardingSpec(0, ["rank:0/cpu"])),
        "tables": tables.state_dict(),
        "rows": tables.optimizer.state_dict(),
        "layer": layer.state_dict(),
        "optimizer": optimizer.state_dict(),
    }


@pytest.mark.parametrize("imports", ["import torch, shardwise", SHARDWISE_FIRST])
def test_import_shardwise_is_enough(file, imports):
    run(imports + WORLD + LOAD, file)


def test_a_file_is_read_without_a_process_group(file):
    """As torch's own: what a rank holds can be read, and nothing sent."""
    program = """
import sys, torch, shardwise
state = torch.load(sys.argv[1], weights_only=True)
local = torch.arange(4.0)
for x in state["dtensors"]:
    assert torch.equal(x.to_local(), local) and x.shape == (4,) and "DTensor" in repr(x)
assert torch.equal((state["dtensors"][0] + 1).to_local(), local + 1)
assert state["layer"]["weight"].device_mesh.shape == (1,)
assert torch.equal(state["sharded"].local_shards()[0].tensor, local)
"""
    run(program, file)


def test_other_globals_stay_refused(tmp_path):
    """What torch did not load before, it does not load now."""
    path = tmp_path / "other.pt"
    torch.save(PlanError(), path)
    with pytest.raises(pickle.UnpicklingError, match="PlanError"):
        torch.load(path, weights_only=True)
