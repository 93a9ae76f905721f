"""Lookups in a table, rows that are scaled down to a maximal norm, and rows of a sparse gradient.

Rows may be sharded: a rank then looks up the ids that it owns and returns zeros for the others,
so that the ranks' results add up. Columns may be sharded: the result is sharded alike. The ids may
be sharded along any dim if the table is whole; where both are sharded, see `embedding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardwise._torch.functions import check_size
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.core.placements import REPLICATE, MaskPartial, Shard
from shardwise.dispatch.rule import Call, Choice, LocalCall, Rule, Table, linear_choices, table
from shardwise.lookup.ids import check_ids, has_values, local_rows, owned
from shardwise.simulation.ranks import each_rank

# -- selected rows of a gradient: their count is data-dependent -------------------------------
#
# Eager code indexes. In a traced graph the selection is one op whose output has an unbacked length.
# The op takes the gradient too, so that it is part of the backward graph and no length is saved.
_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "picked_rows(Tensor? keep, Tensor rows, Tensor values, bool by_freq) -> (Tensor, Tensor)"
)


def picked_rows(
    keep: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows and values where `keep` is true, as one op of a traced graph.

    With `by_freq` a row's values are divided by how often it occurs.
    """
    if keep is None and not by_freq:
        return rows, values
    return torch.ops.shardwise.picked_rows(keep, rows, values, by_freq)


def times(rows: torch.Tensor) -> torch.Tensor:
    """For each entry of `rows`, how often its row occurs."""
    _, inverse, counts = torch.unique(rows, return_inverse=True, return_counts=True)
    return counts[inverse]


