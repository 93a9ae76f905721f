"""Norms of vectors: shards have norms of their own, and the norm of those is the norm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.placements import NormPartial, Partial, Placement, Shard
from shardwise.rules.reduce import reduced_dims, result_dim
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class LargestTerm:
    """The largest magnitude of a rank's part: zero where the rank has nothing."""

    def __call__(
        self,
        x: torch.Tensor,
        ord: float = math.inf,
        dim: Any = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        if x.numel():
            return aten.linalg_vector_norm.default(x, ord, dim, keepdim, dtype=dtype)
        # No norm, but a sum of nothing is defined, and has the shape and dtype.
        return aten.linalg_vector_norm.default(x, 1, dim, keepdim, dtype=dtype)


def vector_norm_choices(call: Call) -> Iterator[Choice]:
    """A dim that is not reduced may be sharded; so may one that is, for positive orders and 0.

    Other orders have no norm of nothing, which a rank may hold.
    """
    order, reduced = float(call.argument("ord")), reduced_dims(call)
    yield call.replicated()
    terms: list[Placement] = []
    if order > 0:
        terms.append(NormPartial(norm_type=order))
    if order in (0, 1):
        terms.append(Partial("sum"))
    local = LocalCall(LargestTerm()) if order == math.inf else None
    for dim in range(call.inputs[0].ndim):
        for sizes in call.splits([(0, dim)]):
            shard = Shard(dim, sizes)
            if dim not in reduced:
                yield Choice((shard,), (Shard(result_dim(call, dim, reduced), sizes),), local)
            else:
                yield from (Choice((shard,), (term,), local) for term in terms)
    for term in terms:
        if isinstance(term, NormPartial) and term in call.placed:
            yield Choice((term,), (term,), local)


RULES: Table = table(
    (
        (aten.linalg_vector_norm.default,),
        Rule(vector_norm_choices, "... [reduced] -> ...", by_value=True),
    ),
)
