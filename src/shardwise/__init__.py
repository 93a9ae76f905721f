"""Tensors, embedding tables and layers sharded over many devices, with the numbers of one.

import shardwise

with shardwise.simulate(4):                     # or torchrun, and nothing else changes
    mesh = shardwise.init_device_mesh("cpu", (4,))
    table = shardwise.distribute_tensor(torch.randn(1000, 64), mesh, [shardwise.Shard(0)])
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.simulate import simulate
from shardwise.comm.watch import explicit_redistribution, implicit_replication
from shardwise.core.placements import MaskPartial, Partial, Placement, Replicate, Shard
from shardwise.dtensor.create import (
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from shardwise.dtensor.gathered import fallback
from shardwise.dtensor.gradients import reduce_gradients
from shardwise.dtensor.local_map import local_map
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import (
    ArgumentError,
    CollectiveError,
    LayoutError,
    MixedTensorsError,
    RankMismatchError,
    RedistributionError,
    ReplicationWarning,
    ShardwiseError,
    UnsupportedError,
    WorldError,
)
from shardwise.random.mode import rng
from shardwise.rules.register import register_rule, register_sharding

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CollectiveError",
    "DTensor",
    "DeviceMesh",
    "LayoutError",
    "LocalTensor",
    "MaskPartial",
    "MixedTensorsError",
    "Partial",
    "Placement",
    "RankMismatchError",
    "RedistributionError",
    "Replicate",
    "ReplicationWarning",
    "Shard",
    "ShardwiseError",
    "UnsupportedError",
    "WorldError",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explicit_redistribution",
    "fallback",
    "full",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "reduce_gradients",
    "register_rule",
    "register_sharding",
    "rng",
    "simulate",
    "zeros",
]
