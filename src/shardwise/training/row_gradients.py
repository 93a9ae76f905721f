"""Row-sparse gradients: reduced by gathering rows, so that no dense one is materialised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm import collectives
from shardwise.core.mesh import Grid
from shardwise.dtensor.tensor import DTensor
from shardwise.ops.lookup import row_sparse
from shardwise.ops.lookup.row_sparse import RowSparse, gather_rows
from shardwise.simulation.parts import one_part, parts_of
from shardwise.simulation.ranks import each_rank, localize, one_for_all
from shardwise.training.contract import Reduction
from shardwise.training.mesh_axes import Axis

#: The kinds of a rank's gradient, in the order of precedence.
NOTHING, ROWS, DENSE = range(3)


def kinds_on_all_ranks(parameters: Sequence[nn.Parameter], axes: Sequence[Axis]) -> list[int]:
    """For each parameter, the highest kind of its gradient on any rank along the axes."""
    mine = [_kind(p.grad) for p in parameters]
    grid = axes[0][0]
    device = parameters[0].device
    found: Any = each_rank(grid, lambda _: torch.tensor(mine, device=device), axes=())
    for axis in axes:
        found = collectives.all_reduce(found, "max", *axis)
    return one_for_all(found).tolist()


def _kind(grad: torch.Tensor | None) -> int:
    if grad is None:
        return NOTHING
    return ROWS if _holds_rows(grad) else DENSE


def _holds_rows(grad: torch.Tensor) -> bool:
    here = one_part(grad)
    return here.is_sparse and here.sparse_dim() == 1


def average_rows(parameter: nn.Parameter, reduction: Reduction) -> None:
    """Set the gradient of a parameter to the mean over ranks, as rows."""
    grid = reduction.means[0][0]
    rows, values = (localize(grid, each) for each in _parts(parameter, grid))
    for axis in reduction.means:
        rows, values = gather_rows(rows, values, *axis)
    values = values * reduction.share
    if isinstance(parameter, DTensor):
        grad: Any = parameter.grad
        layout = parameter._layout if grad is None else grad._layout
        parameter.grad = row_sparse.make(layout, rows, values)
        return
    size = tuple(parameter.shape)

    def make(_: Any, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.sparse_coo_tensor(rows.unsqueeze(0), values, size, check_invariants=False)

    held = [localize(grid, one_for_all(each)) for each in (rows, values)]
    made = each_rank(grid, make, *held, axes=())
    parts = parts_of(made)
    parameter.grad = parts[0] if len(parts) == 1 else made


def _parts(parameter: nn.Parameter, grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Row numbers and rows of this rank's gradient; empty where it has none."""
    grad: Any = parameter.grad
    if isinstance(grad, RowSparse):
        return grad._rows, grad._local
    if grad is None:
        local = getattr(parameter, "_local", parameter).detach()
        return torch.empty(0, dtype=torch.int64, device=parameter.device), local[:0]

    def apart(_: Any, here: torch.Tensor) -> Any:
        return here._indices()[0], here._values()

    return each_rank(grid, apart, localize(grid, grad), axes=())
