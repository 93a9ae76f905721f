"""Tensor-parallel modules: styles, plans, experts, losses over a sharded vocabulary.

Who reduces gradients over data axes is decided in `training`.
"""

from shardwise.parallel.experts import ExpertParallel
from shardwise.parallel.loss import loss_parallel, parallel_cross_entropy
from shardwise.parallel.parallelize import parallelize_module
from shardwise.parallel.plan import PlanReport, check_plan, load_plan, save_plan
from shardwise.parallel.prepare import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from shardwise.parallel.style import ParallelStyle
from shardwise.parallel.styles import (
    ColwiseParallel,
    ReplicateParallel,
    RowwiseParallel,
    SequenceParallel,
)
from shardwise.training.data_parallel import data_parallel
from shardwise.training.shard_parameters import shard_parameters

__all__ = [
    "ColwiseParallel",
    "ExpertParallel",
    "ParallelStyle",
    "PlanReport",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicateParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "check_plan",
    "data_parallel",
    "load_plan",
    "loss_parallel",
    "parallel_cross_entropy",
    "parallelize_module",
    "save_plan",
    "shard_parameters",
]
