"""Tensor- and context-parallel modules: styles, plans, experts, losses over a sharded vocabulary.

`training` decides who reduces gradients over data axes.
"""

from shardwise.parallel.context import context_parallel
from shardwise.parallel.experts import ExpertParallel, expert_parallel
from shardwise.parallel.loss import loss_parallel, parallel_cross_entropy
from shardwise.parallel.parallelize import (
    PlanReport,
    check_plan,
    load_plan,
    parallelize_module,
    save_plan,
)
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
    input_reshard,
)
from shardwise.training.data_parallel import data_parallel
from shardwise.training.fully_sharded.fully_shard import (
    fully_shard,
    register_fsdp_forward_method,
)
from shardwise.training.fully_sharded.members import CPUOffloadPolicy, MixedPrecisionPolicy

__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "ExpertParallel",
    "MixedPrecisionPolicy",
    "ParallelStyle",
    "PlanReport",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "check_plan",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "fully_shard",
    "input_reshard",
    "load_plan",
    "loss_parallel",
    "parallel_cross_entropy",
    "parallelize_module",
    "register_fsdp_forward_method",
    "save_plan",
]
