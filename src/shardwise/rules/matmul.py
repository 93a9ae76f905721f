"""Matrix products, and the linear layer with its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table
from shardwise.rules.twins import functional_twin

aten = torch.ops.aten


def conjugate(x: Any) -> Any:
    """Computed: inside an op nobody looks at the bit that would put it off."""
    return torch.conj_physical(x) if x.is_complex() else x


def linear_input_grad(grad: Any, weight: Any) -> Any:
    """The gradient of `linear(x, weight)` for `x`."""
    return grad @ (conjugate(weight) if weight.is_complex() else weight)


def linear_weight_grad(grad: Any, x: Any) -> Any:
    """The gradient of `linear(x, weight)` for `weight`."""
    matrix = _as_matrix(x)
    return torch.mm(_as_matrix(grad).t(), conjugate(matrix) if x.is_complex() else matrix)


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


@dataclass(frozen=True, slots=True)
class AddedInFull:
    """The op, with what is added in the shape of this rank's result."""

    op: Any

    def __call__(
        self, coordinate: Any, layouts: Sequence[Any], added: Any, *rest: Any, **named: Any
    ) -> Any:
        return self.op(added.expand(layouts[-1].local_shape(coordinate)), *rest, **named)


def adding(*ops: Any, product: str, guarded: bool = False) -> tuple[tuple[Any, ...], Rule]:
    """An entry of a table: a product to which the first operand is added, broadcast.

    A `guarded` op would give a product of empty parts the shape of what is added.
    """
    result = product.partition("->")[2].split()
    # By the number of dims that the added tensor has.
    patterns = {
        n: parse(f"{' '.join(result[len(result) - n :])}, {product}")
        for n in range(len(result) + 1)
    }

    def choices(call: Call) -> Iterator[Choice]:
        pattern = patterns[call.inputs[0].ndim]
        op = functional_twin(call.op) or call.op
        local = LocalCall(AddedInFull(op), per_rank=True) if guarded else None
        for choice in pattern_choices(pattern, call, linear=((0, 1), (0, 2)), added=(0,)):
            yield replace(choice, local=local)

    return ops, Rule(choices, f"{' '.join(result)}, {product}")


_LINEAR, _LINEAR_OF_VECTOR = parse("... k, n k, ... n -> ... n"), parse("... k, k, ... -> ...")


def linear_layer_choices(call: Call) -> Iterator[Choice]:
    """A linear layer; with a vector in place of the weight, one number of each row."""
    pattern = _LINEAR if call.inputs[1].ndim > 1 else _LINEAR_OF_VECTOR
    yield from pattern_choices(pattern, call, linear=((0, 2), (1, 2)), added=(2,))


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
    adding(aten.addmm.default, product="m k, k n -> m n"),
    adding(aten.baddbmm.default, product="b m k, b k n -> b m n"),
    adding(aten.addbmm.default, product="b m k, b k n -> m n"),
    adding(aten.addmv.default, product="m k, k -> m", guarded=True),
    adding(aten.addr.default, product="m, n -> m n"),
    ((aten._trilinear.default,), Rule(trilinear_choices, "a k, k l n, b l -> a b n")),
    rule(aten.bmm.default, like="b m k, b k n -> b m n", linear=EACH),
    rule(matmul_left_grad, like="... m n, ... k n -> ... m k", linear=EACH),
    rule(matmul_right_grad, like="... m k, ... m n -> ... k n", linear=EACH),
    rule(aten.dot.default, aten.vdot.default, like="k, k -> ", linear=EACH),
    rule(aten.mv.default, like="m k, k -> m", linear=EACH),
    ((aten.linear.default,), Rule(linear_layer_choices, "... k, n k, n -> ... n")),
    rule(linear_input_grad, like="... n, n k -> ... k", linear=EACH),
    rule(linear_bias_grad, like="... n -> n", linear=((0,),)),
    rule(linear_weight_grad, like="... n, ... k -> n k", linear=EACH),
)
