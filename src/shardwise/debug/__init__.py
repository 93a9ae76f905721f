"""Seeing what is communicated."""

from shardwise.debug.comm_mode import CommDebugMode, CommEvent

__all__ = ["CommDebugMode", "CommEvent"]
