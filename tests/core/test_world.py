"""Worlds that are over leave nothing behind."""

import subprocess
import sys
from pathlib import Path

import pytest

# Exit handlers run in reverse: the one that looks runs after the package's.
PROGRAM = """
import atexit, pathlib

def print_threads():
    print(sorted(p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")))

atexit.register(print_threads)

import torch
import torch.distributed as dist
import shardwise
from shardwise.parallel import data_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = shardwise.init_device_mesh("cpu", (1,))
layer = torch.nn.Linear(2, 2)
data_parallel(layer, mesh)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
w = shardwise.distribute_tensor(torch.ones(2, 2), mesh, [shardwise.Shard(0)])
layer(w.full_tensor()).sum().backward()
optimizer.step()
print_threads()
dist.destroy_process_group()
del mesh, layer, optimizer, w
"""


@pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="reads threads as Linux shows them"
)
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    during, at_exit = done.stdout.splitlines()
    assert "gloo" in during
    assert "gloo" not in at_exit
