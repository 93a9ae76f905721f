"""The command `shardwise`: its options, and what it prints. What it computes is in other folders.

Nothing here imports torch before a command needs it.
"""
