"""InBackward: an optimizer that updates rows during the backward pass; its state per table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding.shared_squares import SharedColumns, update_together
from shardwise.embedding.stacks import Stacks, states_like, whole_of
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError
from shardwise.lookup.backends.backend import Backend, Lookups, Query, Rows, update_stacks
from shardwise.lookup.optimizers import FusedOptimizer, RowUpdate, optimizer_settings
from shardwise.simulation.parts import on_rank
from shardwise.simulation.ranks import present


@dataclass(frozen=True)
class RowState:
    """The state, one number per row, of a table whose columns are on some of the ranks.

    Each of those ranks has all the numbers. No DTensor layout says that, so checkpoints get each
    holder's copy; see Note [Pieces] in `checkpoint.pieces`.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    #: The ranks present that hold columns, and their memory.
    holders: Sequence[tuple[int, torch.Tensor]]

    def __checkpoint_pieces__(self) -> list[tuple[int, tuple[int, int], torch.Tensor]]:
        return [(rank, (0, 0), numbers) for rank, numbers in self.holders]


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
        self._states = states_like(stacks, optimizer.states)
        self._columns = SharedColumns(stacks)
        self._holding = False
        self._held: list[tuple[list[Lookups], list[dict[int, Rows]]]] = []
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
            self._apply([h[0] for h in held], [h[1] for h in held])

    def skip(self) -> None:
        """Drop the held gradients."""
        self._held = []

    def take(self, lookups: list[Lookups], copies: list[dict[int, Rows]]) -> None:
        """Take a backward pass: lookups in sharded stacks, summed rows of replicated ones."""
        if self._holding:
            self._held.append((lookups, copies))
        else:
            self._apply([lookups], [copies])

    def _apply(self, lookups: list[list[Lookups]], copies: list[list[dict[int, Rows]]]) -> None:
        self.num_steps += 1
        joint = self._update_columns(lookups)
        for place in range(len(self.stacks.ranks)):
            found = {}
            for k in range(len(self.stacks.weights[place])):
                queries = [each[place][k] for each in lookups if k in each[place]]
                if queries and k not in joint[place]:
                    found[k] = _joined(queries)
            update_stacks(
                self._backend,
                [self.stacks.weights[place][k] for k in found],
                [query for query, _ in found.values()],
                [grad for _, grad in found.values()],
                [self._rule(place, k) for k in found],
            )
        self._apply_copies(copies)

    def states_of(self, place: int) -> list[torch.Tensor]:
        """All states of all stacks of the i-th rank present."""
        return [tensor for state in self._states[place] for tensor in state.values()]

    def state_of(self, place: int, stack: int, name: str) -> torch.Tensor:
        """One state of a stack of the i-th rank present."""
        return self._states[place][stack][name]

    def _rule(self, place: int, stack: int) -> RowUpdate:
        return RowUpdate(self.settings, self._states[place][stack], self.num_steps)

    def _update_columns(self, lookups: list[list[Lookups]]) -> list[list[int]]:
        """Update the stacks that share squares with other ranks; which ones, per rank present."""
        places = range(len(self.stacks.ranks))
        if not self.settings.needs_whole_rows:
            return [[] for _ in places]
        joint = self._columns.stacks
        lookups_of = [
            {k: _joined([each[place][k] for each in lookups]) for k in joint[place]}
            for place in places
        ]
        if self._columns.are_there:
            update_together(
                self.stacks, self._columns, self._backend, self.settings, self._states, lookups_of
            )
        return joint

    def _apply_copies(self, copies: list[list[dict[int, Rows]]]) -> None:
        done: set[int] = set()
        for place in range(len(self.stacks.ranks)):
            for k, weight in enumerate(self.stacks.weights[place]):
                found = [each[place][k] for each in copies if k in each[place]]
                # Simulated ranks share the copy: it is updated once.
                if not found or weight.data_ptr() in done:
                    continue
                done.add(weight.data_ptr())
                rows = torch.cat([numbers for numbers, _ in found])
                values = torch.cat([values for _, values in found])
                self._backend.update(weight, Query(rows, None, None), values, self._rule(place, k))

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
        return {
            table.name: {
                name: self._state_of(number, name, per_row)
                for name, per_row in self.settings.states.items()
            }
            for number, table in enumerate(self.stacks.tiling.tables)
        }

    def _state_of(self, table: int, name: str, per_row: bool) -> torch.Tensor:
        stacks = self.stacks
        parts = self._local_states(table, name, per_row)
        if stacks.grid is None:
            return parts[0]
        if not per_row:
            return stacks.wrap(table, parts)
        return stacks.wrap_per_row(table, parts, shared=self.settings.needs_whole_rows)

    def _local_states(self, table: int, name: str, per_row: bool) -> list[torch.Tensor]:
        """The local state of a table on each rank present."""
        stacks = self.stacks
        parts = []
        for place, rank in enumerate(stacks.ranks):
            shard = stacks.tiling.shard_on(table, rank)
            if shard is None:
                nothing = stacks.nothing_of(table)
                parts.append(nothing if not per_row else nothing[:, :1])
                continue
            state = self._states[place][shard.stack][name]
            mine = state[shard.base : shard.base + shard.num_rows]
            parts.append(mine.unsqueeze(1) if per_row else mine)
        return parts

    def _saved_states(self) -> dict[str, dict[str, Any]]:
        """`state`, with a RowState where only some ranks hold columns of a table."""
        found: dict[str, dict[str, Any]] = {name: dict(s) for name, s in self.state.items()}
        grid = self.stacks.grid
        if not self.settings.needs_whole_rows:
            return found
        for number, table in enumerate(self.stacks.tiling.tables):
            split = self.stacks.tiling.splits[number]
            if grid is None or not split.by_columns or all(split.sizes):
                continue
            for name, per_row in self.settings.states.items():
                if per_row:
                    parts = zip(
                        present(grid),
                        self.stacks.ranks,
                        self._local_states(number, name, True),
                        strict=True,
                    )
                    holders = [(rank, part) for rank, at, part in parts if split.sizes[at]]
                    shape = (table.num_embeddings, 1)
                    found[table.name][name] = RowState(shape, self.stacks.dtype, holders)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Settings, the number of updates, and the state of each table."""
        if self._held:
            raise ShardwiseError(
                f"{len(self._held)} backward passes are held: step() or skip() before a checkpoint."
            )
        return {
            "optimizer": type(self.settings).__name__,
            "settings": optimizer_settings(self.settings),
            "num_steps": self.num_steps,
            "state": self._saved_states(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a `state_dict` of the same plan, or with whole tensors."""
        kind = type(self.settings).__name__
        if saved.get("optimizer") != kind:
            raise ArgumentError(
                f"The state is of {saved.get('optimizer')}, the collection has {kind}."
            )
        mine = self._saved_states()
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
