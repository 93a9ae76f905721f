"""The check that plain gradients are equal along tensor axes.

Between sharded layers, each rank has some of the columns, heads or positions. A plain parameter
that is used there gets a gradient of those only, and the replicas would diverge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import LayoutError
from shardwise.simulation.parts import parts_of
from shardwise.simulation.ranks import each_rank, localize, one_for_all
from shardwise.training.contract import is_used_alike, tensor_axes
from shardwise.training.mesh_axes import ranks_along

#: The tolerance for sums of the same numbers, by the size of the dtype: GPU kernels may add in
#: different orders.
_TOLERANCE = {8: 1e-6, 4: 1e-3, 2: 3e-2, 1: 0.2}


def check_plain_gradients(module: nn.Module) -> None:
    """Raise, on all ranks, where a plain gradient differs along an axis that styles split along."""
    plain = {
        name: p
        for name, p in module.named_parameters()
        if p.requires_grad and is_used_alike(p) and not p.is_meta
    }
    for (grid, axis), reason in tensor_axes(module).items() if plain else ():
        if len(ranks_along(grid, axis)) < 2:
            continue
        with torch.no_grad(), because("a check of plain gradients", implicit=False):
            odd = _different(list(plain.values()), grid, axis)
        if any(odd):
            names = [name for name, differs in zip(plain, odd, strict=True) if differs]
            raise LayoutError(
                f"The gradients of {names} differ between the ranks along axis "
                f"{grid.axis_name(axis)!r} of {grid!r}. {reason[0].upper()}{reason[1:]}; between "
                "such layers each rank has some of the columns, heads or positions, and a plain "
                "parameter that is used there gets the gradient of those alone. Give its module an "
                'entry in the plan ("replicated_with_grad_allreduce" for a norm of each head, '
                "SequenceParallel() for a sequence in parts), or add the gradient up yourself in a "
                "hook of the parameter."
            )


def _different(parameters: Sequence[nn.Parameter], grid: Grid, axis: int) -> list[bool]:
    grads = [localize(grid, _local_gradient(p)) for p in parameters]

    def sums(_: Any, *here: torch.Tensor) -> torch.Tensor:
        found = [_sums(grad) for grad in here]
        row = torch.stack(found).to(torch.float64 if grid.device_type != "mps" else torch.float32)
        return torch.cat([row, -row])

    row = each_rank(grid, sums, *grads, axes=())
    largest = one_for_all(collectives.all_reduce(row, "max", grid, axis))
    found = [False] * len(parameters)
    for part in parts_of(largest):
        high, low = part.chunk(2)
        for number, parameter in enumerate(parameters):
            allowed = _TOLERANCE[min(parameter.element_size(), 8)] * high[number, 1]
            found[number] |= bool((high[number] + low[number] > allowed).any())
    return found


def _local_gradient(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is None:
        return torch.zeros(1, device=parameter.device)
    return parameter.grad._local if isinstance(parameter.grad, DTensor) else parameter.grad


def _sums(grad: torch.Tensor) -> torch.Tensor:
    values = grad._values() if grad.is_sparse else grad
    wide = torch.view_as_real(values) if values.is_complex() else values
    wide = wide.detach().double()
    return torch.stack([wide.sum(), wide.abs().sum()])
