"""Looks up an id that is out of range; run as `python wrong_id_program.py WAY ID`.

A failed assertion on the device ends the process's use of it, so this is a process of its own.
"""

from __future__ import annotations

import sys

import torch
from torch.nn import functional as F

import shardwise
from shardwise.kernels import lookup
from shardwise.kernels.tables import IdBags, TableSet, first_bags, side_by_side

NUM_ROWS, NUM_BAGS = 11, 4


def wrong_ids(wrong: int) -> torch.Tensor:
    ids = torch.arange(2 * NUM_BAGS) % NUM_ROWS
    ids[3] = wrong
    return ids.cuda()


def pooled(wrong: int) -> None:
    tables = TableSet([torch.randn(NUM_ROWS, 8, device="cuda")], [0])
    offsets = torch.arange(NUM_BAGS + 1, device="cuda") * 2
    firsts, rows = first_bags((NUM_BAGS,), tables.device), side_by_side(tables, NUM_BAGS)
    lookup.pooled_lookup(tables, IdBags(wrong_ids(wrong), offsets, firsts, NUM_BAGS, rows))


def pooled_in_two_launches(wrong: int) -> None:
    lookup.SMALL = 0
    pooled(wrong)


def one_by_one(wrong: int) -> None:
    tables = TableSet([torch.randn(NUM_ROWS, 8, device="cuda")], [0])
    ids = wrong_ids(wrong)
    firsts, rows = first_bags((len(ids),), tables.device), side_by_side(tables, len(ids))
    lookup.row_lookup(tables, ids, firsts, len(ids), rows)


def sharded_bag(wrong: int) -> None:
    torch.ones(1, device="cuda")
    with shardwise.simulate(4):
        mesh = shardwise.init_device_mesh("cuda", (4,))
        weight = shardwise.distribute_tensor(
            torch.randn(NUM_ROWS, 8, device="cuda"), mesh, [shardwise.Shard(0)]
        )
        ids = shardwise.distribute_tensor(
            wrong_ids(wrong).view(NUM_BAGS, 2), mesh, [shardwise.Replicate()]
        )
        F.embedding_bag(ids, weight, mode="sum")


WAYS = {
    "pooled": pooled,
    "pooled_in_two_launches": pooled_in_two_launches,
    "one_by_one": one_by_one,
    "sharded_bag": sharded_bag,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](int(sys.argv[2]))
    torch.cuda.synchronize()
    print("no error")
