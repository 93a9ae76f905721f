"""Padding that repeats or mirrors values: the padded dims, the last ones, must be whole."""

from __future__ import annotations

import torch

from shardwise.rules.batched import batched
from shardwise.rules.rule import Table, table

aten = torch.ops.aten

_FORWARD = {
    1: (aten.reflection_pad1d.default, aten.replication_pad1d.default),
    2: (aten.reflection_pad2d.default, aten.replication_pad2d.default),
    3: (aten.reflection_pad3d.default, aten.replication_pad3d.default),
}
_BACKWARD = {
    1: (aten.reflection_pad1d_backward.default, aten.replication_pad1d_backward.default),
    2: (aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default),
    3: (aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default),
}

RULES: Table = table(
    *(
        batched(*ops, inputs=(n,), outputs=(n,), linear=((0,),), fails_on_empty=True)
        for n, ops in _FORWARD.items()
    ),
    *(
        batched(*ops, inputs=(n, n), outputs=(n,), linear=((0,),), fails_on_empty=True)
        for n, ops in _BACKWARD.items()
    ),
)
