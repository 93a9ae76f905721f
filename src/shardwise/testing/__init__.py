"""What a user needs to test a sharded model, and what this library tests its rules with."""

from shardwise.testing.rule_check import Mistake, Report, Sample, check_rule, missing_choices

__all__ = ["Mistake", "Report", "Sample", "check_rule", "missing_choices"]
