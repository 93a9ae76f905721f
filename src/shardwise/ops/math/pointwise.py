"""Elementwise ops, with a list of those that pass a Partial on; `zeros_like` and so on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise._torch.dispatch import decompositions
from shardwise.core.placements import REPLICATE, Placement
from shardwise.core.sizes import equal_shapes
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.local_call import DIVISIONS
from shardwise.dispatch.rule import (
    Call,
    Choice,
    Group,
    LocalCall,
    Rule,
    Table,
    parse,
    pattern_choices,
    sharded_together,
    table,
)
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import run
from shardwise.errors import UnsupportedError

aten = torch.ops.aten

#: Linear in the first operand, in both together, in each alone; see dispatch.rule.
FIRST: Sequence[Group] = ((0,),)
TOGETHER: Sequence[Group] = ((0, 1),)
EACH: Sequence[Group] = ((0,), (1,))


def elementwise(linear: Sequence[Group] = ()) -> Rule:
    """A rule for any number of tensors that are broadcast together."""

    def choices(call: Call) -> Iterator[Choice]:
        operands = ", ".join(["..."] * len(call.inputs))
        results = ", ".join(["..."] * len(call.outputs))
        pattern = parse(f"{operands} -> {results}")
        # With a number in place of the second tensor, `x + 1` is not linear but `x * 2` is.
        here = [group for group in linear if max(group) < len(call.inputs)]
        yield from pattern_choices(pattern, call, here, reduce_op=None)

    return Rule(choices, "..., ... -> ...")


def pointwise_rule(op: Any) -> Rule | None:
    """The rule of an op that torch marks as elementwise, unless it draws random numbers."""
    if getattr(op, "namespace", "") == "prims":
        # Torch does not tag prims; the aten op of the same name has the tag.
        op = _twin(op)
    tags = op.tags
    if torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags:
        return elementwise()
    return None


def _twin(prim: Any) -> Any:
    packet = getattr(aten, prim._schema.name.partition("::")[2], None)
    names = [] if packet is None else packet.overloads()
    return next((getattr(packet, n) for n in names if n in ("Tensor", "default")), prim)


# -- sgn, above autograd: torch's gradient formula for real numbers makes plain zeros --------


class Sgn(SkipsNone):
    """`sgn`: of complex numbers, magnitude 1, same direction; zero for zero.

    It saves what torch saves, so that a write to either raises in backward.
    """

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        out = run(aten.sgn.default, x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, _ = ctx.saved_tensors
        if not x.is_complex():
            return torch.zeros_like(grad)
        unit, size = torch.sgn(x), x.abs()
        zero = size == 0
        along = unit * (grad * unit.conj()).real  # changes the magnitude, not the direction
        return ((grad - along) / size.masked_fill(zero, 1)).masked_fill(zero, 0)


_apply_sgn = direct_apply(Sgn)


def sgn(x: Any) -> Any:
    if torch.is_grad_enabled() and x.requires_grad:
        return _apply_sgn(x)
    return run(aten.sgn.default, x)


def sgn_(x: Any) -> Any:
    return x.copy_(sgn(x.clone())) if x.is_complex() else x.sign_()


def log_sigmoid(x: Any) -> tuple[Any, Any]:
    """Torch's decomposition, row-major on the CPU as its kernel's result."""
    result, buffer = decompositions()[aten.log_sigmoid_forward.default](x)
    return (result.contiguous() if x.is_cpu else result), buffer


def log_sigmoid_backward(grad: Any, x: Any, buffer: Any) -> Any:
    """On the CPU from what forward saved, like the kernel.

    The decomposition of torch 2.11 reads `x` again, which may have been overwritten by `x.data`."""
    if not x.is_cpu:
        return decompositions()[aten.log_sigmoid_backward.default](grad, x, buffer)
    exact = torch.float32 if grad.dtype.itemsize == 2 else grad.dtype
    negative, small = (x < 0).to(exact), buffer.to(exact)
    share = small / (1 + small)
    return (grad.to(exact) * (negative + (1 - 2 * negative) * share)).to(grad.dtype)


def zeros_for_tangent(x: Any, other: Any, *, self_num_batch_dims: int = 0) -> Any:
    """Where a tangent `x` has other strides than the tensor `other`, torch copies it into these."""
    if x._layout.expanded:  # as torch.func.linearize makes it, whose graph would hold no copy
        raise UnsupportedError(
            "aten._new_zeros_with_same_feature_meta does not have a sharding strategy registered "
            f"for a tangent whose entries share memory: {x._layout!r}. Call contiguous() on it; "
            "for torch.func.linearize, use torch.func.jvp."
        )
    shape, stride, step = [*other.shape], [*other.stride()], other.numel()
    for size in reversed(x.shape[:self_num_batch_dims]):
        shape, stride, step = [size, *shape], [step, *stride], step * size
    return x.new_empty_strided(shape, stride).zero_()


#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = dict.fromkeys(DIVISIONS, slice(-1, None))

KERNELS: tuple[tuple[str, Any], ...] = (("sgn", sgn), ("sgn_", sgn_))

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten._new_zeros_with_same_feature_meta.default: zeros_for_tangent,
}


# -- new tensors like another one ----------------------------------------------------------------


def like_choices(call: Call) -> Iterator[Choice]:
    """The values of the input do not matter, so any placement will do."""
    yield call.replicated()
    model: Placement = call.placed[0] if call.placed else REPLICATE
    if model.is_partial():
        yield Choice((model,), (REPLICATE,))
    if equal_shapes(call.inputs[0].shape, call.outputs[0].shape):
        for dim in range(call.inputs[0].ndim):
            yield from sharded_together(call, (dim,), (dim,))
    elif model.is_shard():
        yield Choice((model,), (REPLICATE,))


def new_strided(
    coordinate: Any, layouts: Sequence[Any], x: torch.Tensor, *_: Any, **options: Any
) -> torch.Tensor:
    """A new shard, dense, with the memory order of the global tensor."""
    shape, order = layouts[-1].local_shape(coordinate), layouts[-1].memory_order
    if order is None:
        return x.new_empty(shape, **options)
    inverse = sorted(range(len(order)), key=lambda i: order[i])
    return x.new_empty([shape[d] for d in order], **options).permute(inverse)


def strided_choices(call: Call) -> Iterator[Choice]:
    for choice in like_choices(call):
        yield replace(choice, local=LocalCall(new_strided, per_rank=True))


RULES: Table = table(
    ((aten.add.Tensor, aten.sub.Tensor), elementwise(TOGETHER)),
    ((aten.mul.Tensor,), elementwise(EACH)),
    (
        (
            aten.div.Tensor,
            aten.mul.Scalar,
            aten.div.Scalar,
            aten.neg.default,
            aten.clone.default,
            aten._to_copy.default,
            aten.positive.default,
            aten.real.default,
            aten.imag.default,
            aten.zero.default,
            aten._conj_physical.default,
        ),
        elementwise(FIRST),
    ),
    ((aten.copy.default, aten.fill.Tensor), elementwise(TOGETHER)),
    ((aten.fill.Scalar,), elementwise()),
    # Not tagged by torch. Its decomposition gives other strides.
    ((aten.complex.default,), elementwise(TOGETHER)),
    ((aten.polar.default,), elementwise(FIRST)),
    # Not tagged by torch.
    ((aten._standard_gamma_grad.default, aten._dirichlet_grad.default), elementwise()),
    # Not tagged by torch. Linear in the incoming gradient.
    ((aten.softshrink_backward.default, aten.hardshrink_backward.default), elementwise(FIRST)),
    ((aten.new_empty_strided.default,), Rule(strided_choices, "any -> ...")),
    (
        (
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.empty_like.default,
            aten.full_like.default,
        ),
        Rule(like_choices, "... -> ..."),
    ),
    (
        (
            aten.new_zeros.default,
            aten.new_ones.default,
            aten.new_empty.default,
            aten.new_full.default,
        ),
        Rule(like_choices, "any -> ...", {"size": 0}),
    ),
)