def _pick(
    keep: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    if keep is None:
        rows = rows.clone()  # an op must not return its input
    else:
        places = keep.nonzero().squeeze(1)
        rows, values = rows.index_select(0, places), values.index_select(0, places)
    return rows, values / times(rows).unsqueeze(-1) if by_freq else values


def _picked_shapes(
    keep: torch.Tensor | None, rows: torch.Tensor, values: torch.Tensor, by_freq: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    num = rows.shape[0] if keep is None else unknown_length(rows)
    return rows.new_empty(num), values.new_empty((num, values.shape[1]))


def unknown_length(traced: Any) -> Any:
    """An unbacked length, which is known when the graph runs.

    Torch offers these to fake implementations only with a compiler setting for data-dependent
    sizes. That is for sizes that a program computes with; nothing is computed with these.
    """
    shape_env = traced.fake_mode.shape_env
    length = shape_env.create_unbacked_symint()
    check_size(length >= 0)
    return length


_library.impl("picked_rows", _pick, "CompositeExplicitAutograd")
torch.library.register_fake("shardwise::picked_rows", _picked_shapes, lib=_library)

aten = torch.ops.aten
#: From this many ids on, selecting the owned ones is faster than reading a row for each.
_MANY_IDS = 1024


# -- the lookup ------------------------------------------------------------------------------


def lookup(
    layouts: Sequence[Layout], weight: torch.Tensor, ids: torch.Tensor, *_: Any
) -> torch.Tensor:
    """The rows that this rank owns, and zeros for those of others."""
    table = layouts[0]
    check_ids(ids, layouts[1], table.shape[0])
    row_axes = table.axes_of(0)

    def here(coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if row_axes:
            return owned_lookup(table, coordinate, weight, ids)
        return torch.embedding(weight, ids)

    return each_rank(table.grid, here, weight, ids, axes=row_axes)


def owned_lookup(
    table: Layout, coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    if weight.shape[0] == 0:
        return weight.new_zeros((*ids.shape, weight.shape[1]))
    if type(ids) is torch.Tensor and ids.is_cpu and ids.numel() >= _MANY_IDS:
        rows, places = owned(table, coordinate, ids.reshape(-1))
        assert places is not None, "rows of this table are sharded"
        found = weight.new_zeros((*ids.shape, weight.shape[1]))
        found.view(-1, weight.shape[1]).index_copy_(0, places, weight.index_select(0, rows))
        return found
    row, foreign = local_rows(table, coordinate, ids)
    return torch.embedding(weight, row).masked_fill_(foreign.unsqueeze(-1), 0)


LOOKUP = LocalCall(lookup, collective=True)


def lookup_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table and the ids."""
    return (choice for choice in _lookup_choices(call) if table_stays(call, choice))


def table_stays(call: Call, choice: Choice) -> bool:
    """Whether a sharded table is not moved; ids may be."""
    return not call.placed or not call.placed[0].is_shard() or choice.inputs[0] == call.placed[0]


def _lookup_choices(call: Call) -> Iterator[Choice]:
    last = call.inputs[1].ndim
    yield call.replicated()
    masked = mask_partial(call)
    for sizes in call.splits([(0, 0)]):
        yield Choice((Shard(0, sizes), REPLICATE), (masked,), LOOKUP)
    for sizes in call.splits([(0, 1)]):
        yield Choice((Shard(1, sizes), REPLICATE), (Shard(last, sizes),))
    for dim in range(last):
        for sizes in call.splits([(1, dim)]):
            yield Choice((REPLICATE, Shard(dim, sizes)), (Shard(dim, sizes),), LOOKUP)
    yield from linear_choices(call, ((0,),))


def mask_partial(call: Call) -> MaskPartial:
    weight = call.inputs[0]
    known = all(type(s) is int for s in weight.shape)
    return MaskPartial(logical_shape=tuple(weight.shape) if known else (), logical_dim=0)


# -- rows of a maximal norm ------------------------------------------------------------------


def renorm(
    layouts: Sequence[Layout],
    weight: torch.Tensor,
    ids: torch.Tensor,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """Scale down the rows of the ids that this rank owns, in place."""
    table = layouts[0]
    check_ids(ids, layouts[1], table.shape[0])
    known = has_values(ids)

    def here(coordinate: Coordinate, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not weight.shape[0]:
            return weight
        if known:
            rows = owned(table, coordinate, ids.reshape(-1))[0]
            return torch.embedding_renorm_(weight, rows, max_norm, norm_type)
        return _masked_renorm(table, coordinate, weight, ids.reshape(-1), max_norm, norm_type)

    with torch.no_grad():
        each_rank(table.grid, here, weight, ids, axes=table.axes_of(0))
    return weight


def _masked_renorm(
    table: Layout,
    coordinate: Coordinate,
    weight: torch.Tensor,
    ids: torch.Tensor,
    max_norm: float,
    norm_type: float,
) -> torch.Tensor:
    """As torch's op on the owned rows, without data-dependent sizes."""
    rows, foreign = local_rows(table, coordinate, ids)
    norms = weight[rows].norm(norm_type, -1)
    scales = torch.where((norms > max_norm) & ~foreign, max_norm / (norms + 1e-7), 1.0)
    # Another rank's id has an arbitrary row here, which may also be looked up: one factor per row.
    factors = torch.ones_like(weight[:, 0]).scatter_reduce(0, rows, scales, "amin")
    return weight.index_copy_(0, rows, weight[rows] * factors[rows].unsqueeze(-1))


RENORM = LocalCall(renorm, collective=True)


def _renorm_choices(call: Call) -> Iterator[Choice]:
    """Operands: the table, which is written to, and the ids. A norm needs all columns of a row."""
    yield Choice((REPLICATE, REPLICATE), (REPLICATE,), RENORM)
    for sizes in call.splits([(0, 0)]):
        yield Choice((Shard(0, sizes), REPLICATE), (Shard(0, sizes),), RENORM)


# -- a sparse gradient -----------------------------------------------------------------------


class SparseRows:
    """Local row numbers, with repeats, and one row of values for each; all other rows are zero."""

    __slots__ = ("layout", "rows", "values")

    def __init__(self, layout: Layout, rows: torch.Tensor, values: torch.Tensor) -> None:
        self.layout, self.rows, self.values = layout, rows, values

    def dense(self) -> torch.Tensor:
        """The same values as a dense shard of the table."""
        layout = self.layout

        def here(coordinate: Coordinate, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            return values.new_zeros(layout.local_shape(coordinate)).index_add_(0, rows, values)

        axes = tuple(a for a, p in enumerate(layout.placements) if p.is_shard())
        return each_rank(layout.grid, here, self.rows, self.values, axes=axes)


RULES: Table = table(
    ((aten.embedding.default,), Rule(lookup_choices, "[v] d, ... -> ... d")),
    ((aten.embedding_renorm_.default,), Rule(_renorm_choices, "v [d], ... -> v [d]")),
)
