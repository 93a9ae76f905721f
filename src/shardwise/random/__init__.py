"""The random numbers of one device, drawn shard by shard without communication.

The rules of ops that draw are in `ops.random`.
"""
