"""Fourier transforms: the transformed dims must be whole."""

from __future__ import annotations

import torch

from shardwise.rules.reduce import reduced_dims
from shardwise.rules.rule import Table, table
from shardwise.rules.whole import whole

aten = torch.ops.aten

RULES: Table = table(
    whole(
        aten._fft_r2c.default,
        aten._fft_c2r.default,
        aten._fft_c2c.default,
        dims=reduced_dims,
        linear=True,
        fails_on_empty=True,
    ),
)
