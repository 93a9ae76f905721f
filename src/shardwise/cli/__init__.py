"""The command `shardwise`. Nothing here imports torch before a command needs it."""
