"""Sums and means over any dims."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.chunks import Size
from shardwise.core.placements import REPLICATE, Partial, Placement, Shard
from shardwise.core.symbols import noted
from shardwise.rules.notation import linear_choices
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


#: With no dims these reduce nothing, where others reduce all.
_OF_NOTHING = frozenset({aten.any.dims, aten.all.dims})


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that the call reduces, from 0; all of them when it names none."""
    ndim = call.inputs[0].ndim
    names = {arg.name for arg in call.op._schema.arguments}
    dims = call.argument("dim") if "dim" in names else None
    if dims == [] and call.op in _OF_NOTHING and call.outputs[0].ndim == ndim:
        return ()
    if dims is None or dims == []:
        return tuple(range(ndim))
    given = [dims] if isinstance(dims, int) else dims
    return tuple(d % ndim for d in given) if ndim else ()


def result_dim(call: Call, dim: int, reduced: tuple[int, ...]) -> int:
    """Where a dim that is not reduced stands in the result."""
    if call.inputs[0].ndim == call.outputs[0].ndim:
        return dim
    return dim - sum(1 for d in reduced if d < dim)


def _choices(call: Call, local: LocalCall | None) -> Iterator[Choice]:
    reduced = reduced_dims(call)
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        for sizes in call.splits([(0, dim)]):
            if dim in reduced:
                yield Choice((Shard(dim, sizes),), (Partial("sum"),), local)
            else:
                out: Placement = Shard(result_dim(call, dim, reduced), sizes)
                yield Choice((Shard(dim, sizes),), (out,))
    yield from linear_choices(call, ((0,),))


def sum_choices(call: Call) -> Iterator[Choice]:
    yield from _choices(call, None)


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """One rank's term of a mean: its sum over the global count, right for uneven shards too."""

    count: Size
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["dtype"] = self.dtype
        summed = aten.sum.dim_IntList(x, *args, **kwargs) if args else aten.sum.default(x, **kwargs)
        (count,) = noted((self.count,))
        return summed / count


def mean_choices(call: Call) -> Iterator[Choice]:
    shape = call.inputs[0].shape
    count = math.prod(shape[d] for d in reduced_dims(call))
    yield from _choices(call, LocalCall(MeanTerm(count, call.outputs[0].dtype)))


def scalar_choices(call: Call) -> Iterator[Choice]:
    """Reading a number: only a whole tensor has one."""
    yield Choice((REPLICATE,) * len(call.inputs), ())


RULES: Table = table(
    ((aten.sum.default, aten.sum.dim_IntList), Rule(sum_choices, "... [reduced] -> ...")),
    ((aten.mean.default, aten.mean.dim), Rule(mean_choices, "... [reduced] -> ...")),
    (
        (
            aten._local_scalar_dense.default,
            aten.equal.default,
            aten.allclose.default,
            aten.is_nonzero.default,
        ),
        Rule(scalar_choices, "replicated -> number"),
    ),
)
