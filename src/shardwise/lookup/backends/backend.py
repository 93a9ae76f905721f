"""The interface to kernels: what a collection needs to look up and update rows.

A backend works on one *stack* at a time (see Note [Stacks]): all tables of one width that a rank
holds, in one flat weight, with one flat list of ids. Bags are given by their lengths; without
lengths each id is a bag of its own. Backends only sum: the factor of a mean is applied elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch

from shardwise.lookup.optimizers import RowUpdate


class Runs(NamedTuple):
    """Which bags look up which table of a stack.

    The bags come from several ranks, one rank's after another's, and are in the order of tables
    there: `num_bags[i, j]` bags of rank i look up table j, which has `num_rows[j]` rows from row
    `first_row[j]` of the stack on. Tables are in the order of rows; one may be there several times,
    in neighbouring places.
    """

    num_bags: np.ndarray
    first_row: np.ndarray
    num_rows: np.ndarray


@dataclass(slots=True)
class Query:
    """Ids into a stack. `lengths` of the bags they form, or None; `weights` per id, or None.

    `runs`, if known, say which bags look up which table.
    """

    ids: torch.Tensor
    lengths: torch.Tensor | None
    weights: torch.Tensor | None
    runs: Runs | None = None

    @property
    def num_bags(self) -> int:
        return (self.ids if self.lengths is None else self.lengths).shape[0]


@dataclass(slots=True)
class PartQuery(Query):
    """For fused kernels: ids count in a larger table, which has `first_row` as the first row here.

    Ids of other rows are skipped, and ids after the last bag. Bags are given by where each begins
    and the last one ends, in place of lengths.
    """

    offsets: torch.Tensor | None = None
    first_row: int = 0

    @property
    def num_bags(self) -> int:
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - 1


#: Per stack of a rank: a lookup, and the gradients of its bags.
Lookups = dict[int, tuple[Query, torch.Tensor]]
#: The rows of a stack that have a gradient, each once and in order, and the gradients.
Rows = tuple[torch.Tensor, torch.Tensor]


class Backend(Protocol):
    """Local kernels. Ids are in range and on the weight's device; calls are without autograd.

    A backend that can serve all stacks of a rank at once has `look_up_stacks(weights, queries)` and
    `update_stacks(weights, queries, grads, rules)` too; one with its own kernel for the gradient of
    weights of ids has `weight_gradient(weight, query, grad)`. One that leaves some tables to
    another backend has `serving(weight, *states)`, which is that one.
    """

    name: str

    def look_up(self, weight: torch.Tensor, query: Query) -> torch.Tensor:
        """One row per bag: the sum of its rows, times their weights."""
        ...

    def row_gradient(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows that were looked up, each once and in order, and the gradient of each."""
        ...

    def update(
        self, weight: torch.Tensor, query: Query, grad: torch.Tensor, rule: RowUpdate
    ) -> None:
        """Change the rows that were looked up, by `rule`, from the gradient of each bag."""
        ...


def serving(backend: Backend, weight: torch.Tensor, *states: torch.Tensor) -> Backend:
    """The backend that serves a table and its states."""
    chosen = getattr(backend, "serving", None)
    return backend if chosen is None else chosen(weight, *states)


def look_up_stacks(
    backend: Backend, weights: Sequence[torch.Tensor], queries: Sequence[Query]
) -> list[torch.Tensor]:
    """Look up all stacks, at once if the backend can."""
    if not weights:
        return []
    backend = serving(backend, weights[0])
    at_once = getattr(backend, "look_up_stacks", None)
    if at_once is not None:
        return at_once(weights, queries)
    return [backend.look_up(*each) for each in zip(weights, queries, strict=True)]


def update_stacks(
    backend: Backend,
    weights: Sequence[torch.Tensor],
    queries: Sequence[Query],
    grads: Sequence[torch.Tensor],
    rules: Sequence[RowUpdate],
) -> None:
    """Update all stacks, at once if the backend can. The rules are of one optimizer."""
    if not weights:
        return
    backend = serving(backend, weights[0], *rules[0].state.values())
    at_once = getattr(backend, "update_stacks", None)
    if at_once is not None:
        at_once(weights, queries, grads, rules)
        return
    for each in zip(weights, queries, grads, rules, strict=True):
        backend.update(*each)
