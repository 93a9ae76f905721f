"""Ops that make a tensor out of nothing and are given one to write to: `torch.rand(3, 2, out=y)`.

Each is an op in place on `y`, so the parts are written where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

Writer = Callable[[Any, Sequence[Any], Any], Any]


def _uniform(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.uniform_(generator=generator)


def _normal(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.normal_(*args[:-1], generator=generator)


def _integers(out: Any, args: Sequence[Any], generator: Any) -> Any:
    low, high = (0, args[0]) if len(args) == 2 else args[:2]
    return out.random_(low, high, generator=generator)


def _identity(out: Any, args: Sequence[Any], generator: Any) -> Any:
    return out.fill_(1).tril_().triu_()


_WRITERS: dict[Any, Writer] = {
    aten.rand.out: _uniform,
    aten.rand.generator_out: _uniform,
    aten.randn.out: _normal,
    aten.randn.generator_out: _normal,
    aten.normal.float_float_out: _normal,
    aten.randint.out: _integers,
    aten.randint.generator_out: _integers,
    aten.randint.low_out: _integers,
    aten.randint.low_generator_out: _integers,
    aten.eye.out: _identity,
    aten.eye.m_out: _identity,
    aten.zeros.out: lambda out, args, _: out.zero_(),
    aten.ones.out: lambda out, args, _: out.fill_(1),
    aten.full.out: lambda out, args, _: out.fill_(args[1]),
}


def writer_of(op: Any) -> Writer | None:
    """What writes the values of `op` to a tensor of the right shape, from its arguments."""
    return _WRITERS.get(op)
