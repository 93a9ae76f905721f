"""Parameters that a plan leaves plain where activations may lie in parts.

Between a colwise and a rowwise layer each rank has some of the columns. A plain parameter that is
used there does not fit them, or has a gradient that is this rank's share. A plan does not say in
which order a module calls its children: this can be doubted, but not known.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from torch import nn

from shardwise.core.placements import Placement, Shard
from shardwise.parallel.matrix import ColwiseParallel, RowwiseParallel
from shardwise.parallel.resolve import Target, fits


def doubts(module: nn.Module, targets: Sequence[Target], placed: Container[int]) -> tuple[str, ...]:
    """A sentence for each parameter that stands beside such layers; `placed` are the ids of those
    that the plan places."""
    givers = _parents(targets, ColwiseParallel)
    takers = _parents(targets, RowwiseParallel)
    found = []
    for parent in givers:
        if parent not in takers:
            continue
        prefix = f"{parent}." if parent else ""
        for name, parameter in module.get_submodule(parent).named_parameters():
            if id(parameter) not in placed:
                found.append(
                    f"{prefix + name!r} is plain and stands beside {givers[parent]!r} and "
                    f"{takers[parent]!r}, between which each rank has some of the columns. If it "
                    "is used there, the plan needs an entry for its module, such as "
                    '"replicated_with_grad_allreduce" for a norm of each head.'
                )
    return tuple(found)


def _parents(
    targets: Sequence[Target], style: type[ColwiseParallel | RowwiseParallel]
) -> dict[str, str]:
    """The modules around layers that put out, or take in, some of the columns; with the layer."""
    found: dict[str, str] = {}
    for target in filter(fits, targets):
        if isinstance(target.style, style) and _in_parts(target):
            found.setdefault(target.path.rpartition(".")[0], target.path)
    return found


def _in_parts(target: Target) -> bool:
    style = target.style
    layout: Placement | None = None
    if isinstance(style, ColwiseParallel):
        layout = style.output_layouts
    elif isinstance(style, RowwiseParallel):
        if isinstance(target.module, nn.Embedding):
            return False
        layout = style.input_layouts
    return layout is None or (isinstance(layout, Shard) and layout.dim == -1)
