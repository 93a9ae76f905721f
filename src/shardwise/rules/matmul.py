"""Matrix products, and the linear layer with its gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardwise.rules.notation import (
    Dims,
    linear_choices,
    parse,
    pattern_choices,
    rule,
    sharded_choices,
)
from shardwise.rules.rule import Call, Choice, Rule, Table, table

aten = torch.ops.aten


def linear_input_grad(grad: Any, weight: Any) -> Any:
    """The gradient of `linear(x, weight)` for `x`."""
    return grad @ weight


def linear_weight_grad(grad: Any, x: Any) -> Any:
    """The gradient of `linear(x, weight)` for `weight`."""
    return torch.mm(_as_matrix(grad).t(), _as_matrix(x))


def linear_bias_grad(grad: Any) -> Any:
    """The gradient of `linear(x, weight, bias)` for `bias`."""
    return _as_matrix(grad).sum(0)


def matmul_left_grad(grad: Any, right: Any) -> Any:
    """The gradient of `left @ right` for `left`, of the same batch dims."""
    return grad @ right.mT


def matmul_right_grad(left: Any, grad: Any) -> Any:
    """The gradient of `left @ right` for `right`, of the same batch dims."""
    return left.mT @ grad


def _as_matrix(x: Any) -> Any:
    # Not reshape(-1, n): of an empty shard that would be ambiguous.
    if x.dim() == 2:
        return x
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


EACH = ((0,), (1,))

#: By the number of dims of the tensor that addmm adds to the product.
_ADDMM = {n: parse(f"{added}, m k, k n -> m n") for n, added in enumerate(("", "n", "m n"))}


_ADDBMM = {n: parse(f"{added}, b m k, b k n -> m n") for n, added in enumerate(("", "n", "m n"))}


def addbmm_choices(call: Call) -> Iterator[Choice]:
    pattern = _ADDBMM[call.inputs[0].ndim]
    yield from pattern_choices(pattern, call, linear=((0, 1), (0, 2)), added=(0,))


def addmm_choices(call: Call) -> Iterator[Choice]:
    pattern = _ADDMM[call.inputs[0].ndim]
    yield from pattern_choices(pattern, call, linear=((0, 1), (0, 2)), added=(0,))


def trilinear_choices(call: Call) -> Iterator[Choice]:
    """A product of three tensors, each stretched along some dims, summed over others."""
    stretched = [call.argument(f"expand{i}") for i in (1, 2, 3)]
    summed = call.argument("sumdim")
    letters = [f"d{d}" for d in range(call.inputs[0].ndim + len(stretched[0]))]
    dims = Dims(
        tuple(
            tuple(letter for d, letter in enumerate(letters) if d not in without)
            for without in stretched
        ),
        (tuple(letter for d, letter in enumerate(letters) if d not in summed),),
    )
    yield call.replicated()
    yield from sharded_choices(call, dims, frozenset(), (), "sum")
    yield from linear_choices(call, ((0,), (1,), (2,)))


RULES: Table = table(
    rule(aten.mm.default, like="m k, k n -> m n", linear=EACH),
    ((aten.addmm.default,), Rule(addmm_choices, "m n, m k, k n -> m n")),
    ((aten._trilinear.default,), Rule(trilinear_choices, "a k, k l n, b l -> a b n")),
    ((aten.addbmm.default,), Rule(addbmm_choices, "m n, b m k, b k n -> m n")),
    rule(aten.bmm.default, like="b m k, b k n -> b m n", linear=EACH),
    rule(aten.matmul.default, like="... m k, ... k n -> ... m n", linear=EACH),
    rule(matmul_left_grad, like="... m n, ... k n -> ... m k", linear=EACH),
    rule(matmul_right_grad, like="... m k, ... m n -> ... k n", linear=EACH),
    rule(aten.dot.default, like="k, k -> ", linear=EACH),
    rule(aten.mv.default, like="m k, k -> m", linear=EACH),
    rule(
        aten.linear.default,
        like="... k, n k, n -> ... n",
        linear=((0, 2), (1, 2)),
        added=(2,),
    ),
    rule(linear_input_grad, like="... n, n k -> ... k", linear=EACH),
    rule(linear_bias_grad, like="... n -> n", linear=((0,),)),
    rule(linear_weight_grad, like="... n, ... k -> n k", linear=EACH),
)
