"""Ops that draw: a sharded result holds its shard of what one device would draw."""
