"""From bag gradients to row gradients and the gradients of tables' parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.comm.watch import because
from shardwise.embedding.stacks import Stacks
from shardwise.lookup.backends.backend import Backend, Lookups, Query, Rows
from shardwise.lookup.exchange import combined
from shardwise.lookup.order import counted, repeated
from shardwise.lookup.tiling import TableShard
from shardwise.ops.lookup.row_sparse import gather_rows
from shardwise.ops.lookup.row_sparse import make as make_row_sparse
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import localize, one_tensor, part_per_rank
from shardwise.training.contract import Reduction


def row_gradients(
    stacks: Stacks, place: int, backend: Backend, lookups: Lookups
) -> dict[int, Rows]:
    """Per stack of one rank, the rows with a gradient."""
    weights = stacks.weights[place]
    return {k: backend.row_gradient(weights[k], *lookup) for k, lookup in lookups.items()}


def sum_of_copies(stacks: Stacks, rows: Sequence[dict[int, Rows]]) -> list[dict[int, Rows]]:
    """The gradients of replicated tables, summed over ranks in one all-reduce.

    They are sent dense, with an extra column that says which rows any rank looked up.
    """
    if stacks.grid is None or not any(rows):
        return list(rows)
    flats = []
    for place, per_stack in enumerate(rows):
        parts = []
        for k, (numbers, values) in per_stack.items():
            weight = stacks.weights[place][k]
            dense = weight.new_zeros(weight.shape[0], weight.shape[1] + 1)
            ones = values.new_ones(values.shape[0], 1)
            dense.index_copy_(0, numbers, torch.cat([values, ones], 1))
            parts.append(dense.view(-1))
        flats.append(torch.cat(parts))
    with because("gradients of copied tables", implicit=False):
        totals = combined(stacks.grid, flats)
    found = []
    for place, (per_stack, flat) in enumerate(zip(rows, totals, strict=True)):
        here, at = {}, 0
        for k in per_stack:
            height, width = stacks.weights[place][k].shape
            dense = flat[at : at + height * (width + 1)].view(height, width + 1)
            at += dense.numel()
            numbers = dense[:, width].nonzero().view(-1)
            here[k] = (numbers, dense.index_select(0, numbers)[:, :width].contiguous())
        found.append(here)
    return found


def mean_over_replicas(
    stacks: Stacks,
    backend: Backend,
    replicas: Reduction,
    lookups: Sequence[Lookups],
    copies: Sequence[dict[int, Rows]],
) -> tuple[list[Lookups], list[dict[int, Rows]]]:
    """The lookups of a backward pass, averaged over data axes outside the collection's mesh.

    Every replica gets the rows of all, in one order, so all make the same update.
    """
    rows = [
        {**row_gradients(stacks, place, backend, lookups[place]), **copies[place]}
        for place in range(len(stacks.ranks))
    ]
    found_lookups: list[Lookups] = [{} for _ in rows]
    found_copies: list[dict[int, Rows]] = [{} for _ in rows]
    # A rank with fewer stacks takes part with empty ones, so that all communicate alike.
    for k in range(max(map(len, stacks.tiling.stacks))):
        with because("gradients of replicated tables", implicit=False):
            means = _means(stacks, replicas, k, rows)
        for place, (rank, found) in enumerate(zip(stacks.ranks, means, strict=True)):
            mine = stacks.tiling.stacks[rank]
            if k < len(mine) and mine[k].replicated:
                found_copies[place][k] = found
            elif k < len(mine):
                found_lookups[place][k] = Query(found[0], None, None), found[1]
    return found_lookups, found_copies


def _means(
    stacks: Stacks, replicas: Reduction, stack: int, rows: Sequence[dict[int, Rows]]
) -> list[Rows]:
    """Per rank present, the rows of a stack of all replicas, times a replica's share."""
    grid = stacks.grid
    found = [_rows_of(stacks, place, stack, each) for place, each in enumerate(rows)]
    columns = zip(*found, strict=True)
    numbers, values = (
        column[0] if grid is None else one_tensor(grid, column, sized=False) for column in columns
    )
    for mesh, axis in replicas.means:
        numbers, values = gather_rows(localize(mesh, numbers), localize(mesh, values), mesh, axis)
    if grid is None:
        return [(agreed(numbers), agreed(values) * replicas.share)]
    both = zip(part_per_rank(grid, numbers), part_per_rank(grid, values), strict=True)
    return [(number, value * replicas.share) for number, value in both]


