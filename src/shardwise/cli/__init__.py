"""The command `shardwise`: its options and its output. Other folders do the computing.

Nothing here imports torch before a command needs it.
"""
