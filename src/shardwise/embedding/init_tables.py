"""Initial values of tables."""

from __future__ import annotations

import torch

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.embedding.stacks import Stacks
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import localize

#: Numbers drawn at a time: 16 MB.
_CHUNK_NUMBERS = 1 << 22


def draw_tables(stacks: Stacks, generator: torch.Generator | None = None) -> None:
    """Draw a table of n rows uniformly between -1/√n and 1/√n.

    Every rank draws all rows, some at a time, and keeps those that it owns: the values are those of
    one device, and no rank needs memory for more than its shard.
    """
    device = stacks.device if generator is None else generator.device
    for number, table in enumerate(stacks.tiling.tables):
        bound = table.num_embeddings**-0.5
        step = max(1, _CHUNK_NUMBERS // table.embedding_dim)
        for first in range(0, table.num_embeddings, step):
            shape = (min(step, table.num_embeddings - first), table.embedding_dim)
            rows = torch.empty(shape, dtype=stacks.dtype, device=device)
            rows.uniform_(-bound, bound, generator=generator)
            stacks.fill_rows(number, first, rows)


def generator_of_first_rank(grid: Grid) -> torch.Generator:
    """A generator with the state of the first rank's default one, which is left as it is."""
    state = torch.default_generator.get_state().to(grid.device_type)
    with because("state of the random numbers", implicit=False):
        state = agreed(collectives.broadcast(localize(grid, state), 0, grid, 0))
    return torch.Generator().set_state(state.cpu())
