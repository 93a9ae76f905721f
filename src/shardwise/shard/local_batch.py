"""What lookups and linear layers of local batches share: arguments, stages, compiled ops.

Bags in any form of `embedding_bag` become flat ids and a length per bag.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.core.mesh import Grid
from shardwise.core.untraced import UntracedFunction
from shardwise.effects import EffectOp
from shardwise.errors import UnsupportedError
from shardwise.lookup.ids import dtype_fault, offsets_fault
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.shard.spec import decode_spec, encode_spec
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import DimSplit, Tiling, make_tiling
from shardwise.simulation.ranks import each_rank, one_tensor, part_per_rank


def range_of(ids: torch.Tensor, fault: str | None) -> tuple[int, int]:
    """The lowest and the highest id of a batch without a fault."""
    if fault is not None or not ids.numel():
        return 0, -1
    low, high = torch.stack(torch.aminmax(ids)).tolist()
    return low, high


def batch_fault(ids: Any, offsets: Any, weights: Any, include_last_offset: bool) -> str | None:
    """What is wrong with a batch of bags, if anything."""
    if (fault := dtype_fault(ids, "ids")) is not None:
        return fault
    if weights is not None and not isinstance(weights, torch.Tensor):
        return f"per_sample_weights are a tensor, found {type(weights).__name__}."
    if weights is not None and weights.shape != ids.shape:
        return f"per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}."
    if ids.dim() == 2:
        return None if offsets is None else "ids of two dims are one bag per row: no offsets."
    if ids.dim() != 1:
        return f"ids have one dim, with offsets, or two; found shape {tuple(ids.shape)}."
    if offsets is None:
        return "ids of one dim need offsets, of one dim too."
    if (fault := dtype_fault(offsets, "offsets")) is not None:
        return fault
    if offsets.dim() != 1:
        return f"offsets have one dim, found shape {tuple(offsets.shape)}."
    return _offsets_fault(offsets, ids.numel(), include_last_offset)


def _offsets_fault(offsets: torch.Tensor, num_ids: int, include_last_offset: bool) -> str | None:
    if not offsets.numel():
        if include_last_offset:
            return "with include_last_offset there is at least one offset."
        return f"there are {num_ids} ids but no bags." if num_ids else None
    fault = offsets_fault(offsets, num_ids)
    if fault is None and include_last_offset and int(offsets[-1]) != num_ids:
        return f"the last offset is the number of ids, {num_ids}; found {int(offsets[-1])}."
    return fault


def lengths_of(
    ids: torch.Tensor, offsets: torch.Tensor | None, include_last_offset: bool
) -> torch.Tensor:
    """How many ids each bag has. The batch has no fault."""
    if ids.dim() == 2:
        return torch.full((ids.shape[0],), ids.shape[1], dtype=torch.int64, device=ids.device)
    assert offsets is not None, "ids of one dim come with offsets"
    ends = offsets.long()
    if not include_last_offset:
        ends = torch.cat([ends, ends.new_tensor([ids.numel()])])
    return ends.diff()


def pool(
    rows: torch.Tensor,
    ids: torch.Tensor,
    lengths: torch.Tensor,
    mode: str,
    weights: torch.Tensor | None,
    padding_idx: int | None,
) -> torch.Tensor:
    """The pooled bags out of one row per id; the padding id's rows do not count."""
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(ids.numel(), device=ids.device)
    padding = None
    if padding_idx is not None:
        # One more row stands for every padding id.
        padding = ids.numel()
        place = place.masked_fill(ids == padding_idx, padding)
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    if not rows.numel():
        return rows.new_zeros(lengths.numel(), rows.shape[1])
    return F.embedding_bag(
        place, rows, starts, mode=mode, per_sample_weights=weights, padding_idx=padding
    )


