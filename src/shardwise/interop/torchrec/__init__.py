"""torchrec's names on this package, so that its programs move by their imports.

A thin layer: batches, configs, collections, plans and `DistributedModelParallel` take torchrec's
arguments, and raise `UnsupportedError` with what to write where there is no counterpart. New
programs use `shardwise.embedding`, which has less to write. torchrec itself is not needed.
"""

from shardwise.interop.torchrec.batches import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.interop.torchrec.collections import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from shardwise.interop.torchrec.model_parallel import (
    CombinedOptimizer,
    DistributedModelParallel,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)
from shardwise.interop.torchrec.sharding import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbeddingModuleShardingPlan,
    EmbeddingShardingPlanner,
    EmbOptimType,
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
