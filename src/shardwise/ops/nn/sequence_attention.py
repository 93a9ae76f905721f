"""`F.scaled_dot_product_attention` of DTensors whose queries are sharded along the sequence.

The result is sharded along the sequence like the queries. Keys and values are first brought to the
same placements, and then exchanged as `context_attention` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout, contiguous_stride
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.core.sizes import lengths
from shardwise.core.untraced import UntracedFunction
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import RedistributionError
from shardwise.ops.nn.context_attention import AxisGroup, ContextAttention, choose
from shardwise.ops.nn.context_tiles import choose_kernel, schedule, spans
from shardwise.ops.operands import all_distributed
from shardwise.simulation.parts import one_part

aten = torch.ops.aten

#: The dim of positions in queries, keys and values: (batch, heads, positions, width).
POSITIONS = 2


def attend_over_sequence(
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """The attention; None where torch's kernels have to do it, or say what is wrong."""
    axis = _sequence_axis(query, key, value)
    if axis is None or not _has_kernel() or (query.shape[1] != key.shape[1] and not enable_gqa):
        return None
    if mask is not None and not _is_mask(mask, query, key):
        return None
    if watch.strict:
        name = query._layout.grid.axis_name(axis)
        raise RedistributionError(
            f"scaled_dot_product_attention of {query._layout!r} exchanges keys and values along "
            f"axis {name!r}, and communication must be explicit here. Use context_parallel(), or "
            "redistribute the operands over their heads: x.redistribute(placements=[Shard(1)])."
        )
    placements = _common_placements(query, key, axis)
    query = query.redistribute(placements=_with_positions(query, placements, axis))
    # A value lies where its key does.
    of_keys = _with_positions(key, placements, axis)
    key, value = (x.redistribute(placements=of_keys) for x in (key, value))
    hidden = None if mask is None else _local_mask(mask, query, axis)
    layout = query._layout
    group = AxisGroup(layout.grid, axis)
    q, k, v = (x.to_local(grad_placements=x.placements) for x in (query, key, value))
    sizes = [_sizes(x._layout, axis) for x in (query, key)]
    with because("scaled_dot_product_attention", implicit=True):
        out = attend_locally(group, sizes, q, k, v, hidden, is_causal, scale)
    shape = (*layout.shape[:-1], value.shape[-1])
    result = DTensor.from_local(
        out, layout.grid.mesh, query.placements, shape=shape, stride=contiguous_stride(shape)
    )
    return result if layout.symbolic else _NeededResult.apply(result)


class _NeededResult(UntracedFunction):
    """The result of an op that needs it in backward: as on one device, no write to it is allowed.

    What is needed are local tensors, whose writes autograd does not see.
    """

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        result = type(x)._wrap(x._local, x._layout)
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _ = ctx.saved_tensors  # raises after a write
        return grad


def attend_locally(
    group: AxisGroup,
    sizes: Sequence[tuple[int, ...]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    method: str | None = None,
) -> Any:
    """Attention of local tensors; `sizes` are the numbers of queries and of keys on each rank.

    `mask` is a term of the scores for all positions of the sequence, or says where to attend.
    """
    found = schedule(spans(sizes[0]), spans(sizes[1]), is_causal)
    part, of_values = one_part(q), one_part(v)
    kernel = choose_kernel(part, of_values, part.shape[1], mask is not None, scale)
    if mask is not None:
        mask = group.map(lambda _, m, q: _added_to_scores(m, q.dtype), mask, q)
    return ContextAttention.apply(q, k, v, mask, choose(group, found, kernel, q, k, v, method))


def _added_to_scores(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = mask.reshape([1] * (4 - mask.dim()) + list(mask.shape))
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -torch.inf)


def _is_mask(mask: Any, query: DTensor, key: DTensor) -> bool:
    """Whether torch takes this mask, and it needs no gradient."""
    if mask.requires_grad or mask.dtype not in (torch.bool, query.dtype) or mask.dim() < 2:
        return False
    wanted = (*query.shape[:3], key.shape[2])
    pairs = zip(reversed(mask.shape), reversed(wanted), strict=False)
    return mask.dim() <= len(wanted) and all(size in (1, whole) for size, whole in pairs)


def _has_kernel() -> bool:
    """Whether torch may choose other kernels than "math", the only one with second derivatives."""
    backends = torch.backends.cuda
    return backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled()


def _sequence_axis(query: DTensor, key: DTensor, value: DTensor) -> int | None:
    """The axis along which queries are sharded by position; the largest of several."""
    layouts = [x._layout for x in (query, key, value)]
    if any(lo.ndim != 4 or lo.symbolic or lo.grid is not layouts[0].grid for lo in layouts):
        return None
    q, k, v = (lo.shape for lo in layouts)
    fits = q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[3] == k[3] and k[1] and not q[1] % k[1]
    if not fits or not query.is_floating_point():
        return None
    sizes = layouts[0].grid.shape
    axes = [a for a in layouts[0].axes_of(POSITIONS) if sizes[a] > 1]
    return max(axes, key=lambda a: sizes[a]) if axes else None


def _common_placements(query: DTensor, key: DTensor, axis: int) -> list[Placement]:
    """Placements of batch and heads that suit all operands; the axis of positions is left open."""
    layout, num_heads = query._layout, (query.shape[1], key.shape[1])
    found: list[Placement] = [REPLICATE] * layout.grid.num_axes
    split = 1
    for other in layout.order:
        placement = layout.placements[other]
        size = layout.grid.shape[other]
        if other == axis or not isinstance(placement, Shard):
            continue
        if placement.dim == 0 or (placement.dim == 1 and num_heads[0] == num_heads[1]):
            found[other] = placement
        elif placement.dim in (1, POSITIONS) and not any(n % (split * size) for n in num_heads):
            found[other] = Shard(1)
            split *= size
    return found


def _with_positions(x: DTensor, placements: Sequence[Placement], axis: int) -> list[Placement]:
    found = list(placements)
    here = x.placements[axis]
    found[axis] = here if here.is_shard(POSITIONS) else Shard(POSITIONS)
    return found


def _sizes(layout: Layout, axis: int) -> tuple[int, ...]:
    placement: Any = layout.placements[axis]
    return lengths(layout.shape[POSITIONS], layout.grid.shape[axis], placement.sizes)


def _local_mask(mask: Any, query: DTensor, axis: int) -> torch.Tensor:
    """The mask of this rank's batch and heads, for all positions."""
    operands = (query, query, query, mask)
    mask = all_distributed(aten.scaled_dot_product_attention.default, operands)[3]
    missing = 4 - mask.dim()
    found: list[Placement] = [REPLICATE] * len(query.placements)
    for number, placement in enumerate(query.placements):
        if number == axis or not isinstance(placement, Shard) or placement.dim < missing:
            continue
        if mask.shape[placement.dim - missing] != 1:
            found[number] = Shard(placement.dim - missing, placement.sizes)
    return mask.redistribute(placements=found).to_local()
