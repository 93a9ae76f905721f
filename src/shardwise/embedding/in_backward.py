"""InBackward: an optimizer that updates rows during the backward pass; its state per table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.comm.watch import because
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding.stacks import Stacks, states_like, whole_of
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.lookup.backends.backend import (
    Backend,
    Lookups,
    Query,
    Rows,
    serving,
    update_stacks,
)
from shardwise.lookup.backends.registry import backend_of_copies
from shardwise.lookup.exchange import combined
from shardwise.lookup.optimizers import (
    FusedOptimizer,
    RowUpdate,
    add_distinct_rows,
)
from shardwise.simulation.ranks import on_rank, present


@dataclass(frozen=True)
class RowState:
    """One number per row, the state of a table whose columns are on only some of the ranks.

    Each of those ranks has all the numbers. No DTensor layout expresses that, so checkpoints get
    each holder's copy; see Note [Pieces] in `checkpoint.crew`.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    #: The ranks present that hold columns, and their memory.
    holders: Sequence[tuple[int, torch.Tensor]]

    def __checkpoint_pieces__(self) -> list[tuple[int, tuple[int, int], torch.Tensor]]:
        return [(rank, (0, 0), numbers) for rank, numbers in self.holders]


class _Pass(NamedTuple):
    """The gradients of a backward pass, for the update; see `InBackward.take`."""

    lookups: list[Lookups]
    of_replicas: bool


