"""Checks for users and for this library: rules, random programs, training steps, faults.

The sweep over torch's operators and random training runs check only this library, so they are in
`tests`.
"""

from shardwise.simulation.world import Corrupt, Delay, Drop, FullDisk, Kill, draw_fault
from shardwise.testing.rule_check import (
    Mistake,
    Report,
    Sample,
    check_doors,
    check_rule,
    missing_choices,
)

__all__ = [
    "Corrupt",
    "Delay",
    "Drop",
    "FullDisk",
    "Kill",
    "Mistake",
    "Report",
    "Sample",
    "check_doors",
    "check_rule",
    "draw_fault",
    "missing_choices",
]
