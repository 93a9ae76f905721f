"""Programs for both worlds: tables sharded in groups of ranks, with a replica in each group."""

import copy
import functools

import embedding_cases as cases
import torch
from parity import parameters

import shardwise
from shardwise.core.world import current_world
from shardwise.embedding import EmbeddingBagCollection
from shardwise.parallel import data_parallel

#: Plans for groups of two ranks.
PLANS = {
    "row_wise": "row_wise",
    "column_wise": "column_wise",
    "table_wise": "table_wise",
    "grid": {"*": {"kind": "grid", "ranks": [1]}},
    "data_parallel": "data_parallel",
    "mixed": cases.MIXED_ON_TWO,
    "few_columns": {"*": {"kind": "column_wise", "ranks": [1]}},
}
#: The axis that shards, and the one along which there are replicas: neighbours form a group, or
#: ranks that are two apart.
AXES = {"neighbours": ("dev", "host"), "apart": ("host", "dev")}
TORCH_SGD = functools.partial(torch.optim.SGD, lr=0.1)


def hosts():
    return shardwise.init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "dev"))


def batches(step, num_ranks=4, **options):
    return [cases.batch(10 * step + rank, **options) for rank in range(num_ranks)]


def grouped(axes, plan, optimizer=None, kind=EmbeddingBagCollection, mesh=None, **options):
    """A collection that is sharded along one axis, with replicas along the other."""
    mesh = mesh or hosts()
    sharding, replicas = AXES[axes]
    exchange = options.pop("exchange_dtype", None)
    collection = cases.make(kind, optimizer=optimizer, **options)
    collection.shard(mesh[sharding], plan, exchange_dtype=exchange)
    return data_parallel(collection, mesh[replicas])


def mine(per_rank):
    """The batch of this process; in a simulated world, that of each rank."""
    world = current_world()
    return cases.spread(per_rank) if world.simulated else per_rank[world.rank]


def trained(axes, plan, optimizer, kind, num_steps, **options):
    """The tables and the state of their optimizer after some steps."""
    collection = grouped(axes, plan, optimizer, kind, **options)
    by_torch = None if optimizer is not None else TORCH_SGD(collection.parameters())
    for step in range(num_steps):
        cases.loss_of(collection(mine(batches(step)))).backward()
        if by_torch is not None:
            by_torch.step()
            by_torch.zero_grad()
    found = {name: parameter.detach() for name, parameter in collection.named_parameters()}
    for table, states in collection.optimizer.state.items() if by_torch is None else ():
        found |= {f"{table}.{name}": state for name, state in states.items()}
    return found


def trained_ahead(axes, plan, optimizer, num_steps):
    """The same, with each batch sent while the one before is trained on."""
    collection = grouped(axes, plan, optimizer)
    ahead = collection.prefetch(mine(batches(0)))
    for step in range(num_steps):
        rows = collection(ahead)
        ahead = collection.prefetch(mine(batches(step + 1)))
        cases.loss_of(rows).backward()
    return {name: parameter.detach() for name, parameter in collection.named_parameters()}


def broken(axes, plan, optimizer, rank):
    """What is raised when one rank has an id that is no row; the tables before, and afterwards."""
    collection = grouped(axes, plan, optimizer)
    cases.loss_of(collection(mine(batches(0)))).backward()
    before = copy.deepcopy(parameters(collection))
    bad = batches(1)
    bad[rank].values[0] = 99
    told = cases.message_of(collection, mine(bad))
    after = copy.deepcopy(parameters(collection))
    cases.loss_of(collection(mine(batches(2)))).backward()
    last = copy.deepcopy(parameters(collection))
    return told, before, after, last


def broken_forward(axes, plan, rank):
    """What this rank is told when one rank has an id that is no row."""
    bad = batches(0)
    bad[rank].values[0] = 99
    return cases.message_of(grouped(axes, plan), mine(bad))
