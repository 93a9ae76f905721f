"""Scaled dot-product attention: batch and heads may be sharded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from shardwise.core.chunks import equal, lengths
from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, SUM, Placement, Shard
from shardwise.rules.parts import UnlessEmpty
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


#: What lies like the queries, keys or values: batch and heads stand first.
_WITH_HEADS = {"query", "key", "value", "grad_out", "grad_out_", "out", "logsumexp"}
#: What is broadcast over batch and heads.
_MASKS = {"attn_mask", "attn_bias"}


@dataclass(frozen=True, slots=True)
class Attention:
    """What one kernel returns: tensors with heads first, then perhaps the gradient of a mask.

    `guarded` kernels do not survive a rank without anything to do, and return tensors alone.
    """

    num_with_heads: int
    mask_grad: bool = False
    guarded: bool = False

    def choices(self, call: Call) -> Iterator[Choice]:
        """Batch or heads are sharded in all operands and results alike.

        With fewer heads for keys than for queries, only where both divide evenly. A kernel that
        drops entries draws them itself, so not for parts.
        """
        drops = bool(call.argument("dropout_p"))
        if not drops or all(p.is_replicate() for p in call.placed):
            yield call.replicated()
        if drops:
            return
        names = _tensor_names(call)
        query = names.index("query")
        heads = [m.shape[1] for m, n in zip(call.inputs, names, strict=True) if n in _WITH_HEADS]
        for dim in (0, 1):
            grouped = dim == 1 and not all(equal(h, heads[0]) for h in heads)
            if grouped and any(type(h) is not int or h % call.axis_size for h in heads):
                continue
            for sizes in call.splits([(query, dim)]):
                if not grouped or sizes is None:
                    yield from self._cut(call, names, query, dim, sizes, grouped)

    def _cut(
        self,
        call: Call,
        names: Sequence[str],
        query: int,
        dim: int,
        sizes: tuple[int, ...] | None,
        grouped: bool,
    ) -> Iterator[Choice]:
        cut, whole = Shard(dim, sizes), call.inputs[query].shape[dim]
        masks = [
            _mask_placement(meta.shape, dim, whole, sizes) if name in _MASKS else None
            for meta, name in zip(call.inputs, names, strict=True)
        ]
        inputs = tuple(
            mask or (cut if name in _WITH_HEADS else REPLICATE)
            for name, mask in zip(names, masks, strict=True)
        )
        outputs: list[Placement] = [cut] * min(self.num_with_heads, len(call.outputs))
        if self.mask_grad and len(call.outputs) > len(outputs):
            mask = next((m for m in masks if m is not None), REPLICATE)
            outputs.append(mask if mask.is_shard() else SUM)
        outputs += [REPLICATE] * (len(call.outputs) - len(outputs))
        choice = Choice(inputs, tuple(outputs))
        if sizes is None:
            yield replace(
                choice, even=tuple((i, dim) for i, n in enumerate(names) if n in _WITH_HEADS)
            )
        if grouped:
            return
        if self.guarded:
            yield replace(choice, local=LocalCall(UnlessEmpty(call.op), per_rank=True))
        elif type(whole) is int and all(lengths(whole, call.axis_size, sizes)):
            yield replace(choice, alone=((query, dim),))


def _tensor_names(call: Call) -> list[str]:
    """The name of each tensor argument, in order."""
    named = []
    for position, argument in enumerate(call.op._schema.arguments):
        value = call.args[position] if position < len(call.args) else None
        if isinstance(value, (Layout, torch.Tensor)):
            named.append(argument.name)
    return named


def _mask_placement(
    shape: tuple[int, ...], dim: int, whole: int, sizes: tuple[int, ...] | None
) -> Placement:
    """A mask has up to four dims, from the last; it is stretched where its size is 1."""
    at = dim - (4 - len(shape))
    if at < 0 or (equal(shape[at], 1) and not equal(whole, 1)):
        return REPLICATE
    return Shard(at, sizes)


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


def _rule(*ops: Any, kernel: Attention) -> tuple[tuple[Any, ...], Rule]:
    return ops, Rule(
        kernel.choices, "b h [s] [d], b h [t] [d], b h [t] [d] -> b h [s] [d], b h [s]"
    )


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
