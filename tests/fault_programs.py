"""What ranks run in the tests of faults: disks, folders, plans and code that differ."""

import os
import resource

import torch
import torch.distributed as dist
from torch import nn

import shardwise
from shardwise import Shard
from shardwise.checkpoint import Checkpoints
from shardwise.core import code_version
from shardwise.embedding import EmbeddingBagCollection, Table
from shardwise.parallel import parallelize_module


def save_with_a_full_disk(folder):
    """The system refuses to let the files of one rank grow."""
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    state = {"x": shardwise.ones(4000, 100, device_mesh=mesh, placements=[Shard(0)])}
    series = Checkpoints(folder)
    series.save(1, state)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    series.save(2, state)


def save_without_permission(folder):
    """As somebody who may not write there; root may write anywhere."""
    if os.geteuid() == 0:
        os.seteuid(65534)
    Checkpoints(folder).save(1, {"x": torch.ones(2)})


def shard_by_different_plans():
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    tables = EmbeddingBagCollection([Table("a", 8, 4), Table("b", 8, 4)])
    tables.shard(mesh, {"a": "row_wise", "b": "column_wise" if dist.get_rank() else "row_wise"})


def parallelize_by_different_plans():
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": "colwise", "1": "rowwise"} if dist.get_rank() else {"0": "colwise"}
    parallelize_module(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), mesh, plan)


def parallelize_where_one_rank_is_mistaken():
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"0": "colwise" if dist.get_rank() else "sideways"}
    parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, plan)


def parallelize_by_different_code(package):
    """One rank runs the code in another folder."""
    if dist.get_rank() == 1:
        code_version.PACKAGE = package
    mesh = shardwise.init_device_mesh("cpu", (dist.get_world_size(),))
    parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": "colwise"})
