"""The class, its hot path, and how tensors are made."""

from shardwise.dtensor import local_step

local_step.register()

# The ops of a DTensor come with it: they need the class, and it needs them for its first call.
import shardwise.ops.catalog  # noqa: E402, F401
