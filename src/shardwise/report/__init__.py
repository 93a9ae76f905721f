"""One training step of a model as data, tables and a page: communication, memory, parity.

`debug.events` adds up communication; the training steps that are compared are in `testing`.
"""

from shardwise.report.case import Case
from shardwise.report.html import write_html
from shardwise.report.parity import (
    Parity,
    TrainingParity,
    check_in_processes,
    check_simulated,
    check_training,
)
from shardwise.report.step import StepReport, report_step
from shardwise.testing.layouts import Mesh

__all__ = [
    "Case",
    "Mesh",
    "Parity",
    "StepReport",
    "TrainingParity",
    "check_in_processes",
    "check_simulated",
    "check_training",
    "report_step",
    "write_html",
]
