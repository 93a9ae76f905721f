"""Lays out outputs of modules by a plan's `output_plan` and `return_local_tensor`.

A plain output is this rank's shard of a joint batch: together the outputs are one tensor, split
along dim 0. As in lookups, a plain tensor belongs to a rank's own loss, and a sharded one to the
mean of the losses.

Note [Outputs in compiled code]
A rank's shard of the joint tensor depends on the sizes of the other ranks' outputs. So laying out
is one op with a data-dependent size, as in Note [Effect ops]. In a simulated world all ranks' sizes
are known, and so are those of the result. A gradient has the shape of this rank's output, which is
known in both worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.agreement import backward_error, gather_numbers
from shardwise.core.mesh import Grid
from shardwise.core.placements import Shard as ShardPlacement
from shardwise.core.sizes import Size, lengths
from shardwise.core.untraced import UntracedFunction, differentiated_once, untraced
from shardwise.dtensor.tensor import DTensor
from shardwise.effects import EffectOp, decode_call
from shardwise.errors import ArgumentError, LayoutError, ShardwiseError, UnsupportedError
from shardwise.lookup.exchange import ranks_present
from shardwise.ops.lookup.rank_bags import unknown_length
from shardwise.shard.functions import ScaleGradient, in_own_loss
from shardwise.shard.moves import with_spec
from shardwise.shard.spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    decode_spec,
    device_type_of,
    encode_spec,
)
from shardwise.shard.table_lookup import INSTEAD, WHAT
from shardwise.shard.tensor import ShardedTensor
from shardwise.shard.tiling import group_grid, make_tiling
from shardwise.shard.unbacked import (
    UnbackedSpec,
    UnbackedTiling,
    has_one_shard,
    make_unbacked,
    matching_local,
    new_extent,
    size_mismatch_text,
)
from shardwise.simulation.ranks import (
    one_tensor,
    part_per_rank,
    sized,
)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """A plan for the output of one module."""

    where: str
    #: None: the module puts out a DTensor, which keeps its layout.
    spec: Any
    local: bool
    grad_reduction: str
    #: In compiled code, the ranks of the spec.
    grid: Any = None


@untraced
def lay_out(output: Any, plan: OutputPlan, process_group: Any, form: str) -> Any:
    """The output in the plan's spec; this rank's shard of it with `plan.local`.

    `form` encodes the plan for compiled graphs: a compiler traces this function.
    """
    if not isinstance(output, torch.Tensor):
        raise ArgumentError(
            f"The plan lays out the output of {plan.where!r}, which is a {type(output).__name__}, "
            "not a tensor."
        )
    if plan.spec is None and not isinstance(output, DTensor):
        return output
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.shardwise.lay_out(output, form)
    if plan.spec is not None and not isinstance(output, DTensor):
        grid = group_grid(process_group, device_type_of(plan.spec))
        output = joined(output, grid, plan.grad_reduction)
    return place_output(output, plan)


def place_output(x: Any, plan: OutputPlan) -> torch.Tensor:
    """A DTensor, laid out as the plan says."""
    if plan.spec is not None:
        x = with_spec(x, ShardedTensor).resharded(plan.spec)
    if not plan.local:
        return x
    shard = with_spec(x, ShardedTensor).local_tensor()
    return in_own_loss(shard, x._layout.grid, plan.grad_reduction)


def joined(x: torch.Tensor, grid: Grid, grad_reduction: str) -> ShardedTensor:
    """The ranks' own tensors as one, sharded along dim 0."""
    what, enabled = "output_plan", torch.is_grad_enabled()

    def describe(mine: torch.Tensor) -> tuple[Sequence[int], str | None]:
        flags = [not enabled, enabled and x.requires_grad]
        if not 1 <= mine.dim() <= 8:
            return [0] * 11, f"an output has 1 to 8 dims, found shape {tuple(mine.shape)}."
        return [*flags, mine.dim(), *mine.shape, *[0] * (8 - mine.dim())], None

    found = gather_numbers(grid, what, describe, x)
    off, trained = ([flags[n] for flags in found] for n in range(2))
    error = backward_error(f"{what}: ", grid.submeshes[0], trained, off)
    if error is not None:
        raise error
    if any(trained) and not x.requires_grad:  # backward of other ranks needs this one's
        x = x.detach().requires_grad_()
    shapes = [tuple(sizes[:ndim]) for _, _, ndim, *sizes in found]
    if len({shape[1:] for shape in shapes}) > 1:
        raise LayoutError(f"{what}: outputs differ in more than their first dim: {shapes}.")
    if grad_reduction == "mean":  # the gradient of a rank's own loss is that of the mean, times n
        x = ScaleGradient.apply(x, len(shapes), 1)
    rows = ShardPlacement(0, tuple(shape[0] for shape in shapes))
    made = with_spec(DTensor.from_local(x, grid.mesh, [rows]), ShardedTensor)
    made.grad_reduction = grad_reduction
    return made


# -- in compiled code ------------------------------------------------------------------------


_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define("lay_out(Tensor output, str plan) -> Tensor")


def output_form(plan: OutputPlan, process_group: Any) -> str:
    """A plan as an argument of an op: the same text in every process."""
    options = {"where": plan.where, "local": plan.local, "grad_reduction": plan.grad_reduction}
    if plan.spec is None:
        return _LAID_OUT.encode(None, options | {"spec": None})
    grid = group_grid(process_group, device_type_of(plan.spec))
    return _LAID_OUT.encode(grid, options | {"spec": encode_spec(plan.spec)})


