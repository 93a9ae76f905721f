"""Plan files and the paths in them: one reader and writer, one matcher of module paths.

Nothing here knows what an entry means: styles are in `parallel`, sharding specs in `shard`, tables
in `embedding`.
"""
