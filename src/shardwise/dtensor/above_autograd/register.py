"""The ops that are handled above autograd; see Note [Above autograd].

Most have an autograd function that knows the layouts of the forward pass when it runs backward.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.untraced import untraced
from shardwise.dtensor.above_autograd import (
    attention,
    bags,
    cells,
    composites,
    einsum,
    embedding,
    linear,
    losses,
    matmul,
    normal,
    norms,
    prod,
    recurrent,
    rrelu,
    sign,
)
from shardwise.dtensor.fallback import kernels_above

_KERNELS: tuple[tuple[str, Any], ...] = (
    *attention.KERNELS,
    *bags.KERNELS,
    *cells.KERNELS,
    *einsum.KERNELS,
    *embedding.KERNELS,
    *linear.KERNELS,
    *losses.KERNELS,
    *matmul.KERNELS,
    *normal.KERNELS,
    *norms.KERNELS,
    *prod.KERNELS,
    *recurrent.KERNELS,
    *rrelu.KERNELS,
    *sign.KERNELS,
)
# Torch forgets the kernels of a library that is gone.
_library = torch.library.Library("aten", "IMPL")
_any_library = torch.library.Library("_", "IMPL")


def register_kernels() -> None:
    """Give torch these kernels for DTensors alone: no other tensor has the dispatch key."""
    for _, kernel in _KERNELS:
        untraced(kernel)
    for name, kernel in (*_KERNELS, *composites.kernels()):
        packet, _, overload = name.partition(".")
        kernels_above[getattr(getattr(torch.ops.aten, packet), overload or "default")] = kernel
        _library.impl(name, kernel, "AutogradPrivateUse3")
    for name, kernel in composites.kernels_with_out():
        _library.impl(name, kernel, "AutogradPrivateUse3")
    # Ops of other libraries know nothing of the key: they go on to the device's autograd.
    _any_library.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse3")
