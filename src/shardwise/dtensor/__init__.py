"""The class, its hot path, and how tensors are made."""

import torch

from shardwise.core.placements import MaskPartial, NormPartial, Partial, Replicate, Shard
from shardwise.dtensor import local_step
from shardwise.dtensor.tensor import DTensor, _unpickle

local_step.register()

# The ops of a DTensor come with it: they need the class, and it needs them for its first call.
import shardwise.ops.catalog  # noqa: E402, F401

# What a saved DTensor consists of besides tensors: torch.load reads it with weights_only=True.
torch.serialization.add_safe_globals(
    [DTensor, _unpickle, Shard, Replicate, Partial, MaskPartial, NormPartial]
)
