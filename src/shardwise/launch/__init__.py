"""Local processes that work as one job: start, messages, the end of a rank."""

from shardwise.launch.rank import LOOPBACK
from shardwise.launch.start import PRELOADED, Note, join, launch

__all__ = ["LOOPBACK", "PRELOADED", "Note", "join", "launch"]
