"""Outputs that are laid out in compiled code.

Note [Outputs in compiled code]
A rank's shard of the joint tensor depends on the sizes of the other ranks' outputs. So laying out
is one op, as in Note [Effect ops], whose result has a data-dependent size. In a simulated world all
ranks' sizes are known, and so are those of the result. A gradient has the shape of this rank's
output, which is known in both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.code_version import source_digest
from shardwise.core.encode import decode_grid, encode_grid
from shardwise.core.mesh import Grid
from shardwise.core.once import differentiated_once
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.sizes import Size, lengths
from shardwise.core.untraced import UntracedFunction
from shardwise.core.world import world_caches
from shardwise.dtensor.tensor import DTensor
from shardwise.effects.effect_op import EffectOp
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.lookup.exchange import ranks_present
from shardwise.ops.lookup.embedding_rules import unknown_length
from shardwise.shard.compile import INSTEAD, WHAT
from shardwise.shard.outputs import OutputPlan, in_local_loss, joined, place_output
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    ShardingSpec,
    decode_spec,
    encode_spec,
)
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import device_type_of, home_grid, make_tiling
from shardwise.shard.unbacked import (
    UnbackedSpec,
    UnbackedTiling,
    has_one_shard,
    local_of,
    new_extent,
    one_size,
    over,
)
from shardwise.simulation.parts import sized
from shardwise.simulation.ranks import one_tensor, part_per_rank

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("lay_out(Tensor output, str plan) -> Tensor")


@dataclass(frozen=True, slots=True)
class Output:
    """A plan for one output, and the mesh of its ranks."""

    plan: OutputPlan
    grid: Grid | None

    @property
    def ranks(self) -> Grid:
        assert self.grid is not None, "a spec names the ranks of a group"
        return self.grid

    @property
    def spec(self) -> ShardingSpec:
        assert self.plan.spec is not None, "without a spec nothing is laid out"
        return self.plan.spec


def output_text(plan: OutputPlan, process_group: Any) -> str:
    """A plan as an argument of an op: the same text in every process."""
    spec, grid = None, None
    if plan.spec is not None:
        spec = encode_spec(plan.spec)
        grid = encode_grid(home_grid(process_group, device_type_of(plan.spec)))
    options = (plan.where, spec, plan.local, plan.grad_reduction)
    return json.dumps({"code": source_digest(), "options": options, "grid": grid})


def _decode(options: Any, grid: Grid | None) -> Output:
    where, spec, local, grad_reduction = options
    spec = None if spec is None else decode_spec(spec)
    return Output(OutputPlan(where, spec, local, grad_reduction), grid)


@functools.lru_cache(maxsize=1024)
def _decode_text(text: str) -> tuple[Any, Output]:
    """The options of a plan, encoded and decoded."""
    content = json.loads(text)
    grid = None if content["grid"] is None else decode_grid(content["grid"])
    return content["options"], _decode(content["options"], grid)


world_caches.append(_decode_text.cache_clear)


# -- while tracing -------------------------------------------------------------------------------


def _lay_out(output: torch.Tensor, text: str) -> torch.Tensor:
    """`lay_out` in a traced program."""
    options, known = _decode_text(text)
    if isinstance(output, DTensor):
        if output._layout.symbolic and not isinstance(output, ShardedTensor):
            return _of_symbolic_size(output, known.plan)
        return place_output(output, known.plan)
    own = part_per_rank(known.ranks, output)
    if all(type(part) in (torch.Tensor, torch.nn.Parameter) for part in own):
        return place_output(joined(output, known.ranks, known.plan.grad_reduction), known.plan)
    if known.plan.local:
        _check_one_size(known, [part.shape for part in own])
    elif not has_one_shard(known.spec):
        raise UnsupportedError(
            f"output_plan of {known.plan.where!r} as {known.spec}, in compiled code: what a rank "
            "holds depends on what other ranks put out. Compile without fullgraph=True, or choose "
            "a ChunkShardingSpec that names every rank once."
        )
    shard, extent = _LAID_OUT(known.ranks, options, {"own": output})
    return shard if known.plan.local else _Sharded.apply(shard, extent, own[0].shape[1:], known)


def _of_symbolic_size(x: Any, plan: OutputPlan) -> torch.Tensor:
    """A DTensor of symbolic size: a spec cannot have symbols for sizes."""
    if plan.spec is not None:
        raise UnsupportedError(
            f"output_plan of {plan.where!r}, which puts out a DTensor of changing size, in "
            "compiled code: the boxes of a spec have fixed sizes. Compile with dynamic=False, or "
            "without fullgraph=True."
        )
    (placement,) = x.placements
    ordered = x if placement.is_shard() else x.redistribute(placements=[ShardPlacement(0)])
    return in_local_loss(ordered.to_local(), len(x._layout.grid.ranks), plan)


def _check_one_size(known: Output, own: Sequence[Sequence[Size]]) -> None:
    """The ranks of a simulated world share one graph."""
    if len(own) == len(known.ranks.ranks):
        first, *others = _shard_shapes(known, own)
        if any(list(shape) != list(first) for shape in others):
            asked = f"The output of {known.plan.where!r} as local tensors of {known.spec}"
            raise UnsupportedError(one_size(asked))


class _Sharded(UntracedFunction):
    """`apply(shard, extent, shape of a row, known)`: an unbacked sharded tensor."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, extent: torch.Tensor, row: Sequence[Size], known: Output
    ) -> ShardedTensor:
        grid = known.ranks
        first, *_ = part_per_rank(grid, extent)
        local = one_tensor(grid, part_per_rank(grid, shard.detach()), sized=False)
        tiling = UnbackedTiling(UnbackedSpec(known.spec, grid), (first.shape[0], *row), first)
        ctx.made = over(ShardedTensor, local, tiling, known.plan)
        return ctx.made

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: Any) -> Any:
        return sized(local_of(grad, ctx.made, "A gradient")), None, None, None


