"""Sharded tensors, sharding specs and plans: the job of `torch.distributed._shard`, on DTensors."""

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
from shardwise.shard.functions import custom_sharded_op_impl
from shardwise.shard.module import shard_module, shard_parameter
from shardwise.shard.optimizer import ShardedOptimizer, pre_load_state_dict_hook, state_dict_hook
from shardwise.shard.pickling import load_with_process_group
from shardwise.shard.plan import Sharder, ShardingPlan, ShardingPlanner, load_plan, save_plan
from shardwise.shard.plan import ShardingPlanReport as PlanReport
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    Shard,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
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
