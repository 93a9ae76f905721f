"""OutputHook: what a plan wants of a module's output, as a hook that files can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from shardwise.shard.group import group_ranks
from shardwise.shard.outputs import OutputPlan, lay_out
from shardwise.shard.pickled import group_of_load
from shardwise.shard.traced_outputs import output_text


@dataclass(frozen=True, slots=True)
class OutputHook:
    """Lays out the output of the module that the plan names.

    A pickled one keeps its group by its ranks, and takes that of the load, as tensors do.
    """

    plan: OutputPlan
    process_group: Any
    #: The same for a compiler.
    text: str

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        return lay_out(output, self.plan, self.process_group, self.text)

    def __deepcopy__(self, memo: Any) -> OutputHook:
        return self  # a group stands for processes, which are not copied

    def __reduce__(self) -> Any:
        return _restored, (self.plan, group_ranks(self.process_group))


def output_hook(plan: OutputPlan, process_group: Any) -> OutputHook:
    return OutputHook(plan, process_group, output_text(plan, process_group))


def _restored(plan: OutputPlan, ranks: tuple[int, ...]) -> OutputHook:
    return output_hook(plan, group_of_load(ranks, f"The output plan of {plan.where!r}"))
