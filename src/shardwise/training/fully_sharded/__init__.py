"""Parameters, gradients and optimizer state in shards over a data axis.

Each file builds on those before it: members, buffer, gradients, group, fully_shard.

Note [Words of fully sharded modules]
A *member* is a parameter of a *group*. The members of one dtype lie one after another in a
*buffer* of n equal *chunks*, one per rank. A rank's chunk is its *shard* of the buffer; the local
tensors of the sharded parameters are views of it. *Whole* is the gathered buffer, and what the
modules see of it. A *piece* is what a chunk holds of a member. A *row* has gradients as the
collective takes them: a line per chunk.
"""
