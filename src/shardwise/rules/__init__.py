"""Rules: which ways of running an op on shards are right. Nothing here knows DTensor."""
