"""Random programs, sharded and on one device.

    python -m shardwise.testing.fuzz --programs 1000 --seed 0 --workers 8
    python -m shardwise.testing.fuzz --replay 17

A program is a list of statements over named slots (`program`). It grows from the rows of `tables`,
each step tried on one device first (`generate`, `hand`), runs in both worlds (`run`, `worlds`), and
what they hold at the end is compared (`play`, `compare`). A failure is made smaller (`shrink`) and
printed as a script that runs on its own (`script`). `session` plays many of them.
"""

from shardwise.testing.fuzz.worlds import OneDevice, Sharded

__all__ = ["OneDevice", "Sharded"]
