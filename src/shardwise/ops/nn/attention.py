"""Attention: batch, heads, or the sequence of the queries may be sharded.

Torch picks a kernel for the global shapes, and each kernel has a rule; see Note [Above autograd].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend

from shardwise._torch.functions import fused_sdp_choice
from shardwise.comm.watch import because, watch
from shardwise.core.layout import Layout, contiguous_stride
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.core.sizes import equal, lengths
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    sharded_together,
    table,
    unless_empty,
)
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import RedistributionError
from shardwise.ops.nn.context_attention import AxisGroup, ContextAttention, choose
from shardwise.ops.nn.context_tiles import choose_kernel, schedule, spans
from shardwise.ops.operands import all_distributed, replicated
from shardwise.simulation.ranks import one_part

aten = torch.ops.aten


#: Arguments whose first dims are batch and heads.
_WITH_HEADS = {"query", "key", "value", "grad_out", "grad_out_", "out", "logsumexp"}
#: Arguments that are broadcast over batch and heads.
_MASKS = {"attn_mask", "attn_bias"}


@dataclass(frozen=True, slots=True)
class Attention:
    """What one kernel returns: tensors with batch and heads, then perhaps a mask's gradient.

    `guarded` kernels fail on empty shards, and return only tensors.
    """

    num_with_heads: int
    mask_grad: bool = False
    guarded: bool = False

    def choices(self, call: Call) -> Iterator[Choice]:
        """Batch or heads are sharded in all operands and results alike.

        If keys have fewer heads than queries, heads are sharded only if both divide evenly. A
        kernel with dropout draws its own mask, so it runs on whole tensors.
        """
        drops = bool(call.argument("dropout_p"))
        if not drops or all(p.is_replicate() for p in call.placed):
            yield call.replicated()
        if drops:
            return
        names = call.tensor_names()
        heads = [m.shape[1] for m, n in zip(call.inputs, names, strict=True) if n in _WITH_HEADS]
        for dim in (0, 1):
            grouped = dim == 1 and not all(equal(h, heads[0]) for h in heads)
            if not grouped or all(type(h) is int and h % call.axis_size == 0 for h in heads):
                yield from self._sharded(call, names, dim, grouped)

    def _sharded(
        self, call: Call, names: Sequence[str], dim: int, grouped: bool
    ) -> Iterator[Choice]:
        query = names.index("query")
        whole = call.inputs[query].shape[dim]
        inputs: list[int | Placement] = [
            _mask_dim(meta.shape, dim, whole)
            if name in _MASKS
            else (dim if name in _WITH_HEADS else REPLICATE)
            for meta, name in zip(call.inputs, names, strict=True)
        ]
        outputs: list[int | Placement] = [dim] * min(self.num_with_heads, len(call.outputs))
        if self.mask_grad and len(call.outputs) > len(outputs):
            masks = [at for at, name in zip(inputs, names, strict=True) if name in _MASKS]
            outputs.append(next((at for at in masks if isinstance(at, int)), SUM))
        outputs += [REPLICATE] * (len(call.outputs) - len(outputs))
        even = tuple((i, dim) for i, name in enumerate(names) if name in _WITH_HEADS)
        for choice in sharded_together(call, inputs, outputs):
            shard: Any = choice.inputs[query]
            if shard.sizes is None:
                yield replace(choice, even=even)
            if grouped:
                continue
            if self.guarded:
                yield replace(choice, local=unless_empty(call.op))
            elif type(whole) is int and all(lengths(whole, call.axis_size, shard.sizes)):
                yield replace(choice, alone=((query, dim),))


def _mask_dim(shape: tuple[int, ...], dim: int, whole: int) -> int | Placement:
    """A mask has up to four dims, aligned at the last; size 1 is broadcast."""
    at = dim - (4 - len(shape))
    if at < 0 or (equal(shape[at], 1) and not equal(whole, 1)):
        return REPLICATE
    return at


@dataclass(frozen=True, slots=True)
class WholeTensorChoice:
    """Chooses the kernel for the whole tensors: choices for shards might differ by rank."""

    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if dropout_p:
            return _MATH  # a fused kernel's order of random numbers does not fit shards
        shapes = iter(self.shapes)
        models = [
            # A batch of one is enough; its memory is never touched.
            torch.empty((1, *next(shapes)[1:]), dtype=arg.dtype, device=arg.device)
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        ]
        return aten._fused_sdp_choice.default(*models, **kwargs)


_MATH = int(SDPBackend.MATH.value)


def kernel_choices(call: Call) -> Iterator[Choice]:
    """Any placements: choosing a kernel redistributes nothing."""
    placed = call.placed or (REPLICATE,) * len(call.inputs)
    yield Choice(placed, (), LocalCall(WholeTensorChoice(tuple(m.shape for m in call.inputs))))


def _rule(*ops: Any, kernel: Attention) -> tuple[tuple[Any, ...], Rule]:
    return ops, Rule(
        kernel.choices, "b h [s] [d], b h [t] [d], b h [t] [d] -> b h [s] [d], b h [s]"
    )


# -- above autograd --------------------------------------------------------------------------

#: Torch picks no kernel. It would then make the causal mask as a plain tensor.
_NO_KERNEL = 0


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    distributed = all(type(t) is DTensor for t in (query, key, value))
    empty = distributed and _is_empty(query, key, value)
    by_position = distributed and any(p.is_shard(POSITIONS) for p in query._layout.placements)
    if by_position and not dropout_p and not empty:
        found = attend_over_sequence(query, key, value, attn_mask, is_causal, scale, enable_gqa)
        if found is not None:
            return found
    if distributed and ((dropout_p > 0 and query.is_cuda) or empty):
        # A fused kernel's order of random numbers does not fit shards. Of empty operands torch
        # makes a plain tensor.
        if is_causal and attn_mask is None:
            attn_mask, is_causal = _causal_mask(query, key), False
        math = aten._scaled_dot_product_attention_math.default
        return math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    if is_causal and attn_mask is None and distributed:
        arguments = (query, key, value, None, dropout_p, True)
        if fused_sdp_choice(*arguments, **options) == _NO_KERNEL:
            attn_mask, is_causal = _causal_mask(query, key), False
    decompose = aten.scaled_dot_product_attention.default.decompose
    return decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _is_empty(*operands: DTensor) -> bool:
    """Whether one has no elements; a symbolic size is not 0."""
    return any(type(n) is int and n == 0 for operand in operands for n in operand.shape)


def _causal_mask(query: DTensor, key: DTensor) -> DTensor:
    shape = (query.shape[-2], key.shape[-2])
    mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return replicated(mask, query)


# -- decompositions of what torch's attention modules call without gradients ------------------
def attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    """The output of a multi-head attention, batch first, and its weights with `need_weights`."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        functional.linear(x, weight, bias).unflatten(-1, (num_head, -1)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    scores = (q / math.sqrt(embed_dim // num_head)) @ k.transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_over_heads(mask, mask_type).bool(), -math.inf)
    attended = scores.softmax(-1)
    out = functional.linear((attended @ v).transpose(1, 2).flatten(2), proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, attended.mean(1) if average_attn_weights else attended


def _over_heads(mask: Any, mask_type: int | None) -> Any:
    """The mask over (batch, head, query, key); given over (query, key), (batch, key) or all."""
    if mask_type == 0:
        return mask[None, None]
    return mask[:, None, None] if mask_type == 1 else mask


def encoder_layer(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> Any:
    """One layer of a transformer's encoder."""

    def attend(x: Any) -> Any:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        sizes = (embed_dim, num_heads)
        return attention(x, x, x, *sizes, *projections, mask, False, False, mask_type)[0]

    def feed(x: Any) -> Any:
        activate = functional.gelu if use_gelu else functional.relu
        hidden = activate(functional.linear(x, ffn_weight_1, ffn_bias_1))
        return functional.linear(hidden, ffn_weight_2, ffn_bias_2)

    x = src
    for run, weight, bias in (
        (attend, norm_weight_1, norm_bias_1),
        (feed, norm_weight_2, norm_bias_2),
    ):
        if norm_first:
            x = x + run(functional.layer_norm(x, (embed_dim,), weight, bias, eps))
        else:
            x = functional.layer_norm(x + run(x), (embed_dim,), weight, bias, eps)
    return x


def as_nested(x: Any, mask: Any) -> bool:
    """Whether an encoder may use a nested tensor to drop masked positions: never for a DTensor.

    So masked positions of the output have values, where one device may leave zeros.
    """
    return False


RULES: Table = table(
    _rule(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        kernel=Attention(2, guarded=True),
    ),
    _rule(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        kernel=Attention(3, guarded=True),
    ),
    _rule(
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_fused_attention_overrideable.default,
        kernel=Attention(2),
    ),
    _rule(
        aten._scaled_dot_product_flash_attention_backward.default,
        aten._scaled_dot_product_cudnn_attention_backward.default,
        kernel=Attention(3),
    ),
    _rule(
        aten._scaled_dot_product_efficient_attention_backward.default,
        aten._scaled_dot_product_fused_attention_overrideable_backward.default,
        kernel=Attention(3, mask_grad=True),
    ),
    ((aten._fused_sdp_choice.default,), Rule(kernel_choices, "any -> number")),
)

KERNELS: tuple[tuple[str, Any], ...] = (
    ("scaled_dot_product_attention", scaled_dot_product_attention),
)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten._nested_tensor_from_mask_left_aligned.default: as_nested,
}


# -- queries sharded along the sequence ----------------------------------------------------------
# The result is sharded along the sequence like the queries. Keys and values are first brought to
# the same placements, and then exchanged as `context_attention` says.


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
    """The attention; None if torch's kernels have to compute it or to raise the error."""
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
    given = (query, key, value)
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
    if layout.symbolic:
        return result
    return _Saved.apply(result, *given)


class _Saved(SkipsNone):
    """The result of an op that saves it and its operands for backward.

    As on one device, none of them must be written to before. The op saves local tensors, and
    autograd does not see writes to those.
    """

    @staticmethod
    def forward(ctx: Any, x: Any, *operands: Any) -> Any:
        result = type(x)._wrap(x._local, x._layout)
        ctx.save_for_backward(result, *operands)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        _, *operands = ctx.saved_tensors  # raises after a write
        return grad, *(None for _ in operands)


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

    `mask` covers all positions of the sequence: a term added to the scores, or a bool mask.
    """
    found = schedule(spans(sizes[0]), spans(sizes[1]), is_causal)
    part, of_values = one_part(q), one_part(v)
    kernel = choose_kernel(part, of_values, part.shape[1], mask is not None, scale)
    if mask is not None:
        mask = group.map(lambda _, m, q: _added_to_scores(m, q.dtype), mask, q)
    way = choose(group, found, kernel, q, k, v, method)
    return ContextAttention.apply(q, k, v, mask, way)[0]


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
    """Whether torch may choose a kernel other than "math", the only one with second derivatives."""
    backends = torch.backends.cuda
    return backends.flash_sdp_enabled() or backends.mem_efficient_sdp_enabled()


def _sequence_axis(query: DTensor, key: DTensor, value: DTensor) -> int | None:
    """The axis along which queries are sharded by position; the largest of several."""
    layouts = [x._layout for x in (query, key, value)]
    if any(lo.ndim != 4 or lo.symbolic or lo.grid is not layouts[0].grid for lo in layouts):
        return None
    q, k, v = (lo.shape for lo in layouts)
    fits = q[0] == k[0] == v[0] and k[1:3] == v[1:3] and q[3] == k[3] and k[1] and not q[1] % k[1]
    if not fits or not query.is_floating_point() or not query.dtype == key.dtype == value.dtype:
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
