"""Lookups and linear layers with local batches, in compiled code.

Note [Sharded modules in compiled code]
The sizes of other ranks' batches are data-dependent. Those of the results are not: a lookup has a
row for each of this rank's ids, a gradient the shape of this rank's shard. (The length of a sparse
gradient is data-dependent; nothing in the graph depends on it.) So each lookup or linear layer is
one op of a graph, as in Note [Effect ops]; batches may differ in size between ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.mesh import Grid
from shardwise.effects.effect_op import EffectOp
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.shard.spec import decode_spec, encode_spec
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import Tiling, make_tiling
from shardwise.simulation.ranks import one_tensor, part_per_rank

WHAT = "a sharded module"
#: The advice of errors about export.
INSTEAD = ", or export a module on DTensors (distribute_module)"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One lookup or linear layer in a graph, but for its tensors."""

    tiling: Tiling
    grad_reduction: str
    options: dict[str, Any]
    #: The name of the dtype that linear layers are cast to, if any.
    autocast_dtype: str | None

    def autocast(self) -> Any:
        """The autocast state of the call."""
        kind, dtype = self.tiling.grid.device_type, self.autocast_dtype
        if dtype is None:
            return torch.autocast(kind, enabled=False)
        return torch.autocast(kind, dtype=getattr(torch, dtype))


def declare(
    name: str, eager: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]
) -> EffectOp:
    """The op of a graph that runs `eager(weight=..., **tensors, **options)`.

    `fake(call, **inputs)` is an empty tensor like one rank's result; `weight` is its local tensor.
    """

    def run(call: LayerCall, weight: torch.Tensor, **tensors: torch.Tensor) -> list[torch.Tensor]:
        with call.autocast():
            return [eager(weight=weight, **tensors, **call.options)]

    def shapes(
        call: LayerCall, _: Any, ranks: Sequence[dict[str, Any]]
    ) -> list[list[torch.Tensor]]:
        return [[fake(call, **inputs)] for inputs in ranks]

    return EffectOp(name, WHAT, run, shapes, INSTEAD, _decode, enter=_enter, gradient=_gradient)


def traced(
    op: EffectOp,
    weight: ShardedTensor,
    options: dict[str, Any],
    **given: torch.Tensor | None,
) -> torch.Tensor:
    """The eager function as one op of a graph."""
    tiling = weight._tiling
    call = {
        "spec": encode_spec(tiling.spec),
        "shape": tiling.shape,
        "grad_reduction": weight.grad_reduction,
        "options": options,
        "autocast_dtype": _autocast_dtype(tiling.grid.device_type),
    }
    (out,) = op(
        tiling.grid,
        call,
        {"weight": weight, **given},
        row_sparse=bool(options.get("sparse")),
        writes=options.get("max_norm") is not None,
    )
    return out


def _autocast_dtype(device_type: str) -> str | None:
    if not torch.is_autocast_enabled(device_type):
        return None
    return str(torch.get_autocast_dtype(device_type)).removeprefix("torch.")


def _decode(call: Any, grid: Grid | None) -> LayerCall:
    assert grid is not None, "a tiling has the ranks of a group"
    tiling = make_tiling(decode_spec(call["spec"]), tuple(call["shape"]), grid)
    return LayerCall(tiling, call["grad_reduction"], call["options"], call["autocast_dtype"])


def _enter(call: LayerCall, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    grid = call.tiling.grid
    local = one_tensor(grid, part_per_rank(grid, inputs["weight"]), sized=False)
    weight = ShardedTensor.over(local, call.tiling)
    weight.grad_reduction = call.grad_reduction
    return inputs | {"weight": weight}


def _gradient(call: LayerCall, weight: Any, *held: torch.Tensor) -> torch.Tensor:
    layout = call.tiling.layout(weight.dtype)
    if len(held) == 2:
        return make_row_sparse(layout, *held)
    return ShardedTensor.over(held[0], call.tiling, layout, like=weight)
