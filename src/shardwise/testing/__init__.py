"""What checks a user's rules and models against one device, and the faults of a simulated world.

Random programs, drawn training runs and the sweep over torch's operators check this library: they
are in `tests`.
"""

from shardwise.simulation.faults import Corrupt, Delay, Drop, FullDisk, Kill, draw_fault
from shardwise.testing.rule_check import Mistake, Report, check_doors, check_rule, missing_choices
from shardwise.testing.sample import Sample

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
