"""The weights of a collection: flat stacks, and the tables' parameters as views of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardwise.core.layout import Layout, contiguous_stride, make_layout
from shardwise.core.mesh import Grid
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dtensor.tensor import DTensor
from shardwise.embedding.tiling import TableTiling, Tile
from shardwise.lookup.exchange import ranks_present
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import one_tensor, part_per_rank


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
                torch.empty(stack.num_rows, stack.width, dtype=dtype, device=device)
                for stack in tiling.stacks[rank]
            ]
            for rank in self.ranks
        ]
        # Ranks present share the copies of a table that all of them hold.
        shared: dict[int, torch.Tensor] = {}
        for place, rank in enumerate(self.ranks):
            for k, stack in enumerate(tiling.stacks[rank]):
                if stack.replicated:
                    mine = self.weights[place][k]
                    self.weights[place][k] = shared.setdefault(stack.width, mine)

    def fill(self, table: int, value_of: Callable[[Tile], torch.Tensor]) -> None:
        """Write the values of a table, tile by tile."""
        for place, rank in enumerate(self.ranks):
            tile = self.tiling.tile_on(table, rank)
            if tile is not None:
                self.rows(place, tile).copy_(value_of(tile))

    def fill_rows(self, table: int, first: int, values: torch.Tensor) -> None:
        """Write some whole rows of a table, from `first` on, where ranks present hold them."""
        last = first + values.shape[0]
        for place, rank in enumerate(self.ranks):
            tile = self.tiling.tile_on(table, rank)
            if tile is None:
                continue
            start, end = max(first, tile.rows[0]), min(last, tile.rows[1])
            if start < end:
                part = values[start - first : end - first, tile.columns[0] : tile.columns[1]]
                self.rows(place, tile)[start - tile.rows[0] : end - tile.rows[0]].copy_(part)

    def rows(self, place: int, tile: Tile) -> torch.Tensor:
        """A tile of the i-th rank present, as a view of its stack."""
        return self.weights[place][tile.stack][tile.base : tile.base + tile.num_rows]

    def all(self) -> list[torch.Tensor]:
        """The stacks of all ranks present."""
        return [weight for weights in self.weights for weight in weights]

    def convert(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace each stack by what `fn` makes of it, such as a copy in another dtype."""
        self.weights = [[fn(weight) for weight in weights] for weights in self.weights]
        for weight in self.all():
            self.dtype, self.device = weight.dtype, weight.device

    def layout(self, table: int) -> Layout:
        """How the table's DTensor lies."""
        one, cut = self.tiling.tables[table], self.tiling.cuts[table]
        return self._layout((one.num_embeddings, one.embedding_dim), cut.placement(one))

    def _layout(self, shape: tuple[int, int], placement: Placement) -> Layout:
        assert self.grid is not None, "tables without a mesh have no layout"
        return make_layout(self.grid, (placement,), shape, contiguous_stride(shape), self.dtype)

    def table(self, number: int) -> torch.Tensor:
        """A table as its parameter holds it: a view of the stack, in a DTensor on a mesh."""
        parts = []
        for place, rank in enumerate(self.ranks):
            tile = self.tiling.tile_on(number, rank)
            parts.append(self.nothing_of(number) if tile is None else self.rows(place, tile))
        if self.grid is None:
            return parts[0]
        return self.wrap(number, parts)

    def wrap(self, number: int, parts: Sequence[torch.Tensor]) -> DTensor:
        """The DTensor of a table whose parts are given for each rank present."""
        assert self.grid is not None, "tables without a mesh are plain tensors"
        local = one_tensor(self.grid, _shared(parts), sized=False)
        return DTensor._wrap(local, self.layout(number))

    def wrap_per_row(self, number: int, parts: Sequence[torch.Tensor], shared: bool) -> DTensor:
        """The DTensor of a state with one number per row, on each holder of some columns.

        When the numbers are `shared`, all holders have the same; where those are all ranks, the
        state is replicated. Else it has a column per holder.
        """
        assert self.grid is not None, "states without a mesh are plain tensors"
        one, cut = self.tiling.tables[number], self.tiling.cuts[number]
        local = one_tensor(self.grid, _shared(parts), sized=False)
        placement, num_columns = cut.placement(one), 1
        if cut.by_columns:
            holders = tuple(int(size > 0) for size in cut.sizes)
            copied = shared and all(holders)
            placement = REPLICATE if copied else Shard(1, holders)
            num_columns = 1 if copied else sum(holders)
        return DTensor._wrap(local, self._layout((one.num_embeddings, num_columns), placement))

    def nothing_of(self, number: int) -> torch.Tensor:
        """The part of a rank that owns nothing of a table."""
        one, cut = self.tiling.tables[number], self.tiling.cuts[number]
        shape = (one.num_embeddings, 0) if cut.by_columns else (0, one.embedding_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def holds(self, number: int, parameter: torch.Tensor) -> bool:
        """Whether a parameter is still the view that `table` gave."""
        local = getattr(parameter, "_local", parameter)
        parts = [local] if self.grid is None else part_per_rank(self.grid, local)
        for place, (rank, part) in enumerate(zip(self.ranks, parts, strict=True)):
            tile = self.tiling.tile_on(number, rank)
            if tile is not None:
                stack = self.weights[place][tile.stack]
                start = stack.data_ptr() + tile.base * tile.width * stack.element_size()
                if part.data_ptr() != start or part.dtype != stack.dtype:
                    return False
        return True


def _shared(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of one memory as one object: a simulated world stores and writes them once."""
    seen: dict[tuple[int, torch.Size], torch.Tensor] = {}
    return [
        seen.setdefault((part.data_ptr(), part.shape), part) if part.numel() else part
        for part in parts
    ]


def whole_of(value: DTensor) -> torch.Tensor:
    """All of a sharded table, as a plain tensor."""
    return agreed(value.full_tensor())


def tile_of(values: torch.Tensor) -> Callable[[Tile], torch.Tensor]:
    """Cuts tiles out of a whole table."""
    return lambda tile: values[tile.rows[0] : tile.rows[1], tile.columns[0] : tile.columns[1]]


def states_like(stacks: Stacks, names: Mapping[str, bool]) -> list[list[dict[str, torch.Tensor]]]:
    """Zeros for each state of each stack: one per row, or one for each number of the weight."""
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
                    made[key] = weight.new_zeros(shape)
                state[name] = made[key]
            per_stack.append(state)
        found.append(per_stack)
    return found
