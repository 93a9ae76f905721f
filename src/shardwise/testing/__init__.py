"""What a user needs to test a sharded model, and what this library tests its rules with."""

from shardwise.testing.rule_check import Mistake, Report, check_rule
from shardwise.testing.rule_doors import check_doors
from shardwise.testing.rule_gaps import missing_choices
from shardwise.testing.sample import Sample

__all__ = ["Mistake", "Report", "Sample", "check_doors", "check_rule", "missing_choices"]
