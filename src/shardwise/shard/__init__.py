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
from shardwise.shard.functions import custom_sharded_op_impl, custom_sharding_spec_op
from shardwise.shard.module import (
    ShardedOptimizer,
    named_params_with_sharded_tensor,
    pre_load_state_dict_hook,
    shard_module,
    shard_parameter,
    state_dict_hook,
)
from shardwise.shard.plan import Sharder, ShardingPlan, ShardingPlanner, load_plan, save_plan
from shardwise.shard.plan import ShardingPlanReport as PlanReport
from shardwise.shard.spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    PlacementSpec,
    ShardedTensorMetadata,
    ShardingSpec,
    ShardMetadata,
    TensorProperties,
)
from shardwise.shard.spec import Shard as Shard  # not in __all__: it would hide shardwise.Shard
from shardwise.shard.tensor import ShardedTensor, load_with_process_group

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "PlacementSpec",
    "PlanReport",
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
    "custom_sharding_spec_op",
    "empty",
    "full",
    "init_from_local_shards",
    "load_plan",
    "load_with_process_group",
    "named_params_with_sharded_tensor",
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
