"""What torch's attention modules call when no gradient is wanted, out of ops that have rules."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

aten = torch.ops.aten


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
    """The output of a multi-head attention, batch first, and its weights where asked for."""
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
    """A mask over (batch, head, query, key), given over the last two, batch and key, or all."""
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
    """Whether an encoder may drop what is masked by a nested tensor: a DTensor is never one.

    So masked positions of the output hold numbers, where one device may leave zeros.
    """
    return False


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten._native_multi_head_attention.default: attention,
    aten._transformer_encoder_layer_fwd.default: encoder_layer,
    aten._nested_tensor_from_mask_left_aligned.default: as_nested,
}
