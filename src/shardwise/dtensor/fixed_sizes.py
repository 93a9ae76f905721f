"""Sizes that backward reads as numbers, fixed in forward where a compiler has symbols for them.

Torch's formulas for the gradients of a few ops loop over a dim, or make a tensor of sizes that are
no symbols. A compiled graph is for that one size then, on one device too. It has to be known before
the op runs: of a size that becomes a number in backward alone, torch loses the place in the outputs
of forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

#: By op, the sizes that its gradient reads.
_READ_BY_BACKWARD: dict[Any, Callable[[Sequence[Any]], Sequence[Any]]] = {
    aten.cumprod.default: lambda args: args[0].shape[args[1] :][:1],
    aten.fractional_max_pool2d.default: lambda args: args[0].shape,
    aten.linalg_householder_product.default: lambda args: (*args[0].shape[-2:], args[1].shape[-1]),
    aten.ormqr.default: lambda args: (*args[0].shape[-2:], args[1].shape[-1]),
    aten.sgn.default: lambda args: args[0].shape,
}


def fix_sizes(op: Any, args: Sequence[Any]) -> None:
    """Make numbers of the sizes that the gradient of this call would read, if it has one.

    Backward calls some of these ops too, as that of `abs` does, and has no gradient then.
    """
    if op not in _READ_BY_BACKWARD or not torch.is_grad_enabled():
        return
    if not any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
        return
    for size in _READ_BY_BACKWARD[op](args):
        int(size)