def _rows_of(stacks: Stacks, place: int, stack: int, rows: dict[int, Rows]) -> Rows:
    """The rows of a stack with a gradient; empty where there are none."""
    if stack in rows:
        return rows[stack]
    held = stacks.weights[place][stack : stack + 1]
    width = held[0].shape[1] if held else 0
    options: Any = {"device": stacks.device}
    return (
        torch.empty(0, dtype=torch.int64, **options),
        torch.empty(0, width, dtype=stacks.dtype, **options),
    )


def table_gradient(
    stacks: Stacks, table: int, rows: Sequence[dict[int, Rows]], *, sparse: bool
) -> torch.Tensor | None:
    """The gradient of a table's parameter, from the row gradients of its stacks."""
    numbers, values = [], []
    for place, rank in enumerate(stacks.ranks):
        shard = stacks.tiling.shard_on(table, rank)
        weight = stacks.weights[place][shard.stack] if shard is not None else None
        found = rows[place].get(shard.stack) if shard is not None else None
        if shard is None or found is None or weight is None:
            nothing = stacks.nothing_of(table)
            numbers.append(torch.empty(0, dtype=torch.int64, device=nothing.device))
            values.append(nothing[:0] if nothing.shape[0] else nothing)
            continue
        first = stacks.first_copy[place]
        if first < place and stacks.tiling.splits[table].replicated:
            here = (numbers[first], values[first])  # the same on every rank, and stored once
        else:
            here = _between(found, shard)
        numbers.append(here[0])
        values.append(here[1])
    if stacks.grid is None:
        one = stacks.tiling.tables[table]
        shape = (one.num_embeddings, one.embedding_dim)
        if not sparse:
            return values[0].new_zeros(shape).index_copy_(0, numbers[0], values[0])
        return torch.sparse_coo_tensor(
            numbers[0].unsqueeze(0), values[0], shape, check_invariants=False, is_coalesced=True
        )
    if sparse:
        return make_row_sparse(
            stacks.layout(table),
            one_tensor(stacks.grid, numbers, sized=False),
            one_tensor(stacks.grid, values, sized=False),
            coalesced=True,
        )
    dense: list[torch.Tensor] = []
    for place, (rank, at, value) in enumerate(zip(stacks.ranks, numbers, values, strict=True)):
        shard = stacks.tiling.shard_on(table, rank)
        first = stacks.first_copy[place]
        if first < place and stacks.tiling.splits[table].replicated:
            dense.append(dense[first])
            continue
        empty = tuple(stacks.nothing_of(table).shape)
        size = empty if shard is None else (shard.num_rows, shard.width)
        dense.append(value.new_zeros(size).index_copy_(0, at, value))
    return stacks.wrap(table, dense)


def _between(rows: Rows, shard: TableShard) -> Rows:
    numbers, values = rows
    edges = torch.tensor([shard.base, shard.base + shard.num_rows], device=numbers.device)
    start, end = torch.searchsorted(numbers, edges).tolist()
    return numbers[start:end] - shard.base, values[start:end]


def without_tables(query: Query, shards: Sequence[TableShard]) -> Query:
    """A query without the ids of some tables, whose bags become empty."""
    keep = torch.ones_like(query.ids, dtype=torch.bool)
    for shard in shards:
        keep &= (query.ids < shard.base) | (query.ids >= shard.base + shard.num_rows)
    lengths = query.lengths
    if lengths is None:
        lengths = keep.to(query.ids.dtype)
    else:
        bags = repeated(lengths, query.ids.shape[0])
        lengths = counted(bags[keep], lengths.shape[0]).to(lengths.dtype)
    weights = None if query.weights is None else query.weights[keep]
    return Query(query.ids[keep], lengths, weights, query.runs)
