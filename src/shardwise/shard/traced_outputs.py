"""Outputs that are laid out in compiled code.

Note [Outputs in compiled code]
How much the others put out is not known before they say so, and it decides what a rank's block of
the joint tensor is. So laying out is one op with effects, as in Note [Sharded modules in compiled
code], whose result has a size that the graph learns when it runs. In a simulated world all ranks'
sizes are at hand, and so are those of the result. A gradient has the shape of what this rank put
out, which is known in both.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.chunks import Size, lengths
from shardwise.core.grid import Grid, read_grid, spelled_grid
from shardwise.core.once import differentiated_once
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.sources import source_digest
from shardwise.core.untraced import UntracedFunction
from shardwise.core.world import world_caches
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ShardwiseError, UnsupportedError
from shardwise.exchange.effects import check_place, install, with_autograd
from shardwise.shard.blocks import blocks_of, held_blocks
from shardwise.shard.group import home_grid
from shardwise.shard.outputs import OutputPlan, arranged, joined, joint_tiling, parted, shared
from shardwise.shard.spec import ChunkShardingSpec, EnumerableShardingSpec, ShardingSpec
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import device_type_of, make_tiling
from shardwise.shard.to_come import (
    SpecToCome,
    TilingToCome,
    has_one_block,
    local_of,
    new_extent,
    one_size,
    over,
)
from shardwise.shard.traced import INSTEAD, apart
from shardwise.shard.traced_call import joined as together
from shardwise.shard.traced_call import (
    read_roster,
    read_spec,
    spelled_roster,
    spelled_spec,
)
from shardwise.simulation.parts import (
    from_parts,
    held_like,
    is_per_rank,
    on_rank,
    parts_of,
    roster_of,
)
from shardwise.simulation.ranks import my_coordinate, one_for_all, own_roster, present
from shardwise.simulation.roster import Roster

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("lay_out(Tensor output, str plan) -> Tensor")
_library.define(
    "own_output(str plan, Tensor[] own) -> Tensor[]", tags=(torch.Tag.dynamic_output_shape,)
)
_library.define(
    "own_output_backward(str plan, Tensor shapes, Tensor[] grads, SymInt[] sizes) -> Tensor[]"
)
_ops: Any = torch.ops.shardwise


@dataclass(frozen=True, slots=True)
class Output:
    """A plan for one output, and who puts it out."""

    plan: OutputPlan
    grid: Grid | None
    #: Who holds which part of what was put out; None for a plain tensor.
    roster: Roster | None = None

    @property
    def ranks(self) -> Grid:
        assert self.grid is not None, "a spec names the ranks of a group"
        return self.grid

    @property
    def spec(self) -> ShardingSpec:
        assert self.plan.spec is not None, "without a spec nothing is laid out"
        return self.plan.spec

    def text(self) -> str:
        plan = self.plan
        return json.dumps(
            {
                "code": source_digest(),
                "where": plan.where,
                "spec": None if plan.spec is None else spelled_spec(plan.spec),
                "local": plan.local,
                "grad_reduction": plan.grad_reduction,
                "grid": None if self.grid is None else spelled_grid(self.grid),
                "roster": spelled_roster(self.roster),
            }
        )

    def whole(self) -> Roster | None:
        """Each rank has a part of its own."""
        return own_roster(self.ranks)


@functools.lru_cache(maxsize=1024)
def read_output(text: str) -> Output:
    read = json.loads(text)
    spec = None if read["spec"] is None else read_spec(read["spec"])
    plan = OutputPlan(read["where"], spec, read["local"], read["grad_reduction"])
    grid = None if read["grid"] is None else read_grid(read["grid"])
    return Output(plan, grid, read_roster(read["roster"]))


world_caches.append(read_output.cache_clear)


def output_text(plan: OutputPlan, process_group: Any) -> str:
    """A plan as an op of a graph can carry it: the same in every process."""
    if plan.spec is None:
        return Output(plan, None).text()
    return Output(plan, home_grid(process_group, device_type_of(plan.spec))).text()


# -- while tracing -------------------------------------------------------------------------------


def _lay_out(output: torch.Tensor, text: str) -> torch.Tensor:
    """`lay_out` as a compiler reads it."""
    known = read_output(text)
    if isinstance(output, DTensor):
        if output._layout.symbolic and not isinstance(output, ShardedTensor):
            return _of_symbolic_size(output, known.plan)
        return arranged(output, known.plan)
    if all(type(part) in (torch.Tensor, torch.nn.Parameter) for part in parts_of(output)):
        return arranged(joined(output, known.ranks, known.plan.grad_reduction), known.plan)
    check_place("a sharded module", INSTEAD)
    known = Output(known.plan, known.grid, roster_of(output))
    if known.plan.local:
        _check_one_size(known, parts_of(output))
    elif not has_one_block(known.spec):
        raise UnsupportedError(
            f"output_plan of {known.plan.where!r} as {known.spec}, in compiled code: what a rank "
            "holds depends on what other ranks put out. Compile without fullgraph=True, or choose "
            "a ChunkShardingSpec that names every rank once."
        )
    return TracedOutput.apply(output, known)


def _of_symbolic_size(x: Any, plan: OutputPlan) -> torch.Tensor:
    """A DTensor without a spec: a spec of its own cannot have symbols for sizes."""
    if plan.spec is not None:
        raise UnsupportedError(
            f"output_plan of {plan.where!r}, which puts out a DTensor of changing size, in "
            "compiled code: the pieces of a spec have fixed sizes. Compile with dynamic=False, or "
            "without fullgraph=True."
        )
    (placement,) = x.placements
    ordered = x if placement.is_shard() else x.redistribute(placements=[ShardPlacement(0)])
    return shared(ordered.to_local(), len(x._layout.grid.ranks), plan)


def _check_one_size(known: Output, own: Sequence[torch.Tensor]) -> None:
    """Ranks that one process plays share one graph."""
    if known.whole() is not None:
        first, *others = _simulated_shapes(known, own)
        if any(list(shape) != list(first) for shape in others):
            asked = f"The output of {known.plan.where!r} as local tensors of {known.spec}"
            raise UnsupportedError(one_size(asked))


class TracedOutput(UntracedFunction):
    """`apply(output, known)`; see Note [Outputs in compiled code]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, known: Output) -> torch.Tensor:
        ctx.known, ctx.text, ctx.plain = known, known.text(), not is_per_rank(x)
        *blocks, extent, shapes = _ops.own_output(ctx.text, parts_of(x))
        ctx.sizes = [size for shape in _each_shape(known, parts_of(x)) for size in shape]
        ctx.save_for_backward(shapes)
        whole = known.whole()
        if known.plan.local:
            return together(iter(blocks), whole)
        local = from_parts(blocks, whole)
        shape = (extent.shape[0], *x.shape[1:])
        tiling = TilingToCome(SpecToCome(known.spec, known.ranks), shape, extent)
        ctx.made = over(ShardedTensor, local, tiling)
        ctx.made.grad_reduction = known.plan.grad_reduction
        return ctx.made

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: Any) -> Any:
        (shapes,) = ctx.saved_tensors
        whole = ctx.known.whole()
        if not ctx.known.plan.local:
            grad = local_of(grad, ctx.made, "A gradient")
        grads = parts_of(held_like(grad, whole))
        found = iter(_ops.own_output_backward(ctx.text, shapes, grads, ctx.sizes))
        own = together(found, whole)
        return one_for_all(own) if ctx.plain else own, None


