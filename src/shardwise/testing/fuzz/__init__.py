"""Random programs, sharded and on one device.

    python -m shardwise.testing.fuzz --programs 1000 --seed 0 --workers 8
    python -m shardwise.testing.fuzz --replay 17

A program is a list of statements over named slots (`program`, also its two worlds). It grows from
the rows of `tables`, each step tried on one device first (`generate`, `hand`). It runs in both
worlds, and what they hold at the end is compared (`play`), except for what torch leaves undefined
(`undefined`). A failure is shrunk and printed as a script. `__main__` plays many.
"""

from shardwise.testing.fuzz.program import OneDevice, Sharded

__all__ = ["OneDevice", "Sharded"]
