"""Tensors in any placements, Partial ones included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import REPLICATE, Partial, Placement
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.simulation.ranks import each_rank
from shardwise.testing.parts import scattered

#: What each coordinate of an axis holds of a Partial tensor, in multiples of it. Any two neighbours
#: add up without rounding, and no function that is not linear gives the same sum.
_SHARES = {2: (2, -1), 4: (-1, 2, 1, -1)}


def laid_out(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    order: tuple[int, ...] | None = None,
) -> DTensor:
    """The tensor in these placements, Partial ones included, with its axes in any order."""
    whole = tensor.detach().clone().resolve_conj().resolve_neg()
    reduced = [REPLICATE if isinstance(p, Partial) else p for p in placements]
    sharded = distribute_tensor(whole, mesh, reduced, src_data_rank=None)
    if order is not None:
        layout = sharded._layout.with_placements(sharded.placements, order)
        # Cut here, not moved: a move may itself be wrong.
        blocks = scattered(whole, layout)
        local = each_rank(layout.grid, lambda _, part: part.clone(), blocks, axes=())
        sharded = DTensor._wrap(local, layout)
    partial = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
    if not partial:
        return sharded
    if not all(placements[axis].is_partial("sum") for axis in partial):
        layout = sharded._layout.with_placements(tuple(placements))
        return DTensor._wrap(scattered(whole, layout), layout)

    def term(coordinate: Any, part: torch.Tensor) -> torch.Tensor:
        shares = [_SHARES[mesh.shape[axis]][coordinate[axis]] for axis in partial]
        factor = torch.tensor(shares, dtype=part.real.dtype).prod()
        first = all(coordinate[axis] == 0 for axis in partial)
        return torch.where(part.isfinite(), part * factor, part if first else 0)

    layout = sharded._layout
    local = each_rank(layout.grid, term, sharded._local)
    return DTensor._wrap(local, layout.with_placements(tuple(placements), layout.order))