# -- what the ops do -----------------------------------------------------------------------------


def _forward(text: str, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    known = read_output(text)
    with with_autograd(enabled=False):
        x = together(iter(own), known.roster).detach()
        joint = joined(x, known.ranks, known.plan.grad_reduction)
        found: Any = arranged(joint, known.plan)
    blocks = found if known.plan.local else blocks_of(found._tiling, found._local)
    parts = [part.clone() for part in parts_of(apart(blocks, known.whole()))]
    shapes = torch.tensor([box.shard_sizes for box in joint._tiling.boxes])
    return [*parts, new_extent(parts[0], joint.shape[0]), shapes]


def _backward(
    text: str, shapes: torch.Tensor, grads: Sequence[torch.Tensor], sizes: Sequence[int]
) -> list[torch.Tensor]:
    known = read_output(text)
    plan, grid = known.plan, known.ranks
    source = joint_tiling(shapes.tolist(), grid)
    target = make_tiling(known.spec, source.shape, grid)
    factor = len(grid.ranks) if plan.grad_reduction == "mean" else 1
    with with_autograd(enabled=False):
        grad = together(iter(grads), known.whole())
        held = held_blocks(target, grad / factor if plan.local else grad)
        own = parted(ShardedTensor.over(held, target), source, factor)
    return [part.clone() for part in parts_of(apart(own, known.whole()))]


# -- what the ops would do: shapes alone ---------------------------------------------------------


def _each_shape(known: Output, own: Sequence[torch.Tensor]) -> list[Sequence[Size]]:
    """The shapes that the ranks present put out."""
    x = from_parts(own, known.roster)
    return [on_rank(x, rank).shape for rank in present(known.ranks)]


def _forward_shapes(text: str, own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    known = read_output(text)
    if known.whole() is not None:
        found, num_rows = _simulated_shapes(known, own), _num_rows(_each_shape(known, own))
    else:
        num_rows = _size_to_come()
        found = [_shape_to_come(known, own[0].shape, num_rows)]
    blocks = [own[0].new_empty(shape) for shape in found]
    shapes = torch.empty((len(known.ranks.ranks), own[0].dim()), dtype=torch.int64, device="cpu")
    return [*blocks, new_extent(own[0], num_rows), shapes]


def _simulated_shapes(known: Output, own: Sequence[torch.Tensor]) -> list[Sequence[Size]]:
    """The ranks' blocks, where all of them are present."""
    shapes = _each_shape(known, own)
    joint = (_num_rows(shapes), *shapes[0][1:])
    return [_block_shape(known, rank, joint) for rank in known.ranks.ranks]


def _num_rows(shapes: Sequence[Sequence[Size]]) -> Size:
    return sum(shape[0] for shape in shapes if shape)


def _shape_to_come(known: Output, shape: Sequence[Size], num_rows: Size) -> Sequence[Size]:
    """This rank's block; how long it is along dim 0 depends on what others put out."""
    rank = known.ranks.ranks[my_coordinate(known.ranks)[0]]
    if isinstance(known.plan.spec, EnumerableShardingSpec) or not shape:
        return _block_shape(known, rank, shape)
    block = _block_shape(known, rank, (0, *shape[1:]))
    cut = isinstance(known.spec, ChunkShardingSpec) and known.spec.dim in (0, -len(shape))
    return (_size_to_come() if cut else num_rows, *block[1:])


def _size_to_come() -> Size:
    """A size that a graph learns when it runs.

    `new_dynamic_size` of torch.library would ask whether sizes may be like that at all, which
    torch.compile says no to without fullgraph=True.
    """
    from torch.fx.experimental.symbolic_shapes import _constrain_range_for_size

    shape_env: Any = torch.library.get_ctx()._shape_env
    size = shape_env.create_unbacked_symint()
    _constrain_range_for_size(size, min=0)
    return size


def _block_shape(known: Output, rank: int, shape: Sequence[Size]) -> Sequence[Size]:
    """A rank's block of a joint tensor. What does not fit is found out when the op runs."""
    spec, ndim = known.plan.spec, len(shape)
    if isinstance(spec, EnumerableShardingSpec):
        return _enumerated(known, rank) or shape
    assert isinstance(spec, ChunkShardingSpec), "there are two kinds of specs"
    if not -ndim <= spec.dim < ndim:
        return shape
    dim = spec.dim % ndim
    chunks = zip(spec.placements, lengths(shape[dim], len(spec.placements), None), strict=True)
    block = list(shape)
    block[dim] = sum(length for place, length in chunks if place.rank == rank)
    return block


def _enumerated(known: Output, rank: int) -> Sequence[int] | None:
    """A rank's block where the spec lists boxes."""
    spec: Any = known.plan.spec
    ends = [
        [o + s for o, s in zip(b.shard_offsets, b.shard_sizes, strict=True)] for b in spec.shards
    ]
    try:
        tiling = make_tiling(spec, tuple(map(max, zip(*ends, strict=True))), known.ranks)
    except ShardwiseError:
        return None
    return None if tiling.blocks is None else tiling.block_shape(rank)


def _backward_shapes(
    text: str, shapes: torch.Tensor, grads: Sequence[torch.Tensor], sizes: Sequence[Size]
) -> list[torch.Tensor]:
    ndim = shapes.shape[1]
    return [
        grads[number].new_empty(sizes[number * ndim : (number + 1) * ndim])
        for number in range(len(grads))
    ]


for _name, _fn, _fake in (
    ("own_output", _forward, _forward_shapes),
    ("own_output_backward", _backward, _backward_shapes),
):
    install(_library, _name, _fn, _fake)
_library.impl("lay_out", _lay_out, "CompositeImplicitAutograd")
