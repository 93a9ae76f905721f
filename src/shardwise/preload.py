"""Imports for the server from which the processes of a job are forked, so that each has them.

torch imports its compiler when the first optimizer is made, and more when the first subclass tensor
is detached: seconds per rank. Both happen here, in a simulated world of one that ends before the
first fork and leaves no thread and no process group.

After a process has asked CUDA's runtime for the number of GPUs, its forked children cannot use
them. Making a mesh asks for that number; with this setting torch asks NVML instead, which has no
such effect.
"""

from __future__ import annotations

import os

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise.checkpoint
import shardwise.embedding
import shardwise.parallel  # noqa: F401
from shardwise.core.placements import Replicate
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.world import simulate

_ASK_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"


def warm_up() -> DTensor:
    """The first optimizer and the first DTensor."""
    before = os.environ.get(_ASK_NVML)
    os.environ[_ASK_NVML] = "1"
    try:
        with simulate(1):
            number = distribute_tensor(torch.zeros(1), init_device_mesh("cpu", (1,)), [Replicate()])
            torch.optim.SGD([torch.nn.Parameter(number)], lr=1.0)
    finally:
        del os.environ[_ASK_NVML]
        if before is not None:
            os.environ[_ASK_NVML] = before
    return number


warm_up()
