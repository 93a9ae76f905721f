"""Which world an example runs in: torchrun's processes, or one process that plays all ranks."""

import contextlib
import os

import torch.distributed as dist

import shardwise


@contextlib.contextmanager
def world(num_simulated=4):
    """The number of ranks."""
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
        try:
            yield dist.get_world_size()
        finally:
            dist.destroy_process_group()
    else:
        with shardwise.simulate(num_simulated):
            yield num_simulated


def own(make):
    """What `make(rank)` gives: for this rank, or for each that is played."""
    if "RANK" in os.environ:
        return make(dist.get_rank())
    return shardwise.LocalTensor.per_rank(make)


def say(*words):
    """Print once."""
    if os.environ.get("RANK", "0") == "0":
        print(*words)
