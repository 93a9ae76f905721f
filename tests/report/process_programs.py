"""What the tests of processes run in them."""

import torch
import torch.distributed as dist

from shardwise.errors import LayoutError


def add_up(note, start):
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    note(dist.get_rank())
    return int(value), dist.get_rank()


def refuse_on_rank_1():
    if dist.get_rank() == 1:
        raise LayoutError("this rank has no room")
    dist.barrier()


def crash():
    raise KeyError("gone")
