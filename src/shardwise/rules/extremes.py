"""Maxima, minima, products, any and all: a sharded dim leaves each rank a term of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.placements import Partial, Placement, Shard
from shardwise.rules.reduce import reduced_dims, result_dim
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class ExtremeOfPart:
    """The op on a rank's part; where that is empty, what is no larger or smaller than anything."""

    op: Any
    terms: tuple[str, ...]

    def __call__(self, coordinate: Any, layouts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if x.numel():
            return self.op(*args, **kwargs)
        made = [
            x.new_full(layout.local_shape(coordinate), _limit(layout.dtype, term))
            for layout, term in zip(layouts[1:], self.terms, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)


def _limit(dtype: torch.dtype, term: str) -> float:
    """The largest value for a minimum, the smallest for a maximum."""
    if dtype is torch.bool:
        return term == "min"
    if dtype.is_floating_point:
        return float("inf") if term == "min" else float("-inf")
    bounds = torch.iinfo(dtype)
    return bounds.max if term == "min" else bounds.min


def _reduction(*ops: Any, terms: tuple[str, ...], of_part: bool = False) -> Any:
    """An entry of a table: `terms` says how parts of each result become the whole.

    With `of_part`, the op itself fails on a part without elements.
    """

    def choices(call: Call) -> Iterator[Choice]:
        reduced = reduced_dims(call)
        local = LocalCall(ExtremeOfPart(call.op, terms), per_rank=True) if of_part else None
        outputs: tuple[Placement, ...] = tuple(map(Partial, terms))
        yield call.replicated()
        sizes_reduced = [call.inputs[0].shape[dim] for dim in reduced]
        if any(type(size) is int and size == 0 for size in sizes_reduced):
            return  # there is no extreme of nothing, as torch will say
        for dim in range(call.inputs[0].ndim):
            for sizes in call.splits([(0, dim)]):
                shard = Shard(dim, sizes)
                if dim in reduced:
                    # No backend reduces complex numbers so.
                    if not call.inputs[0].dtype.is_complex:
                        yield Choice((shard,), outputs, local)
                else:
                    out = Shard(result_dim(call, dim, reduced), sizes)
                    yield Choice((shard,), (out,) * len(terms), local)
        if len(terms) == 1 and call.inputs[0].dtype == call.outputs[0].dtype:
            yield Choice(outputs, outputs, local)

    return ops, Rule(choices, "... [reduced] -> ...")


RULES: Table = table(
    _reduction(aten.amax.default, aten.max.default, terms=("max",), of_part=True),
    _reduction(aten.amin.default, aten.min.default, terms=("min",), of_part=True),
    _reduction(aten.aminmax.default, terms=("min", "max"), of_part=True),
    _reduction(aten.prod.default, aten.prod.dim_int, terms=("product",)),
    _reduction(aten.any.default, aten.any.dim, aten.any.dims, terms=("max",)),
    _reduction(aten.all.default, aten.all.dim, aten.all.dims, terms=("min",)),
)
