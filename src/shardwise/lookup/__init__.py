"""The lookup engine: ids of rows, their owners, their order, their exchange, and the kernels.

Shared by the lookups of DTensors (`ops.lookup`), sharded modules (`shard`) and collections
(`embedding`).
"""
