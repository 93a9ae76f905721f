"""Parameters, gradients and optimizer state in shards over a data axis.

Each file builds on those before it: members, buffer, gradients, group, fully_shard.

Note [Words of fully sharded modules]
A *member* is a parameter of a *group*. The members of one dtype lie one after another in a
*buffer* of n equal *chunks*, one per rank. A rank's chunk is its *shard* of the buffer; the local
tensors of the sharded parameters are views of it. *Whole* is the gathered buffer, and the tensors
that the modules see. A *piece* is the part of a member in one chunk. A *row* is the buffer of
gradients that the collective takes, laid out chunk by chunk.
"""
