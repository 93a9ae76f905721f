"""Scaled dot-product attention, above autograd: see Note [Above autograd].

Torch picks a kernel for the global shapes, and the kernels have rules. Where it picks none, it
makes the causal mask as a plain tensor: here that is a DTensor.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.functions import fused_sdp_choice
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor

aten = torch.ops.aten
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
    if distributed and ((dropout_p > 0 and query.is_cuda) or _is_empty(query, key, value)):
        # Fused kernels draw inside, in their own order: no part can draw what the whole would. And
        # where there is nothing to compute, torch makes a plain tensor of it.
        if is_causal and attn_mask is None:
            attn_mask, is_causal = _causal_mask(query, key), False
        math = aten._scaled_dot_product_attention_math.default
        return math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]
    if is_causal and attn_mask is None and distributed:
        operands = (query, key, value, None, dropout_p, True)
        if fused_sdp_choice(*operands, **options) == _NO_KERNEL:
            attn_mask, is_causal = _causal_mask(query, key), False
    decompose = aten.scaled_dot_product_attention.default.decompose
    return decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _is_empty(*operands: DTensor) -> bool:
    """Whether one has no elements; a size that is a symbol is not 0."""
    return any(type(n) is int and n == 0 for operand in operands for n in operand.shape)


def _causal_mask(query: DTensor, key: DTensor) -> DTensor:
    shape = (query.shape[-2], key.shape[-2])
    mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    return DTensor.from_local(mask, query.device_mesh, [REPLICATE] * query._layout.grid.num_axes)


KERNELS = (("scaled_dot_product_attention", scaled_dot_product_attention),)
