"""The public names of `import shardwise`, each from the module that defines it."""

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.watch import explicit_redistribution, implicit_replication
from shardwise.core.mesh import init_device_mesh
from shardwise.core.placements import MaskPartial, Partial, Placement, Replicate, Shard
from shardwise.dispatch.catalog import register_rule, register_sharding
from shardwise.dtensor.autograd import reduce_gradients
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
from shardwise.dtensor.fallback import fallback
from shardwise.dtensor.local_map import local_map
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import (
    ArgumentError,
    BatchError,
    CheckpointError,
    CheckpointWarning,
    CollectiveError,
    IdRangeError,
    LaunchError,
    LayoutError,
    LeafError,
    MixedTensorsError,
    PathError,
    PlanError,
    RankMismatchError,
    RedistributionError,
    ReplicationWarning,
    ShardwiseError,
    TorchVersionError,
    UnsupportedError,
    WorldError,
)
from shardwise.random import rng
from shardwise.simulation.local_tensor import LocalTensor
from shardwise.simulation.world import simulate

__all__ = [
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "CheckpointWarning",
    "CollectiveError",
    "DTensor",
    "DeviceMesh",
    "IdRangeError",
    "LaunchError",
    "LayoutError",
    "LeafError",
    "LocalTensor",
    "MaskPartial",
    "MixedTensorsError",
    "Partial",
    "PathError",
    "Placement",
    "PlanError",
    "RankMismatchError",
    "RedistributionError",
    "Replicate",
    "ReplicationWarning",
    "Shard",
    "ShardwiseError",
    "TorchVersionError",
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
