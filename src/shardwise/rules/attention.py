"""Scaled dot-product attention: batch and heads may be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.rules.parts import UnlessEmpty
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


def attention_choices(call: Call) -> Iterator[Choice]:
    """Every operand and result starts with batch and heads, so all are sharded alike.

    A mask may be broadcast over either; with fewer heads for keys than for queries, heads may be
    sharded only where both divide evenly.
    """
    yield call.replicated()
    heads = {meta.shape[1] for meta in (*call.inputs, *call.outputs) if meta.ndim >= 3}
    for dim in (0, 1):
        uneven = any(type(h) is not int or h % call.axis_size for h in heads)
        if dim == 1 and len(heads - {1}) > 1 and uneven:
            continue
        for sizes in call.splits([(0, dim)]):
            if dim == 1 and sizes is not None and len(heads) > 1:
                continue
            choice = Choice(
                tuple(_placed(m.shape, dim, sizes, call) for m in call.inputs),
                tuple(_placed(m.shape, dim, sizes, call) for m in call.outputs),
            )
            if sizes is None:
                yield replace(choice, even=((0, dim),))
            yield replace(choice, local=LocalCall(UnlessEmpty(call.op), per_rank=True))


def _placed(
    shape: tuple[int, ...], dim: int, sizes: tuple[int, ...] | None, call: Call
) -> Placement:
    whole = call.inputs[0].shape[dim]
    if len(shape) < 3 or (shape[dim] == 1 and whole != 1):
        return REPLICATE
    return Shard(dim, sizes)


@dataclass(frozen=True, slots=True)
class WholeTensorChoice:
    """Asks which kernel suits the whole tensors: parts may differ, and ranks must agree."""

    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dropout_p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
        if dropout_p:
            return _MATH  # a fused kernel draws its mask in an order that parts cannot follow
        shapes = iter(self.shapes)
        models = [
            # One example is enough to tell; its memory is never touched.
            torch.empty((1, *next(shapes)[1:]), dtype=arg.dtype, device=arg.device)
            if isinstance(arg, torch.Tensor)
            else arg
            for arg in args
        ]
        return aten._fused_sdp_choice.default(*models, **kwargs)


_MATH = int(SDPBackend.MATH.value)


def kernel_choices(call: Call) -> Iterator[Choice]:
    """Nothing is moved to find out which kernel to use."""
    placed = call.placed or (REPLICATE,) * len(call.inputs)
    yield Choice(placed, (), LocalCall(WholeTensorChoice(tuple(m.shape for m in call.inputs))))


RULES: Table = table(
    (
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        ),
        Rule(attention_choices, "b h [s] [d], b h [t] [d], b h [t] [d] -> b h [s] [d], b h [s]"),
    ),
    ((aten._fused_sdp_choice.default,), Rule(kernel_choices, "any -> number")),
)
