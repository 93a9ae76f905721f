"""Calls of products: matmul in all its shapes, contractions, and products that are added to."""

import torch

from shardwise.ops.math.einsum import contract, product
from shardwise.testing import Sample

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(4)


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def grouped_samples() -> list[Sample]:
    """Two matrices are multiplied in backward of the first, the gradient of its stack."""
    grouped, ends = aten._grouped_mm.default, torch.tensor([4, 4, 16], dtype=torch.int32)
    return [
        Sample(grouped, (t(16, 24), t(3, 24, 24), ends)),
        Sample(grouped, (t(6, 24, 24), t(6, 24, 24))),
        Sample(grouped, (t(3, 24, 24), t(24, 16), ends)),
    ]


def product_samples() -> list[Sample]:
    matmul = aten.matmul.default
    return [
        *grouped_samples(),
        Sample(matmul, (t(5), t(5))),
        Sample(matmul, (t(3, 5), t(5))),
        Sample(matmul, (t(5), t(5, 4))),
        Sample(matmul, (t(5), t(3, 5, 4))),
        Sample(matmul, (t(3, 5), t(5, 4))),
        Sample(matmul, (t(2, 3, 5), t(5, 4))),
        Sample(matmul, (t(2, 3, 5), t(5))),
        Sample(matmul, (t(3, 5), t(2, 5, 4))),
        Sample(matmul, (t(2, 1, 3, 5), t(6, 5, 4))),
        Sample(product, (t(2, 3, 5), t(5, 4))),
        Sample(product, (t(3, 5), t(2, 5, 4))),
        Sample(contract, ("abk,kn->abn", t(2, 3, 5), t(5, 4))),
        Sample(contract, ("ab,ac,ad->bcd", t(3, 2), t(3, 4), t(3, 5))),
        Sample(contract, ("ab->b", t(3, 2))),
        Sample(aten.baddbmm.default, (t(4, 3, 2), t(4, 3, 5), t(4, 5, 2)), {"beta": 0.5}),
        Sample(aten.baddbmm.default, (t(3, 2), t(4, 3, 5), t(4, 5, 2))),
        Sample(aten.baddbmm.default, (t(4, 1, 2), t(4, 3, 5), t(4, 5, 2))),
        Sample(aten.addbmm.default, (t(3, 2), t(4, 3, 5), t(4, 5, 2)), {"alpha": 2.0}),
        Sample(aten.addmv.default, (t(3), t(3, 5), t(5))),
        Sample(aten.addmv.default, (t(1), t(3, 5), t(5))),
        Sample(aten.addr.default, (t(3, 5), t(3), t(5))),
        Sample(aten.vdot.default, (t(5), t(5))),
    ]
