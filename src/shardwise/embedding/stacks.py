"""The weights of a collection: flat stacks, initial values, and the tables' parameters as views."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.autograd import VersionSource
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.lookup.exchange import places_together, ranks_present
from shardwise.lookup.scratch import table_memory
from shardwise.lookup.tiling import TableShard, TableTiling
from shardwise.simulation.ranks import agreed, localize, no_values, one_tensor, part_per_rank


class Stacks:
    """For each rank present, one flat weight per stack; see Note [Stacks] in `tiling`.

    `weights[i][k]` is stack k of the i-th rank present. Without a mesh there is one rank.
    """

    def __init__(
        self, tiling: TableTiling, grid: Grid | None, dtype: torch.dtype, device: torch.device
    ):
        self.tiling, self.grid, self.dtype, self.device = tiling, grid, dtype, device
        self.ranks = [0] if grid is None else ranks_present(grid)
        self.weights = [
            [
                table_memory((stack.num_rows, stack.width), dtype, device)
                for stack in tiling.stacks[rank]
            ]
            for rank in self.ranks
        ]
        #: Per rank present, the place of the first one that has its copies of replicated tables.
        self.first_copy = list(range(len(self.ranks)))
        for first, *others in [] if grid is None else places_together(grid):
            for place in others:
                self.first_copy[place] = first
        # Ranks present of one mesh share the memory of those.
        for place, first in enumerate(self.first_copy):
            mine, theirs = (self._replicated(each) for each in (place, first))
            for width, k in mine.items():
                self.weights[place][k] = self.weights[first][theirs[width]]

    def _replicated(self, place: int) -> dict[int, int]:
        """The replicated stacks of the i-th rank present, by their widths."""
        stacks = self.tiling.stacks[self.ranks[place]]
        return {stack.width: k for k, stack in enumerate(stacks) if stack.replicated}

    def fill_rows(self, table: int, first: int, values: torch.Tensor) -> None:
        """Write rows of a table, from `first` on, where ranks present hold them."""
        last = first + values.shape[0]
        for place, rank in enumerate(self.ranks):
            shard = self.tiling.shard_on(table, rank)
            if shard is None:
                continue
            start, end = max(first, shard.rows[0]), min(last, shard.rows[1])
            if start < end:
                part = values[start - first : end - first, shard.columns[0] : shard.columns[1]]
                self.rows(place, shard)[start - shard.rows[0] : end - shard.rows[0]].copy_(part)

    def rows(self, place: int, shard: TableShard) -> torch.Tensor:
        """A shard of the i-th rank present, as a view of its stack."""
        return self.weights[place][shard.stack][shard.base : shard.base + shard.num_rows]

    def all(self) -> list[torch.Tensor]:
        """The stacks of all ranks present."""
        return [weight for weights in self.weights for weight in weights]

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each stack by what `fn` returns for it, such as a copy in another dtype."""
        self.weights = [[fn(weight) for weight in weights] for weights in self.weights]
        for weight in self.all():
            self.dtype, self.device = weight.dtype, weight.device

    def layout(self, table: int) -> Layout:
        """The layout of the table's DTensor."""
        one, split = self.tiling.tables[table], self.tiling.splits[table]
        return self._layout((one.num_embeddings, one.embedding_dim), split.placement(one))

    def _layout(self, shape: tuple[int, int], placement: Placement) -> Layout:
        assert self.grid is not None, "tables without a mesh have no layout"
        return make_layout(self.grid, (placement,), shape, contiguous_stride(shape), self.dtype)

    def table(self, number: int) -> torch.Tensor:
        """The value of a table's parameter: a view of the stack, as a DTensor on a mesh."""
        parts = self.shards_in(number, self.weights)
        return parts[0] if self.grid is None else self.wrap(number, parts)

    def shards_in(self, number: int, held: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """A table's shards of what each rank present holds for its stacks, such as the weights."""
        found = []
        for rank, mine in zip(self.ranks, held, strict=True):
            shard = self.tiling.shard_on(number, rank)
            if shard is None:
                found.append(self.nothing_of(number))
            else:
                found.append(mine[shard.stack][shard.base : shard.base + shard.num_rows])
        return found

    def wrap(self, number: int, parts: Sequence[torch.Tensor]) -> DTensor:
        """The DTensor of a table, from the shard of each rank present."""
        return DTensor._wrap(self._local(parts), self.layout(number))

    def _local(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        assert self.grid is not None, "tables without a mesh are plain tensors"
        if self.grid.outside:
            return no_values(self.grid, self.dtype)
        return one_tensor(self.grid, _shared(parts), sized=False)

    def wrap_per_row(self, number: int, parts: Sequence[torch.Tensor], shared: bool) -> DTensor:
        """The DTensor of a state with one number per row, on each rank that holds columns.

        With `shared`, the numbers of all holders are equal: the state is replicated if all ranks
        are holders. Otherwise it has a column per holder.
        """
        one, split = self.tiling.tables[number], self.tiling.splits[number]
        placement, num_columns = split.placement(one), 1
        if split.by_columns:
            holders = tuple(int(size > 0) for size in split.sizes)
            copied = shared and all(holders)
            placement = REPLICATE if copied else Shard(1, holders)
            num_columns = 1 if copied else sum(holders)
        layout = self._layout((one.num_embeddings, num_columns), placement)
        return DTensor._wrap(self._local(parts), layout)

    def nothing_of(self, number: int) -> torch.Tensor:
        """The empty shard of a rank that holds nothing of a table."""
        one, split = self.tiling.tables[number], self.tiling.splits[number]
        shape = (one.num_embeddings, 0) if split.by_columns else (0, one.embedding_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def holds(self, number: int, parameter: torch.Tensor) -> bool:
        """Whether a parameter is still the view that `table` gave."""
        local = getattr(parameter, "_local", parameter)
        parts = [local] if self.grid is None else part_per_rank(self.grid, local)
        for place, (rank, part) in enumerate(zip(self.ranks, parts, strict=True)):
            shard = self.tiling.shard_on(number, rank)
            if shard is not None:
                view = self.rows(place, shard)
                if part.data_ptr() != view.data_ptr() or part.dtype != view.dtype:
                    return False
        return True


def _shared(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor object for views of the same memory: a simulated world stores it once."""
    seen: dict[tuple[int, torch.Size], torch.Tensor] = {}
    return [
        seen.setdefault((part.data_ptr(), part.shape), part) if part.numel() else part
        for part in parts
    ]


def whole_of(value: DTensor) -> torch.Tensor:
    """A sharded table, gathered into a plain tensor."""
    return agreed(value.full_tensor())


def states_like(stacks: Stacks, names: Mapping[str, bool]) -> list[list[dict[str, torch.Tensor]]]:
    """Zeros for each state of each stack: one per row, or of the weight's shape."""
    found: list[list[dict[str, torch.Tensor]]] = []
    made: dict[tuple[int, str], torch.Tensor] = {}
    for weights in stacks.weights:
        per_stack = []
        for weight in weights:
            state = {}
            for name, per_row in names.items():
                key = (weight.data_ptr(), name)
                if key not in made:
                    shape = weight.shape[:1] if per_row else weight.shape
                    made[key] = table_memory(shape, weight.dtype, weight.device, zeros=True)
                state[name] = made[key]
            per_stack.append(state)
        found.append(per_stack)
    return found


# -- init tables ---------------------------------------------------------------------------------
# Initial values of tables.


#: Numbers drawn at a time: 16 MB.
_CHUNK_NUMBERS = 1 << 22


def draw_tables(stacks: Stacks) -> None:
    """Draw a table of n rows uniformly between -1/√n and 1/√n.

    Every rank draws all rows, some at a time, and keeps its own: the values are one device's, and
    no rank needs memory for more than its shard.
    """
    grid = stacks.grid
    if grid is None:
        _draw(stacks, None, stacks.device)
        return
    mine, first = torch.default_generator.get_state(), _state_of_first_rank(grid)
    generator = torch.Generator().set_state(first)
    _draw(stacks, generator, generator.device)
    if torch.equal(mine, first):  # the next tables get other values, as on one device
        torch.default_generator.set_state(generator.get_state())


def _draw(stacks: Stacks, generator: torch.Generator | None, device: torch.device) -> None:
    for number, table in enumerate(stacks.tiling.tables):
        bound = table.num_embeddings**-0.5
        step = max(1, _CHUNK_NUMBERS // table.embedding_dim)
        for first in range(0, table.num_embeddings, step):
            shape = (min(step, table.num_embeddings - first), table.embedding_dim)
            rows = torch.empty(shape, dtype=stacks.dtype, device=device)
            rows.uniform_(-bound, bound, generator=generator)
            stacks.fill_rows(number, first, rows)


def _state_of_first_rank(grid: Grid) -> torch.Tensor:
    state = torch.default_generator.get_state().to(grid.device_type)
    with because("state of the random numbers", implicit=False):
        return agreed(collectives.broadcast(localize(grid, state), 0, grid, 0)).cpu()


# -- watched -------------------------------------------------------------------------------------
# The parameters of many tables: was one replaced, and how often were they written to?
#
# Counters answer both, so that a step need not look at each parameter.


class Watched(dict[str, Any]):
    """A dict of a module's parameters or submodules.

    Modules, and all code that replaces their parameters, write to these dicts. While the count
    stays the same, no parameter was replaced.

    >>> parameters, before = Watched(weight=1), Watched.num_changes
    >>> parameters["weight"] = 2
    >>> Watched.num_changes - before
    1
    """

    #: Changes of all such dicts.
    num_changes = 0


def _counted(name: str) -> Any:
    change = getattr(dict, name)

    def counted(self: Watched, *args: Any, **kwargs: Any) -> Any:
        Watched.num_changes += 1
        return change(self, *args, **kwargs)

    return counted


for _name in (
    "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update",
):  # fmt: skip
    setattr(Watched, _name, _counted(_name))


class WriteCount:
    """Counts writes to parameters that are DTensors: those made here share a version counter."""

    def __init__(self) -> None:
        self._source = VersionSource.make()
        self._sharing: dict[int, torch.Tensor] = {}
        #: Parameters that came later, which have separate counters.
        self._apart: list[torch.Tensor] = []

    def parameter(self, value: torch.Tensor, *, trained: bool) -> torch.nn.Parameter:
        shares = self._source.share(value)
        made = torch.nn.Parameter(value, requires_grad=trained)
        if shares:
            self._sharing[id(made)] = made
        return made

    def follow(self, parameters: list[torch.Tensor]) -> None:
        """Count writes to these."""
        self._apart = [each for each in parameters if id(each) not in self._sharing]

    def add(self) -> None:
        """Count a write to all of them."""
        torch.autograd.graph.increment_version([self._source, *self._apart])

    def __reduce__(self) -> Any:
        """Copies of parameters have their own counters."""
        return WriteCount, ()
