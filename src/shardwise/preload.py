"""What every process of a job would import anew, imported once by the server they are forked from.

torch imports its compiler when the first optimizer is made, and more when the first tensor of a
subclass is detached: seconds, in each rank. So both are done here, in a world of one that is gone
again before the first process is forked; no thread and no process group is left of it.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh

import shardwise.checkpoint
import shardwise.embedding
import shardwise.parallel  # noqa: F401
from shardwise.core.placements import Replicate
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.world import simulate


def warm_up() -> DTensor:
    """The first of everything, on one number."""
    with simulate(1):
        number = distribute_tensor(torch.zeros(1), init_device_mesh("cpu", (1,)), [Replicate()])
        torch.optim.SGD([torch.nn.Parameter(number)], lr=1.0)
    return number


warm_up()
