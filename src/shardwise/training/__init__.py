"""The gradient contract: for each parameter and mesh axis, who reduces its gradient, and when.

Front doors declare: `data_parallel` and `fully_shard` here, styles in `parallel`, tables in
`embedding`. One mechanism acts: `contract` decides what is done to a gradient, `reducer` does it in
buckets while backward runs; along an axis that shards a parameter, `fully_sharded` does. `parallel`
says how a module is split along a tensor axis.
"""