def _decode(options: Any, grid: Grid | None) -> OutputPlan:
    spec = options["spec"] and decode_spec(options["spec"])
    return OutputPlan(**options | {"spec": spec, "grid": grid})


def _lay_out(output: torch.Tensor, form: str) -> torch.Tensor:
    """`lay_out` in a traced program."""
    _, known = decode_call(_LAID_OUT, form)
    if isinstance(output, DTensor):
        if output._layout.symbolic and not isinstance(output, ShardedTensor):
            return _of_symbolic_size(output, known)
        return place_output(output, known)
    own = part_per_rank(known.grid, output)
    if all(type(part) in (torch.Tensor, torch.nn.Parameter) for part in own):
        return place_output(joined(output, known.grid, known.grad_reduction), known)
    shapes = [part.shape for part in own]
    if known.local and len(own) == len(known.grid.ranks):
        first, *others = _shard_shapes(known, shapes)
        if any(list(shape) != list(first) for shape in others):  # ranks share one graph
            asked = f"The output of {known.where!r} as local tensors of {known.spec}"
            raise UnsupportedError(size_mismatch_text(asked))
    if not known.local and not has_one_shard(known.spec):
        raise UnsupportedError(
            f"output_plan of {known.where!r} as {known.spec}, in compiled code: what a rank "
            "holds depends on what other ranks put out. Compile without fullgraph=True, or choose "
            "a ChunkShardingSpec that names every rank once."
        )
    shard, extent = _LAID_OUT(form, {"own": output})
    return shard if known.local else _Sharded.apply(shard, extent, shapes[0][1:], known)


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
    return in_own_loss(ordered.to_local(), x._layout.grid, plan.grad_reduction)


class _Sharded(UntracedFunction):
    """`apply(shard, extent, shape of a row, known)`: an unbacked sharded tensor."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, extent: torch.Tensor, row: Sequence[Size], known: OutputPlan
    ) -> ShardedTensor:
        grid = known.grid
        first, *_ = part_per_rank(grid, extent)
        local = one_tensor(grid, part_per_rank(grid, shard.detach()), sized=False)
        tiling = UnbackedTiling(UnbackedSpec(known.spec, grid), (first.shape[0], *row), first)
        ctx.made = make_unbacked(ShardedTensor, local, tiling, known)
        return ctx.made

    @staticmethod
    @differentiated_once("a sharded module")
    def backward(ctx: Any, grad: Any) -> Any:
        return sized(matching_local(grad, ctx.made, "A gradient")), None, None, None


def _run(known: OutputPlan, own: torch.Tensor) -> list[torch.Tensor]:
    joint = joined(own, known.grid, known.grad_reduction)
    found: Any = place_output(joint, known)
    shard = found if known.local else found.local_tensor()
    return [shard, new_extent(shard, 0 if known.local else joint.shape[0])]


def _shapes(
    known: OutputPlan, _: Any, ranks: Sequence[dict[str, torch.Tensor]]
) -> list[list[torch.Tensor]]:
    like, own = ranks[0]["own"], [rank["own"].shape for rank in ranks]
    num_rows: Size = sum(shape[0] for shape in own if shape)
    found = _shard_shapes(known, own)
    if len(own) < len(known.grid.ranks):
        in_chunks = isinstance(known.spec, ChunkShardingSpec)
        by_rows = not in_chunks or known.spec.dim in (0, -len(own[0]))
        if not (known.local and by_rows):  # each unknown length is that of a result
            num_rows = unknown_length(like)
        if in_chunks:
            found = [(unknown_length(like) if by_rows else num_rows, *found[0][1:])]
    extent = 0 if known.local else num_rows
    return [[like.new_empty(shape), new_extent(like, extent)] for shape in found]


def _shard_shapes(known: OutputPlan, own: Sequence[Sequence[Size]]) -> list[Sequence[Size]]:
    """The shapes of the ranks present. A shape that does not fit raises when the op runs."""
    whole, spec = (sum(shape[0] for shape in own if shape), *own[0][1:]), known.spec
    ranks = [known.grid.ranks[place] for place in ranks_present(known.grid)]
    if isinstance(spec, EnumerableShardingSpec):
        boxes = [shard.box.spans for shard in spec.shards]
        shape = tuple(max(end for _, end in spans) for spans in zip(*boxes, strict=True))
        try:
            tiling = make_tiling(spec, shape, known.grid)
        except ShardwiseError:
            return [whole for _ in ranks]
        return [tiling.shard_shape(rank) if tiling.split else whole for rank in ranks]
    dim, ndim = spec.dim, len(whole)
    found: list[Sequence[Size]] = []
    if not -ndim <= dim < ndim:
        return [whole for _ in ranks]
    sizes = lengths(whole[dim], len(spec.placements), None)
    for rank in ranks:
        chunks = zip(spec.placements, sizes, strict=True)
        shard = list(whole)
        shard[dim] = sum(length for place, length in chunks if place.rank == rank)
        found.append(shard)
    return found


_LAID_OUT = EffectOp("lay_out", WHAT, _run, _shapes, INSTEAD, _decode)
_library.impl("lay_out", _lay_out, "CompositeImplicitAutograd")