# -- the op --------------------------------------------------------------------------------------


def _run(known: Output, own: torch.Tensor) -> list[torch.Tensor]:
    joint = joined(own, known.ranks, known.plan.grad_reduction)
    found: Any = place_output(joint, known.plan)
    shard = found if known.plan.local else found.local_tensor()
    return [shard, new_extent(shard, joint.shape[0])]


def _shapes(
    known: Output, _: Any, ranks: Sequence[dict[str, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    like, own = ranks[0]["own"], [rank["own"].shape for rank in ranks]
    if len(own) == len(known.ranks.ranks):
        num_rows, found = _num_rows(own), _shard_shapes(known, own)
    else:
        num_rows = unknown_length(like)
        found = _shard_shapes(known, [(0, *own[0][1:])])
        if isinstance(known.spec, ChunkShardingSpec):
            cut = known.spec.dim in (0, -len(own[0]))
            found = [(unknown_length(like) if cut else num_rows, *found[0][1:])]
    return [[like.new_empty(shape), new_extent(like, num_rows)] for shape in found]


def _num_rows(shapes: Sequence[Sequence[Size]]) -> Size:
    return sum(shape[0] for shape in shapes if shape)


def _shard_shapes(known: Output, own: Sequence[Sequence[Size]]) -> Sequence[Sequence[Size]]:
    """Of the ranks present. What does not fit raises when the op runs."""
    shape, spec = (_num_rows(own), *own[0][1:]), known.spec
    ranks, ndim = [known.ranks.ranks[place] for place in ranks_present(known.ranks)], len(shape)
    if isinstance(spec, EnumerableShardingSpec):
        return [_enumerated(known, rank) or shape for rank in ranks]
    assert isinstance(spec, ChunkShardingSpec), "there are two kinds of specs"
    if not -ndim <= spec.dim < ndim:
        return [shape for _ in ranks]
    dim, found = spec.dim % ndim, []
    sizes = lengths(shape[dim], len(spec.placements), None)
    for rank in ranks:
        chunks = zip(spec.placements, sizes, strict=True)
        mine = sum(length for place, length in chunks if place.rank == rank)
        found.append((*shape[:dim], mine, *shape[dim + 1 :]))
    return found


def _enumerated(known: Output, rank: int) -> Sequence[int] | None:
    """The shape of a rank's shard where the spec lists boxes."""
    spec: Any = known.plan.spec
    ends = [
        [o + s for o, s in zip(b.shard_offsets, b.shard_sizes, strict=True)] for b in spec.shards
    ]
    try:
        tiling = make_tiling(spec, tuple(map(max, zip(*ends, strict=True))), known.ranks)
    except ShardwiseError:
        return None
    return None if tiling.split is None else tiling.shard_shape(rank)


_LAID_OUT = EffectOp("lay_out", WHAT, _run, _shapes, INSTEAD, _decode)
_library.impl("lay_out", _lay_out, "CompositeImplicitAutograd")
