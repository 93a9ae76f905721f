"""Checks for users and for this library: rules, random programs, training steps."""

from shardwise.testing.rule_check import Mistake, Report, check_doors, check_rule, missing_choices
from shardwise.testing.sample import Sample

__all__ = ["Mistake", "Report", "Sample", "check_doors", "check_rule", "missing_choices"]
