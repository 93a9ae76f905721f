"""`matmul` and `einsum` as one op each, above autograd: see Note [Above autograd].

Torch takes them apart into products of matrices, for which it merges dims; a sharded dim that is
merged from within would have to be gathered. As one op, every dim may be sharded.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import DTensor, run
from shardwise.rules.contract import contract, matmul_letters, product, spelled, split_equation

aten = torch.ops.aten


def _needs_grad(*tensors: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


class Contract(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, equation: str, *operands: Any) -> Any:
        ctx.equation = equation
        ctx.save_for_backward(*operands)
        return run(contract, equation, *operands)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        inputs, output = split_equation(ctx.equation)
        operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        return None, *(
            _operand_grad(number, inputs, output, grad, operands) if wanted else None
            for number, wanted in enumerate(needed)
        )


_apply_contract = direct_apply(Contract)


def contracted(equation: str, *operands: Any) -> Any:
    if _needs_grad(*operands):
        return _apply_contract(equation, *operands)
    return run(contract, equation, *operands)


def _operand_grad(number: int, inputs: list[str], output: str, grad: Any, operands: Any) -> Any:
    """The gradient of one operand: the product of the result's gradient with the others."""
    others = [o for i, o in enumerate(operands) if i != number]
    letters = [s for i, s in enumerate(inputs) if i != number]
    return _spread(inputs[number], operands[number], [output, *letters], [grad, *others])


def _spread(wanted: str, like: Any, letters: list[str], factors: list[Any]) -> Any:
    """The product with the letters of `wanted`; letters that no factor has are spread out."""
    known = "".join(c for c in wanted if any(c in s for s in letters))
    first, *rest = factors
    factors = [first, *(f.conj_physical() if f.is_complex() else f for f in rest)]
    found = contracted(f"{','.join(letters)}->{known}", *factors)
    for place, letter in enumerate(wanted):
        if letter not in known:
            found = found.unsqueeze(place)
    found = found.expand(like.shape) if found.shape != like.shape else found
    return found.real if found.is_complex() and not like.is_complex() else found


def einsum(equation: str, tensors: list[Any], *, path: Any = None) -> Any:
    distributed = all(type(t) is DTensor for t in tensors)
    letters = spelled(equation, [t.shape for t in tensors]) if distributed else None
    if letters is None:
        return aten.einsum.default.decompose(equation, tensors, path=path)
    return contracted(letters, *tensors)


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, left: Any, right: Any) -> Any:
        ctx.save_for_backward(left, right)
        return run(product, left, right)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        left, right = ctx.saved_tensors
        for_left, for_right = ctx.needs_input_grad
        a, b, out = matmul_letters(left.shape, right.shape)
        return (
            _spread(a, left, [out, b], [grad, right]) if for_left else None,
            _spread(b, right, [out, a], [grad, left]) if for_right else None,
        )


_apply_matmul = direct_apply(Matmul)


def matmul(left: Any, right: Any) -> Any:
    """Any shapes; `kernels.matmul` has a shorter way for a batch without broadcasting."""
    if max(left.dim(), right.dim()) <= 2:  # a product of matrices or vectors: nothing is merged
        return aten.matmul.default.decompose(left, right)
    if type(left) is not DTensor or type(right) is not DTensor or not (left.dim() and right.dim()):
        # The ordinary path says which operand is plain, or what is wrong with the shapes.
        return DTensor.__torch_dispatch__(aten.matmul.default, None, (left, right))
    if _needs_grad(left, right):
        return _apply_matmul(left, right)
    return run(product, left, right)


def bilinear(left: Any, right: Any, weight: Any, bias: Any = None) -> Any:
    out = einsum("...i,oij,...j->...o", [left, weight, right])
    return out if bias is None else out + bias


KERNELS = (("einsum", einsum), ("bilinear", bilinear))