def scaled_by_frequency(rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The rows; their gradient is divided by the id's frequency in this rank's batch."""
    if not ids.numel():
        return rows
    _, which, counts = torch.unique(ids, return_inverse=True, return_counts=True)
    return ScaleRows.apply(rows, 1 / counts[which].to(rows.dtype).unsqueeze(1))


class ScaleRows(UntracedFunction):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (factor,) = ctx.saved_tensors
        return grad * factor, None


def split_of(weight: ShardedTensor, what: str) -> DimSplit:
    """How a weight is split; raises where a local batch cannot use it."""
    tiling = weight._tiling
    if tiling.split is None or len(tiling.shape) != 2:
        raise UnsupportedError(
            f"{what} needs a weight of two dims, split along one of them with one shard per rank; "
            f"found shape {tiling.shape} and {tiling.spec}. Use reshard(spec) first."
        )
    return tiling.split


@dataclass(frozen=True, slots=True)
class Lookup:
    """A table and the options of a lookup, checked."""

    what: str
    weight: ShardedTensor
    split: DimSplit
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    #: Whether a row's gradient is divided by its frequency in the rank's batch.
    by_frequency: bool
    #: Whether the table's gradient holds only the rows that were looked up.
    sparse: bool

    @property
    def grid(self) -> Grid:
        return self.weight._tiling.grid

    @property
    def num_rows(self) -> int:
        return self.weight._tiling.shape[0]

    def options(self) -> dict[str, Any]:
        """The options under the names of torch's functions, as constants."""
        return {
            "padding_idx": None if self.padding_idx is None else int(self.padding_idx),
            "max_norm": None if self.max_norm is None else float(self.max_norm),
            "norm_type": float(self.norm_type),
            "scale_grad_by_freq": self.by_frequency,
            "sparse": bool(self.sparse),
        }


@dataclass(frozen=True, slots=True)
class LocalBags:
    """One rank's bags as flat ids and a length per bag; both empty where there is a fault."""

    ids: torch.Tensor
    lengths: torch.Tensor
    fault: str | None


@dataclass(frozen=True, slots=True)
class BagBatch:
    """The bags of all ranks present, in any form that `F.embedding_bag` takes."""

    ids: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    include_last_offset: bool
    mode: str

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that differ between ranks; `of_rank` takes one rank's."""
        return [self.ids, *(x for x in (self.offsets, self.weights) if x is not None)]

    def of_rank(self, mine: Sequence[torch.Tensor]) -> LocalBags:
        left = iter(mine)
        ids = next(left)
        offsets = None if self.offsets is None else next(left)
        weights = None if self.weights is None else next(left)
        fault = batch_fault(ids, offsets, weights, self.include_last_offset)
        if fault is not None:
            nothing = torch.empty(0, dtype=torch.int64)
            return LocalBags(nothing, nothing, fault)
        lengths = lengths_of(ids, offsets, self.include_last_offset)
        return LocalBags(ids.reshape(-1).long(), lengths, None)


# -- stage ---------------------------------------------------------------------------------------
# Local computation between two collectives, with its gradient.


class Stage:
    """A function that each rank runs locally, under torch's autograd.

    It returns a tensor that has a gradient, and perhaps more that have none.
    """

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs = needs
        self.graphs: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def run(
        self, rank: int, fn: Callable[..., tuple[torch.Tensor, ...]], leaves: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        own = [x.detach().requires_grad_(n) for x, n in zip(leaves, self.needs, strict=True)]
        with torch.set_grad_enabled(any(self.needs)):
            result, *more = fn(*own)
        self.graphs[rank] = (own, result)
        return result.detach(), *more

    def backward(self, grid: Grid, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of every leaf; zeros where none is needed or there is none."""

        def here(place: Any, mine: torch.Tensor) -> list[torch.Tensor]:
            leaves, result = self.graphs[grid.ranks[place[0]]]
            wanted = [x for x, need in zip(leaves, self.needs, strict=True) if need]
            found: Any = [None] * len(wanted)
            if result.requires_grad:
                found = torch.autograd.grad(
                    result, wanted, mine, allow_unused=True, retain_graph=True
                )
            grads = iter(found)
            given = [next(grads) if need else None for need in self.needs]
            return [
                torch.zeros_like(x) if g is None else g for x, g in zip(leaves, given, strict=True)
            ]

        return list(each_rank(grid, here, grad))


# -- compile -------------------------------------------------------------------------------------
# Lookups and linear layers with local batches, in compiled code.
#
# Note [Sharded modules in compiled code]
# The sizes of other ranks' batches are data-dependent. Those of the results are not: a lookup has a
# row for each of this rank's ids, a gradient the shape of this rank's shard. (The length of a
# sparse gradient is data-dependent; nothing in the graph depends on it.) So each lookup or linear
# layer is one op of a graph, as in Note [Effect ops]; batches may differ in size between ranks.


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