class InBackward:
    """Updates the rows that a batch looked up, in the backward pass of that batch.

    No table gradient is materialised. `hold()` defers updates: the bag gradients of several
    backward passes are kept until `step()` applies their sum in one update, or `skip()` drops
    them. A table whose parameter does not require grad is not updated.
    """

    def __init__(self, optimizer: FusedOptimizer, stacks: Stacks, backend: Backend) -> None:
        self.settings = optimizer
        self.stacks = stacks
        self._backend = backend
        self._backend_of_copies = backend_of_copies(backend)
        self._states = states_like(stacks, optimizer.states)
        self._columns = SharedColumns(stacks)
        self._holding = False
        self._held: list[_Pass] = []
        #: Updates so far.
        self.num_steps = 0

    @property
    def lr(self) -> float:
        return self.settings.lr

    @lr.setter
    def lr(self, value: float) -> None:
        number = float(value)
        if not number >= 0:
            raise ArgumentError(f"lr is a number from 0 on, found {value!r}.")
        self.settings.lr = number

    # -- when to update ----------------------------------------------------------------------

    @contextlib.contextmanager
    def hold(self) -> Iterator[InBackward]:
        """Defer the updates of the backward passes inside until `step()`."""
        before, self._holding = self._holding, True
        try:
            yield self
        finally:
            self._holding = before

    @property
    def is_holding(self) -> bool:
        """Whether a backward pass would wait for `step()`."""
        return self._holding

    @property
    def num_held(self) -> int:
        """How many backward passes wait for `step()` or `skip()`."""
        return len(self._held)

    def step(self) -> None:
        """Apply the held gradients, as those of one batch."""
        held, self._held = self._held, []
        if held:
            self._apply(held)

    def skip(self) -> None:
        """Drop the held gradients."""
        self._held = []

    def take(self, lookups: list[Lookups], *, of_replicas: bool) -> None:
        """Take a backward pass: per rank present, the lookups in its stacks. Of replicated stacks,
        these are the rows that any rank looked up, with the sums of their gradients.

        With `of_replicas`, other ranks get all of them too, and make the same update.
        """
        taken = _Pass(lookups, of_replicas)
        if self._holding:
            self._held.append(taken)
        else:
            self._apply([taken])

    def _apply(self, passes: list[_Pass]) -> None:
        self.num_steps += 1
        lookups = [each.lookups for each in passes]
        joint = self._update_columns(lookups)
        of_replicas = any(each.of_replicas for each in passes)
        done: set[int] = set()
        for place, rank in enumerate(self.stacks.ranks):
            weights, stacks = self.stacks.weights[place], self.stacks.tiling.stacks[rank]
            left = [k for k in range(len(stacks)) if k not in joint[place]]
            left = [k for k in left if weights[k].data_ptr() not in done]
            for copied in (False, True):
                chosen = [k for k in left if stacks[k].replicated == copied]
                backend = self._backend_of_copies if copied or of_replicas else self._backend
                given = {k: _joined([each[place][k] for each in lookups]) for k in chosen}
                self._update(place, given, backend)
            # Simulated ranks share copies, which are updated once.
            done.update(weight.data_ptr() for weight in weights)

    def _update(self, place: int, lookups: Lookups, backend: Backend) -> None:
        queries, grads = zip(*lookups.values(), strict=True) if lookups else ((), ())
        weights = [self.stacks.weights[place][k] for k in lookups]
        rules = [RowUpdate(self.settings, self._states[place][k], self.num_steps) for k in lookups]
        update_stacks(backend, weights, queries, grads, rules)

    def states_of(self, place: int) -> list[torch.Tensor]:
        """All states of all stacks of the i-th rank present."""
        return [tensor for state in self._states[place] for tensor in state.values()]

    def state_of(self, place: int, stack: int, name: str) -> torch.Tensor:
        """One state of a stack of the i-th rank present."""
        return self._states[place][stack][name]

    def _update_columns(self, lookups: list[list[Lookups]]) -> list[list[int]]:
        """Update the stacks that share squares with other ranks; returns them, per rank present."""
        if not self.settings.needs_whole_rows or not self._columns.are_there:
            return [[] for _ in self.stacks.ranks]
        found = [
            {k: self._gradients(place, k, [each[place][k] for each in lookups]) for k in mine}
            for place, mine in enumerate(self._columns.stacks)
        ]
        for place, squares in enumerate(self._columns.mean_squares(found)):
            for k, (rows, values) in found[place].items():
                factors = self.settings.row_factors(rows, squares[k], self._states[place][k])
                add_distinct_rows(self.stacks.weights[place][k], rows, values, factors)
        return self._columns.stacks

    def _gradients(self, place: int, stack: int, lookups: list[tuple[Query, torch.Tensor]]) -> Rows:
        weight = self.stacks.weights[place][stack]
        rows, values = serving(self._backend, weight).row_gradient(weight, *_joined(lookups))
        self.settings.decay(weight, rows, values)
        return rows, values

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the state by what `fn` returns for it, such as a copy in another dtype."""
        self._states = [
            [{name: fn(tensor) for name, tensor in state.items()} for state in per_stack]
            for per_stack in self._states
        ]

    # -- state -------------------------------------------------------------------------------

    @property
    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """The state of each table, by name: views in the table's layout (DTensors on a mesh)."""
        return self._all_states(saved=False)

    def _all_states(self, *, saved: bool) -> dict[str, dict[str, Any]]:
        """`state`; where `saved`, with a RowState where only some ranks hold columns of a table."""
        return {
            table.name: {
                name: self._state_of(n, name, saved=saved) for name in self.settings.states
            }
            for n, table in enumerate(self.stacks.tiling.tables)
        }

    def _state_of(self, table: int, name: str, *, saved: bool) -> Any:
        stacks, per_row = self.stacks, self.settings.states[name]
        parts = self._local_states(table, name, per_row)
        if stacks.grid is None:
            return parts[0]
        if not per_row:
            return stacks.wrap(table, parts)
        split, shared = stacks.tiling.splits[table], self.settings.needs_whole_rows
        if saved and shared and split.by_columns and not all(split.sizes):
            each = zip(present(stacks.grid), stacks.ranks, parts, strict=True)
            holders = [(rank, part) for rank, at, part in each if split.sizes[at]]
            shape = (stacks.tiling.tables[table].num_embeddings, 1)
            return RowState(shape, stacks.dtype, holders)
        return stacks.wrap_per_row(table, parts, shared=shared)

    def _local_states(self, table: int, name: str, per_row: bool) -> list[torch.Tensor]:
        """The local state of a table on each rank present."""
        held = [[state[name] for state in per_stack] for per_stack in self._states]
        if not per_row:
            return self.stacks.shards_in(table, held)
        columns = [[numbers.unsqueeze(1) for numbers in each] for each in held]
        return [part[:, :1] for part in self.stacks.shards_in(table, columns)]

    def state_dict(self) -> dict[str, Any]:
        """Settings, the number of updates, and the state of each table."""
        if self._held:
            raise ShardwiseError(
                f"{len(self._held)} backward passes are held: step() or skip() before a checkpoint."
            )
        return {
            "optimizer": type(self.settings).__name__,
            "settings": dict(vars(self.settings)),
            "num_steps": self.num_steps,
            "state": self._all_states(saved=True),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same plan, or with whole tensors."""
        kind = type(self.settings).__name__
        if saved.get("optimizer") != kind:
            raise ArgumentError(
                f"The state is of {saved.get('optimizer')}, the collection has {kind}."
            )
        mine = self._all_states(saved=True)
        if set(saved["state"]) != set(mine):
            odd = ", ".join(sorted(set(saved["state"]) ^ set(mine)))
            raise LayoutError(f"The state and the collection differ in tables: {odd}.")
        with torch.no_grad():
            for name, states in mine.items():
                for key, target in states.items():
                    _copy_whole(target, saved["state"][name][key])
        self.num_steps = int(saved["num_steps"])
        for key, value in saved["settings"].items():
            setattr(self.settings, key, value)


def _copy_whole(target: torch.Tensor | RowState, value: Any) -> None:
    if isinstance(target, RowState):
        values = dict(value.holders) if isinstance(value, RowState) else {}
        if isinstance(value, DTensor):
            value = whole_of(value)
        for rank, numbers in target.holders:
            whole = values.get(rank, value)
            numbers.copy_(on_rank(whole, rank))
        return
    if isinstance(value, RowState):
        raise LayoutError(
            "The state is of a table whose columns are on some ranks only, and this plan needs it "
            "elsewhere. Write it with shardwise.checkpoint, which moves it between plans."
        )
    if isinstance(value, DTensor) and not isinstance(target, DTensor):
        value = whole_of(value)
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def _joined(lookups: list[tuple[Query, torch.Tensor]]) -> tuple[Query, torch.Tensor]:
    """Several lookups in one stack as one."""
    if len(lookups) == 1:
        return lookups[0]
    queries = [query for query, _ in lookups]
    grad = torch.cat([grad for _, grad in lookups])
    lengths = weights = None
    if any(q.lengths is not None for q in queries):
        lengths = torch.cat(
            [torch.ones_like(q.ids) if q.lengths is None else q.lengths for q in queries]
        )
    if any(q.weights is not None for q in queries):
        weights = torch.cat(
            [
                grad.new_ones(q.ids.shape[0], dtype=torch.float32)
                if q.weights is None
                else q.weights
                for q in queries
            ]
        )
    runs = queries[0].runs
    if lengths is None or any(q.runs is None for q in queries):
        runs = None
    elif runs is not None:
        runs = runs._replace(num_bags=np.concatenate([q.runs.num_bags for q in queries if q.runs]))
    return Query(torch.cat([q.ids for q in queries]), lengths, weights, runs), grad


# -- shared squares ------------------------------------------------------------------------------
# Row-wise Adagrad on tables that are split by columns.
#
# Its state is the mean square of a row's whole gradient, but each rank has only some columns. So
# before any row changes, one all-reduce sums the contributions of each rank's columns. All ranks
# that hold columns of a table looked up the same ids, so they have the same rows in the same order
# and exchange one number per row that was looked up. If some ranks hold nothing of a table, they
# cannot know those rows, so all ranks send a number for each row of the table.


class SharedColumns:
    """Which tables have their columns on several ranks; computed once."""

    def __init__(self, stacks: Stacks) -> None:
        tiling, self._stacks = stacks.tiling, stacks
        numbers = range(len(tiling.tables))
        split = np.array([tiling.splits_columns(table) for table in numbers])
        everywhere = np.array([len(shards) == tiling.num_ranks for shards in tiling.shards])
        mine = [tiling.stacks[rank] for rank in stacks.ranks]
        #: Per rank present, the stacks that hold some but not all columns of a table.
        self.stacks = [
            [k for k, stack in enumerate(each) if any(split[t] for t, _ in stack.shards)]
            for each in mine
        ]
        #: Whether there are any. The tiling decides: all ranks have to take part.
        self.are_there = bool(split.any())
        self._tables = [[np.array([t for t, _ in s.shards]) for s in each] for each in mine]
        self._bases = [[np.array([s.base for _, s in one.shards]) for one in each] for each in mine]
        self._dims = np.array([table.embedding_dim for table in tiling.tables])
        heights = np.array([table.num_embeddings for table in tiling.tables])
        #: Tables of which a number is sent for each row that was looked up, or for each row; and
        #: where those of the latter begin.
        self._known, self._dense = split & everywhere, split & ~everywhere
        self._first = np.cumsum([0, *(heights * self._dense)])

    def mean_squares(self, found: Sequence[dict[int, Rows]]) -> list[dict[int, torch.Tensor]]:
        """Per rank present and stack, the mean squares of whole rows."""
        assert self._stacks.grid is not None, "columns are split over a mesh"
        parts = [self._in_tables(place, each) for place, each in enumerate(found)]
        with because("squares of rows split by columns", implicit=False):
            totals = combined(self._stacks.grid, [sent for sent, _ in parts])
        return [means(total) for (_, means), total in zip(parts, totals, strict=True)]

    def _in_tables(
        self, place: int, found: dict[int, Rows]
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], dict[int, torch.Tensor]]]:
        """The squares that a rank sends, in the order of tables, which is the same on all ranks;
        and what makes the means of each stack's rows from all ranks' sums of them."""
        device = self._stacks.device
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        tables, rows, norms = [nothing], [nothing], [nothing.to(self._stacks.dtype)]
        for k, (numbers, values) in found.items():
            bases = torch.from_numpy(self._bases[place][k]).to(device)
            at = torch.searchsorted(bases, numbers, right=True) - 1
            tables.append(torch.from_numpy(self._tables[place][k]).to(device)[at])
            rows.append(numbers - bases[at])
            norms.append(torch.linalg.vector_norm(values, dim=1))
        table, row, squares = torch.cat(tables), torch.cat(rows), torch.cat(norms).square_()
        order = torch.sort(table, stable=True).indices
        is_known, is_dense, first, dims = (
            torch.from_numpy(numbers).to(device)
            for numbers in (self._known, self._dense, self._first, self._dims)
        )
        # Rows that all ranks know, and rows of tables that are sent whole, with their places there.
        known = order[is_known[table[order]]]
        dense = is_dense[table].nonzero().view(-1)
        at = first[table[dense]] + row[dense]
        whole = squares.new_zeros(int(self._first[-1])).index_copy_(0, at, squares[dense])

        def means(total: torch.Tensor) -> dict[int, torch.Tensor]:
            squares[known] = total[: known.shape[0]]
            squares[dense] = total[known.shape[0] :].index_select(0, at)
            sizes = [numbers.shape[0] for numbers, _ in found.values()]
            return dict(zip(found, squares.div_(dims[table]).split(sizes), strict=True))

        return torch.cat([squares[known], whole]), means
