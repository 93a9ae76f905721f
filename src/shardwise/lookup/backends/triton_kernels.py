"""The backend of fused Triton kernels on a GPU: one launch looks up all stacks of a rank.

The kernels take ids in any order and bags of any length (see shardwise.kernels); an update sorts
the ids of the batch, sums the gradients of each row in that order, and updates it, in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from shardwise.errors import UnsupportedError
from shardwise.kernels.lookup import (
    Trace,
    noted,
    per_sample_weight_grads,
    pooled_lookup,
    row_lookup,
)
from shardwise.kernels.tables import (
    IdBags,
    KnownSets,
    TableSet,
    Unread,
    first_bags,
    one_after_another,
    set_of_shape,
)
from shardwise.kernels.update import add_gradients, row_sums, update
from shardwise.lookup.backends.backend import PartQuery, Query
from shardwise.lookup.ids import edges_of
from shardwise.lookup.optimizers import (
    SGD,
    Adagrad,
    Adam,
    FusedOptimizer,
    RowUpdate,
    RowWiseAdagrad,
)


class _Batch(NamedTuple):
    """The queries of several stacks as the kernels take them: each stack is a feature."""

    tables: TableSet
    bags: IdBags
    weights: torch.Tensor | None
    num_bags: tuple[int, ...]

    def with_offsets(self) -> IdBags:
        bags = self.bags
        if bags.offsets is not None:
            return bags
        return bags._replace(offsets=torch.arange(sum(self.num_bags) + 1, device=bags.ids.device))

    def trace(self) -> Trace:
        all_in_bags = self.bags.offsets is None or not self.tables.masked
        return noted(self.tables, self.bags, self.weights, all_in_bags=all_in_bags)


class TritonBackend:
    """Lookups and updates by shardwise's own kernels."""

    name = "triton"
    #: A single rank's lookups need no backend: see `embedding.alone`.
    is_fused = True

    def __init__(self) -> None:
        self._sets = KnownSets()

    # -- one stack ---------------------------------------------------------------------------

    def look_up(self, weight: torch.Tensor, query: Query) -> torch.Tensor:
        return self.look_up_stacks([weight], [query])[0]

    def row_gradient(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        trace = self._batch([weight], [query]).trace()
        num_rows, dim = weight.shape
        return row_sums(trace, _flat([grad]), num_rows, dim, grad.dtype)

    def part_gradient(
        self, num_rows: int, query: PartQuery, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `row_gradient`, of a table that is not there, with so many rows."""
        table = Unread((num_rows, grad.shape[1]), grad.dtype, grad.device)
        trace = _batch_of(set_of_shape(table, query.first_row), [query]).trace()
        return row_sums(trace, _flat([grad]), num_rows, grad.shape[1], grad.dtype)

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        self.update_stacks([weight], [query], [grad], [rule])

    def add_gradients(self, table: torch.Tensor, query: Query, grad: torch.Tensor) -> torch.Tensor:
        """Add the gradients of a table of this shape to `table`, and return it."""
        batch = self._batch([table], [query])
        add_gradients(batch.tables, batch.trace(), _flat([grad]))
        return table

    def weight_gradient(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor
    ) -> torch.Tensor:
        """For each id, its row times its bag's gradient."""
        batch = self._batch([weight], [query])
        return per_sample_weight_grads(batch.tables, batch.with_offsets(), _flat([grad]))

    def largest(self, weight: torch.Tensor, query: Query) -> tuple[torch.Tensor, torch.Tensor]:
        """The largest entry of each bag and column, and its position among the ids, or -1."""
        tables, _, _, (num_bags,) = batch = self._batch([weight], [query])
        bags, shape = batch.with_offsets(), (num_bags, weight.shape[1])
        out, trace = pooled_lookup(tables, bags, mode="max", trace=True, dtype=weight.dtype)
        assert trace is not None, "requested"
        assert trace.argmax is not None, "a maximum has it"
        return out.view(shape), trace.argmax.view(shape).long()

    # -- all stacks of a rank ----------------------------------------------------------------

    def look_up_stacks(
        self, weights: Sequence[torch.Tensor], queries: Sequence[Query]
    ) -> list[torch.Tensor]:
        """The rows of each stack's bags, in one launch."""
        batch, dtype = self._batch(weights, queries), weights[0].dtype
        tables, bags, scales, num_bags = batch
        if bags.offsets is None and scales is None:
            ids, _, firsts, most, rows = bags
            out, _ = row_lookup(tables, ids, firsts, most, rows, dtype=dtype)
        else:
            out, _ = pooled_lookup(tables, batch.with_offsets(), weights=scales, dtype=dtype)
        if len(weights) == 1:
            return [out.view(num_bags[0], weights[0].shape[1])]
        sizes = [num * weight.shape[1] for num, weight in zip(num_bags, weights, strict=True)]
        parts = out.split(sizes)
        return [p.view(-1, w.shape[1]) for p, w in zip(parts, weights, strict=True)]

    def update_stacks(
        self,
        weights: Sequence[torch.Tensor],
        queries: Sequence[Query],
        grads: Sequence[torch.Tensor],
        rules: Sequence[RowUpdate],
    ) -> None:
        """Step the rows of all stacks; the rules are of one optimizer."""
        optimizer, batch = rules[0].optimizer, self._batch(weights, queries)
        states = [[rule.state[name] for rule in rules] for name in optimizer.states]
        trace = batch.trace()
        step_rows(optimizer, rules[0].step, batch.tables, trace, _flat(grads), states)

    def _batch(self, weights: Sequence[torch.Tensor], queries: Sequence[Query]) -> _Batch:
        first, *_ = queries
        tables = self._sets.of(weights, (first.first_row,) if type(first) is PartQuery else None)
        return _batch_of(tables, queries)


def _batch_of(tables: TableSet, queries: Sequence[Query]) -> _Batch:
    first, *_ = queries
    num_bags = tuple([query.num_bags for query in queries])
    offsets = first.offsets if type(first) is PartQuery else None
    lengths = _joined([query.lengths for query in queries], queries)
    if lengths is not None:
        offsets = edges_of(lengths, lengths.dtype)
    bags = IdBags(
        first.ids if len(queries) == 1 else torch.cat([q.ids for q in queries]),
        offsets,
        first_bags(num_bags, tables.device),
        max(num_bags),
        one_after_another(tables, num_bags),
    )
    return _Batch(tables, bags, _joined([q.weights for q in queries], queries), num_bags)


def step_rows(
    optimizer: FusedOptimizer,
    step: int,
    tables: TableSet,
    trace: Trace,
    grad: torch.Tensor,
    states: Sequence[Sequence[torch.Tensor]],
    record: torch.Tensor | None = None,
) -> None:
    """Step the rows that were looked up; `states` has a tensor per table for each state."""
    run = partial(
        update, tables, trace, grad,
        lr=optimizer.lr, weight_decay=optimizer.weight_decay, record=record,
    )  # fmt: skip
    if isinstance(optimizer, SGD):
        run("sgd")
    elif isinstance(optimizer, RowWiseAdagrad):
        run("rowwise_adagrad", states, eps=optimizer.eps)
    elif isinstance(optimizer, Adagrad):
        run("adagrad", states, eps=optimizer.eps)
    elif isinstance(optimizer, Adam):
        # SparseAdam adds eps before it corrects the second moment, the kernel after.
        eps = optimizer.eps / math.sqrt(1 - optimizer.betas[1] ** step)
        run("adam", states, eps=eps, betas=optimizer.betas, step=step)
    else:
        raise UnsupportedError(
            f"backend='triton' has no kernel for {type(optimizer).__name__}: use one of SGD, "
            "Adagrad, RowWiseAdagrad, Adam, or backend='torch'."
        )


def _joined(parts: list[torch.Tensor | None], queries: Sequence[Query]) -> torch.Tensor | None:
    """Lengths or weights of all stacks; ones for a stack without."""
    if all(part is None for part in parts):
        return None
    found = [
        torch.ones_like(query.ids) if part is None else part
        for part, query in zip(parts, queries, strict=True)
    ]
    return found[0] if len(found) == 1 else torch.cat(found)


def _flat(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(grads) == 1:
        return grads[0].contiguous().view(-1)
    return torch.cat([grad.reshape(-1) for grad in grads])
