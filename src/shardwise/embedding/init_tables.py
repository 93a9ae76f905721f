"""The first values of tables."""

from __future__ import annotations

import torch

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.embedding.stacks import Stacks
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import localize

#: Numbers that are drawn at a time: sixteen megabytes.
_CHUNK_NUMBERS = 1 << 22


def draw_tables(stacks: Stacks, generator: torch.Generator | None = None) -> None:
    """Uniform numbers, of a table with n rows within one over the root of n.

    All numbers of a table are drawn, some rows at a time, and each rank keeps those that it owns:
    the numbers are those of one device, and no rank needs room for more than its part.
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
    """One that goes on where torch's stands on the first rank of a mesh; torch's stays there."""
    state = torch.default_generator.get_state().to(grid.device_type)
    with because("state of the random numbers", implicit=False):
        state = agreed(collectives.broadcast(localize(grid, state), 0, grid, 0))
    return torch.Generator().set_state(state.cpu())
