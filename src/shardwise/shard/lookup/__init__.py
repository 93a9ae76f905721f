"""Lookups and linear layers where each rank brings a batch of its own to a ShardedTensor."""
