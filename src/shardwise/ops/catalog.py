"""The catalog: every family of ops, and what each of them brings.

A family is a module. `RULES` says how its ops run on shards (see `rules.notation`), `KERNELS` are
called above autograd (see Note [Above autograd]), `DECOMPOSITIONS` take an op apart into others,
and `REFUSED` names the inputs whose values an op may refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.core.untraced import untraced
from shardwise.dtensor import fallback, inference
from shardwise.dtensor.above_autograd import (
    attention as attention_kernels,
)
from shardwise.dtensor.above_autograd import (
    bags as bag_kernels,
)
from shardwise.dtensor.above_autograd import (
    cells,
    composites,
    einsum,
    linear,
    losses,
    normal,
    norms,
    prod,
    rrelu,
    sign,
)
from shardwise.dtensor.above_autograd import (
    embedding as embedding_kernels,
)
from shardwise.dtensor.above_autograd import (
    matmul as matmul_kernels,
)
from shardwise.dtensor.above_autograd import (
    recurrent as recurrent_kernels,
)
from shardwise.rules import (
    attention,
    bag_grads,
    bags,
    catalog,
    channel_norm,
    contract,
    conv,
    create,
    diagonal,
    embedding,
    extremes,
    fft,
    gathered,
    indexing,
    join,
    largest_bags,
    linalg,
    loss,
    margin,
    matmul,
    norm,
    overwrite,
    pad,
    planes,
    pointwise,
    random,
    recurrent,
    reduce,
    refused,
    routed,
    row_sparse,
    search,
    vector_norm,
    views,
    whole,
)
from shardwise.rules.rule import Table, merge

RULES: Table = merge(
    pointwise.RULES,
    matmul.RULES,
    contract.RULES,
    reduce.RULES,
    views.RULES,
    create.RULES,
    join.RULES,
    loss.RULES,
    norm.RULES,
    channel_norm.RULES,
    attention.RULES,
    conv.RULES,
    recurrent.RULES,
    indexing.RULES,
    overwrite.RULES,
    planes.RULES,
    embedding.RULES,
    routed.RULES,
    row_sparse.RULES,
    bags.RULES,
    bag_grads.RULES,
    largest_bags.RULES,
    whole.RULES,
    extremes.RULES,
    vector_norm.RULES,
    random.RULES,
    diagonal.RULES,
    fft.RULES,
    margin.RULES,
    pad.RULES,
    linalg.RULES,
    search.RULES,
    gathered.RULES,
)

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    **inference.DECOMPOSITIONS,
    **losses.DECOMPOSITIONS,
    **norms.DECOMPOSITIONS,
    **views.DECOMPOSITIONS,
}

REFUSED: dict[Any, slice] = {
    **indexing.REFUSED,
    **loss.REFUSED,
    **margin.REFUSED,
    **planes.REFUSED,
    **pointwise.REFUSED,
    **random.REFUSED,
}

KERNELS: tuple[tuple[str, Callable[..., Any]], ...] = (
    *attention_kernels.KERNELS,
    *bag_kernels.KERNELS,
    *cells.KERNELS,
    *einsum.KERNELS,
    *embedding_kernels.KERNELS,
    *linear.KERNELS,
    *losses.KERNELS,
    *matmul_kernels.KERNELS,
    *normal.KERNELS,
    *norms.KERNELS,
    *prod.KERNELS,
    *recurrent_kernels.KERNELS,
    *rrelu.KERNELS,
    *sign.KERNELS,
)

# Torch forgets the kernels of a library that is gone.
_library = torch.library.Library("aten", "IMPL")
_any_library = torch.library.Library("_", "IMPL")


def _register_kernels() -> None:
    """Give torch the kernels for DTensors alone: no other tensor has the dispatch key."""
    for _, kernel in KERNELS:
        untraced(kernel)
    for name, kernel in (*KERNELS, *composites.kernels()):
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        fallback.kernels_above[op] = kernel
        _library.impl(name, kernel, "AutogradPrivateUse3")
    for name, kernel in composites.kernels_with_out():
        _library.impl(name, kernel, "AutogradPrivateUse3")
    # Ops of other libraries know nothing of the key: they go on to the device's autograd.
    _any_library.fallback(torch.library.fallthrough_kernel, "AutogradPrivateUse3")


catalog.CATALOG.update(RULES)
catalog.DEFAULT_RULES.append(pointwise.pointwise_rule)
refused.REFUSED.update(REFUSED)
fallback.DECOMPOSITIONS.update(DECOMPOSITIONS)
_register_kernels()
