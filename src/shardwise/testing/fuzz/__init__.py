"""Random programs, sharded and on one device.

    python -m shardwise.testing.fuzz --programs 1000 --seed 0 --workers 8
    python -m shardwise.testing.fuzz --replay 17

A program is a list of statements over named slots (`program`). It grows from the rows of `tables`,
each step tried on one device first (`generate`, `hand`); it runs in both worlds (`worlds`), and
what they hold at the end is compared (`play`), except for what torch leaves undefined
(`undefined`). A failure is shrunk (`shrink`) and printed as a script. `session` plays many.
"""

from shardwise.testing.fuzz.worlds import OneDevice, Sharded

__all__ = ["OneDevice", "Sharded"]
