"""OutputHook: what a plan wants of a module's output, as a hook that files can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.shard.group import group_ranks
from shardwise.shard.outputs import lay_out
from shardwise.shard.pickled import group_of_load
from shardwise.shard.spec import ShardingSpec


@dataclass(frozen=True, slots=True)
class OutputHook:
    """Lays out the output of the module at `where`.

    A pickled one keeps its group by its ranks, and takes that of the load, as tensors do.
    """

    where: str
    spec: ShardingSpec | None
    local: bool
    process_group: Any
    grad_reduction: str

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return lay_out(
            output,
            where=self.where,
            spec=self.spec,
            local=self.local,
            process_group=self.process_group,
            grad_reduction=self.grad_reduction,
        )

    def __deepcopy__(self, memo: Any) -> OutputHook:
        return self  # a group stands for processes, which are not copied

    def __reduce__(self) -> Any:
        ranks = group_ranks(self.process_group)
        return _restored, (self.where, self.spec, self.local, ranks, self.grad_reduction)


def _restored(
    where: str, spec: ShardingSpec | None, local: bool, ranks: tuple[int, ...], grad_reduction: str
) -> OutputHook:
    group = group_of_load(ranks, f"The output plan of {where!r}")
    return OutputHook(where, spec, local, group, grad_reduction)
