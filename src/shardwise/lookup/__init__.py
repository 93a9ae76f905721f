"""Ids of rows: their owners, their order, their exchange.

Shared by the lookups of DTensors (`ops.lookup`), sharded modules (`shard.lookup`) and collections
(`embedding`).
"""
