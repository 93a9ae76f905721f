"""Sharding plans and sharded tensors: what `torch.distributed._shard` is for, on DTensors."""

from shardwise.shard.create import (
    empty,
    full,
    init_from_local_shards,
    ones,
    rand,
    randn,
    shard_tensor,
    zeros,
)
from shardwise.shard.describe import ShardingPlanReport as PlanReport
from shardwise.shard.files import load_plan, save_plan
from shardwise.shard.functions import custom_sharded_op_impl
from shardwise.shard.metadata import Shard, ShardedTensorMetadata, TensorProperties
from shardwise.shard.module import shard_module, shard_parameter
from shardwise.shard.optimizer import ShardedOptimizer
from shardwise.shard.pickled import load_with_process_group
from shardwise.shard.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.shard.state import pre_load_state_dict_hook, state_dict_hook
from shardwise.shard.tensor import ShardedTensor

__all__ = [
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "PlanReport",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "TensorProperties",
    "custom_sharded_op_impl",
    "empty",
    "full",
    "init_from_local_shards",
    "load_plan",
    "load_with_process_group",
    "ones",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "save_plan",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "state_dict_hook",
    "zeros",
]
