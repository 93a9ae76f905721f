"""Several processes on this machine that work as one job."""

from shardwise.launch.start import PRELOADED, Note, join, launch
from shardwise.launch.store import LOOPBACK

__all__ = ["LOOPBACK", "PRELOADED", "Note", "join", "launch"]
