"""ShardingPlan: which parameters a plan shards how, which modules it leaves to a Sharder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.shard.describe import ShardingPlanReport, report
from shardwise.shard.spec import ShardingSpec


class Sharder(ABC):
    """Shards a module in a way of its own."""

    @abstractmethod
    def shard(self, module: nn.Module) -> nn.Module:
        """The module that replaces `module`; may be the same. May call `shard_module`."""


@dataclass
class ShardingPlan:
    """What to shard, by path.

    `plan` maps the path of a parameter to a spec, or the path of a module to a `Sharder`.
    `output_plan` maps the path of a module ("" is the root) to the spec that its output is given;
    what a rank puts out by itself counts as its part of a batch that all ranks share.
    `return_local_tensor` lists modules whose sharded output is handed on as this rank's block.

    >>> from shardwise.shard import ChunkShardingSpec, ShardingPlan
    >>> rows = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
    >>> print(ShardingPlan({"0.weight": rows}).describe(nn.Sequential(nn.Embedding(5, 4))))
    0.weight (5, 4) cut along dim 0: 48 B, 32 B
    parameters per rank: 48 B, 32 B; the largest holds 1.20 times the average
    forward of 0 (Embedding):
      all_to_all 4 B per different id of this rank
      all_to_all 16 B per different id that this rank is asked for
    """

    plan: Mapping[str, ShardingSpec | Sharder]
    output_plan: Mapping[str, ShardingSpec] | None = None
    return_local_tensor: Sequence[str] | None = None

    def describe(self, module: nn.Module, world_size: int | None = None) -> ShardingPlanReport:
        """Bytes per rank, the balance, and what each forward will communicate.

        Nothing is changed, no world is needed, and the module may be on the meta device.
        """
        return report(module, self.plan, world_size)


class ShardingPlanner(ABC):
    """Makes plans."""

    @abstractmethod
    def build_plan(self, module: nn.Module) -> ShardingPlan:
        """A plan for the module."""
