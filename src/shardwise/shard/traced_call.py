"""A call of an own batch as text: what one op of a compiled graph can carry besides tensors."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.grid import Grid, read_grid, spelled_grid
from shardwise.core.sources import source_digest
from shardwise.core.world import current_world, world_caches
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.shard.tiling import Tiling, make_tiling
from shardwise.simulation.parts import from_parts
from shardwise.simulation.ranks import own_roster
from shardwise.simulation.roster import Roster, make_roster


@dataclass(frozen=True, slots=True)
class Call:
    """One call, but for its tensors. Its text is the same in every process and on every rank."""

    what: str
    tiling: Tiling
    grad_reduction: str
    #: Whether it writes to the weight.
    writes: bool
    options: dict[str, Any]
    #: Names of the tensors that ranks bring, and who holds which part: None for a plain tensor.
    given: dict[str, Roster | None]
    held: Roster | None
    #: The name of the dtype that linear layers are cast to, if any.
    autocast_dtype: str | None

    @property
    def grid(self) -> Grid:
        return self.tiling.grid

    @property
    def sparse(self) -> bool:
        """Whether the weight's gradient holds only the rows that were looked up."""
        return bool(self.options.get("sparse"))

    def text(self) -> str:
        tiling, grid = self.tiling, self.grid
        return json.dumps(
            {
                "code": source_digest(),
                "what": self.what,
                "spec": spelled_spec(tiling.spec),
                "shape": tiling.shape,
                "grid": spelled_grid(grid),
                "grad_reduction": self.grad_reduction,
                "writes": self.writes,
                "options": self.options,
                "given": {name: spelled_roster(roster) for name, roster in self.given.items()},
                "held": spelled_roster(self.held),
                "autocast_dtype": self.autocast_dtype,
            }
        )

    def autocast(self) -> Any:
        """As it was where the call stood."""
        kind, dtype = self.grid.device_type, self.autocast_dtype
        if dtype is None:
            return torch.autocast(kind, enabled=False)
        return torch.autocast(kind, dtype=getattr(torch, dtype))

    def sorted_parts(self, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What ranks bring, by name, out of all parts."""
        left = iter(parts)
        return {name: joined(left, roster) for name, roster in self.given.items()}

    def whole(self) -> Roster | None:
        """Each rank has a part of its own."""
        return own_roster(self.grid)


def spelled_roster(roster: Roster | None) -> Any:
    return None if roster is None else (roster.ranks, roster.index)


def spelled_spec(spec: ShardingSpec) -> Any:
    if isinstance(spec, ChunkShardingSpec):
        return spec.dim, list(map(repr, spec.placements))
    assert isinstance(spec, EnumerableShardingSpec), "there are two kinds of specs"
    return [(b.shard_offsets, b.shard_sizes, repr(b.placement)) for b in spec.shards]


def read_spec(spelled: Any) -> ShardingSpec:
    if isinstance(spelled[0], int):
        return ChunkShardingSpec(*spelled)
    return EnumerableShardingSpec([ShardMetadata(*box) for box in spelled])


@functools.lru_cache(maxsize=1024)
def read_call(text: str) -> Call:
    read = json.loads(text)
    return Call(
        read["what"],
        make_tiling(read_spec(read["spec"]), tuple(read["shape"]), read_grid(read["grid"])),
        read["grad_reduction"],
        read["writes"],
        read["options"],
        {name: read_roster(spelled) for name, spelled in read["given"].items()},
        read_roster(read["held"]),
        read["autocast_dtype"],
    )


world_caches.append(read_call.cache_clear)


def read_roster(spelled: Any) -> Roster | None:
    if spelled is None:
        return None
    ranks, index = spelled
    return make_roster(current_world(), tuple(ranks), tuple(index))


def joined(parts: Any, roster: Roster | None, sized: bool = True) -> torch.Tensor:
    """The tensor of all ranks; not `sized` where it goes into a distributed one."""
    num = 1 if roster is None else roster.num_parts
    return from_parts([next(parts) for _ in range(num)], roster, sized)
