"""The class, its hot path, and how tensors are made."""

from shardwise.dtensor import kernels

kernels.register()
