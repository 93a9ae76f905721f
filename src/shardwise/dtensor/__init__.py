"""The class, its hot path, and how tensors are made."""

import torch

from shardwise.core.placements import MaskPartial, NormPartial, Partial, Replicate, Shard
from shardwise.dtensor import local_step
from shardwise.dtensor.above_autograd.register import register_kernels
from shardwise.dtensor.tensor import DTensor, _unpickle

register_kernels()
local_step.register()

# What a saved DTensor consists of besides tensors: torch.load reads it with weights_only=True.
torch.serialization.add_safe_globals(
    [DTensor, _unpickle, Shard, Replicate, Partial, MaskPartial, NormPartial]
)
