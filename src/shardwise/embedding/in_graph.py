"""A collection as torch.compile reads it: Python that it goes through, up to one op.

See Note [Collections in compiled code] in `embedding.traced`. Nothing here looks at a value, and
a bad batch is no error here: other ranks may be waiting for this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.sources import source_digest
from shardwise.embedding.jagged import Jagged
from shardwise.errors import ArgumentError, UnsupportedError


def jagged_in_graph(batch: Any) -> Jagged:
    """`Jagged.of`; what is no batch is no error yet, since other ranks may be waiting."""
    try:
        return Jagged.of(batch)
    except ArgumentError as error:
        nothing = torch.empty(0, dtype=torch.int64)
        jagged = Jagged((), nothing, lengths=nothing)
        jagged.problem = str(error)
        return jagged


def num_bags_in_graph(
    batch: Jagged, features: Sequence[str], *, equal: bool = False
) -> Sequence[int]:
    """How many bags each of `features` has; all have as many as the others where they must."""
    if batch.problem is not None:
        return [0] * len(features)
    if equal or batch.sizes is None:
        return [batch.lengths.shape[0] // max(1, len(batch.features))] * len(features)
    if not batch.sizes:
        raise UnsupportedError(
            "batch_sizes in compiled code: a graph has to know how many bags each feature has, and "
            "these are a tensor that was made inside it, or differ between ranks. Give a list."
        )
    sizes = dict(zip(batch.features, batch.sizes, strict=False))
    return [sizes.get(feature, 0) for feature in features]


def lengths_in_graph(batch: Jagged, features: Sequence[str]) -> list[torch.Tensor]:
    """The lengths of each feature's bags."""
    found, start = {}, 0
    for feature, num in zip(batch.features, num_bags_in_graph(batch, batch.features), strict=True):
        found[feature] = batch.lengths[start : start + num]
        start += num
    return [found.get(feature, batch.lengths[:0]) for feature in features]


def look_up_in_graph(
    handle: torch.Tensor, form: str, batch: Jagged, sizes: Sequence[int]
) -> list[torch.Tensor]:
    """The results of a collection, of `sizes` rows, as torch.compile reads it."""
    values, lengths = batch.values_in_graph(), batch.lengths
    if batch.problem is not None:  # they may be anything
        values = lengths = torch.empty(0, dtype=torch.int64)
    return torch.ops.shardwise.collection(
        handle,
        form,
        _code(),
        batch.features,
        batch.problem,
        sizes,
        values,
        lengths,
        batch.first,
        batch.weights_in_graph(),
        batch.batch_sizes,
    )


def _code() -> str:
    """Which version of this package compiled code is of."""
    return source_digest()


_code._dynamo_marked_constant = True  # type: ignore[attr-defined]
