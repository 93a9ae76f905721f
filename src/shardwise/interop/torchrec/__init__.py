"""torchrec's names for this package, so that torchrec programs run after a change of imports.

A thin layer: batches, configs, collections, plans and `DistributedModelParallel` take torchrec's
arguments. If there is no counterpart, they raise `UnsupportedError`, which says what to write
instead. New programs use `shardwise.embedding`, which needs less code. torchrec itself is not
needed.
"""

from shardwise.interop.torchrec.collections import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
)
from shardwise.interop.torchrec.sharding import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbeddingModuleShardingPlan,
    EmbeddingShardingPlanner,
    EmbOptimType,
    KeyedOptimizerWrapper,
    ParameterConstraints,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    Topology,
    apply_optimizer_in_backward,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_default_sharders,
    grid_shard,
    in_backward_optimizer_filter,
    row_wise,
    table_row_wise,
    table_wise,
)

__all__ = [
    "CombinedOptimizer",
    "DataType",
    "DistributedModelParallel",
    "EmbOptimType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionSharder",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionSharder",
    "EmbeddingConfig",
    "EmbeddingModuleShardingPlan",
    "EmbeddingShardingPlanner",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedOptimizerWrapper",
    "KeyedTensor",
    "ParameterConstraints",
    "ParameterSharding",
    "PoolingType",
    "ShardingEnv",
    "ShardingPlan",
    "Topology",
    "apply_optimizer_in_backward",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_default_sharders",
    "grid_shard",
    "in_backward_optimizer_filter",
    "row_wise",
    "table_row_wise",
    "table_wise",
]
