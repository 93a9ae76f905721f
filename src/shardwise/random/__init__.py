"""One device's random numbers, drawn shard by shard, without communication.

The rules of ops that draw are in `ops.random`.
"""
