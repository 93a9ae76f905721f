"""The lookup engine: ids go to the owners of rows, rows come back, then gradients go to the owners.

The front doors say which tables lie where (a `Route`), and hold the weights. They are collections
(`embedding`), sharded modules (`shard`) and DTensors (`ops.lookup`), of which the last use
the parts that need no table of their own: `ids` and `exchange`. Everything here handles
the ranks present, one after another: one in a real process, all in a simulated world.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise._torch.functions import foreach_mul
from shardwise.core.mesh import Grid
from shardwise.lookup.backends.backend import Backend, Lookups
from shardwise.lookup.ids import edges_of, repeated, segment_sums
from shardwise.lookup.messages import SplitIds
from shardwise.lookup.prefetch import PrefetchQueue
from shardwise.lookup.routing import OutputPiece, Route, RowGroup
from shardwise.lookup.scratch import Lent
from shardwise.lookup.step import (
    RankStep,
    by_stack,
    exchange,
    look_up,
    weight_gradients,
    weights_train,
)
from shardwise.simulation.ranks import part_per_rank

#: `weights[i][k]` is stack k of the i-th rank present.
Weights = Sequence[Sequence[torch.Tensor]]


@dataclass(slots=True, kw_only=True)
class Engine:
    """What a lookup works with."""

    route: Route
    grid: Grid | None
    backend: Backend
    #: The factor of gradients: one over the number of ranks, or one.
    scale: float
    #: Batches whose ids are sent while rows or gradients are exchanged.
    queue: PrefetchQueue = field(default_factory=PrefetchQueue)
    #: The send buffer of both directions.
    scratch: Lent = field(default_factory=Lent)
    #: The dtype in which rows and gradients are sent; None: that of the tables.
    exchange_dtype: torch.dtype | None = None

    def rows(
        self, weights: Weights, steps: Sequence[RankStep], joined: bool
    ) -> list[list[torch.Tensor]]:
        """Per rank present, one tensor per feature; with `joined`, one with all side by side."""
        answers, local_rows = [], []
        for step, mine in zip(steps, weights, strict=True):
            flat, local = look_up(step, mine, self.backend, self.scratch)
            answers.append(flat)
            local_rows.append(local)
        received = self._exchange(steps, answers, back=False)
        return [
            assemble_output(step, flat, local, joined)
            for step, flat, local in zip(steps, received, local_rows, strict=True)
        ]

    def gradients(
        self,
        weights: Weights,
        steps: Sequence[RankStep],
        grads: Sequence[torch.Tensor | None],
        joined: bool,
    ) -> tuple[list[Lookups], list[torch.Tensor] | None]:
        """Per rank present, the lookups in its stacks with the gradients of their bags, and the
        gradient of its weights of ids, if any rank's require grad.

        `grads` are those of the outputs. Lookups in replicated stacks are its own alone.
        """
        route, grid = self.route, self.grid
        per_rank: list[list[torch.Tensor | None]] = [list(grads)]
        if grid is not None:
            empty: list[Any] = [None] * len(steps)
            columns = [empty if g is None else part_per_rank(grid, g) for g in grads]
            per_rank = [list(row) for row in zip(*columns, strict=True)]
        buffers, local_rows = [], []
        for step, each in zip(steps, per_rank, strict=True):
            flat, local = flatten_gradients(step, each, self.scale, joined, self.scratch)
            buffers.append(flat)
            local_rows.append(local)
        received = self._exchange(steps, buffers, back=True)
        lookups: list[Lookups] = []
        for step, flat, local in zip(steps, received, local_rows, strict=True):
            stacks = route.tiling.stacks[step.rank]
            found = by_stack(step.of_rows, flat) | local
            lookups.append(
                {k: (step.query(k), rows.view(-1, stacks[k].width)) for k, rows in found.items()}
            )
        if not weights_train(steps):
            return lookups, None
        # Before any row changes. The weights are this rank's own: no mean over ranks.
        of_weights = weight_gradients(route, grid, steps, weights, lookups, self.backend)
        return lookups, [part / self.scale for part in of_weights]

    def _exchange(
        self, steps: Sequence[RankStep], buffers: Sequence[torch.Tensor], *, back: bool
    ) -> list[torch.Tensor]:
        return exchange(
            "gradients of rows" if back else "rows of tables",
            self.route,
            self.grid,
            [step.of_rows for step in steps],
            buffers,
            back=back,
            dtype=self.exchange_dtype,
            meanwhile=self.queue.send_ids,
        )


# -- output --------------------------------------------------------------------------------------
# Assemble a collection's output from received rows, and flatten its gradient the same way.
#
# Columns from several ranks are concatenated. Where rows of a table are on several ranks, pooled
# results are partial sums, which are added; unpooled, each row goes to the position of its id.


def assemble_output(
    step: RankStep, flat: torch.Tensor, local: dict[int, torch.Tensor], joined: bool
) -> list[torch.Tensor]:
    """One tensor per feature, or one with all of them side by side, from the received rows."""
    route, counts = step.route, step.num_rows
    by_strips = joined and route.has_strips
    whole = flat.new_empty(int(counts[0]), sum(route.dims)) if by_strips else flat
    parts: list[Any] = [None] * route.columns.num_parts
    for piece, found in step.by_piece(flat.split(step.of_rows.wanted), local):
        rows = [each.view(-1, piece.width) for each in found]
        if by_strips:
            assert piece.strip is not None, "every piece has one"
            _rows_of(step, piece, rows, out=piece.strip.of(whole))
            continue
        split = _rows_of(step, piece, rows).split(counts[piece.features].tolist())
        parts[piece.parts] = split
    in_order = () if by_strips else route.columns.in_order(parts)
    if joined:
        whole = whole if by_strips else torch.cat(in_order, 1)
        _average(step, [whole], joined)
        return [whole]
    outputs = [
        in_order[mine.start] if mine.stop - mine.start == 1 else torch.cat(in_order[mine], 1)
        for mine in route.columns.of_feature
    ]
    _average(step, outputs, joined)
    repeats = step.packed.repeats
    return outputs if repeats is None else repeats.spread(outputs)


def _rows_of(
    step: RankStep,
    piece: OutputPiece,
    found: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of a piece from those of its blocks, in `out` or perhaps in the first of these."""
    if isinstance(piece, RowGroup) and step.packed.sums(piece):
        total = found[0]
        for more in found[1:-1]:
            total.add_(more)
        last, out = found[-1], total if out is None else out
        return torch.add(total.view(out.shape), last.view(out.shape), out=out)
    rows = found[0]
    if isinstance(piece, RowGroup):
        split, rows = step.packed.split[piece.group], torch.cat(list(found))
        rows = _pooled_here(split, rows) if step.packed.route.pooled else split.in_batch(rows)
    return rows if out is None else out.copy_(rows.view(out.shape))


def _pooled_here(split: SplitIds, rows: torch.Tensor) -> torch.Tensor:
    """The sums of bags, from a row for each id; see Note [Rows instead of sums]."""
    if split.once is not None:
        places = split.once.places
    else:
        places = torch.empty_like(split.order)
        places[split.order] = torch.arange(rows.shape[0], device=rows.device)
    return segment_sums(rows, places, edges_of(split.bag_lengths), split.bag_weights)


def _spread_out(split: SplitIds, grad: torch.Tensor) -> torch.Tensor:
    """The gradients of bags as those of the rows that `_pooled_here` sums, in their order."""
    once, order = split.once, split.order if split.once is None else split.once.order
    bags = repeated(split.bag_lengths, order.shape[0]).index_select(0, order)
    if once is not None:
        weights = split.bag_weights
        return segment_sums(grad, bags, once.starts, None if weights is None else weights[order])
    rows = grad.index_select(0, bags)
    return rows if split.weights is None else rows.mul_(split.weights.to(rows.dtype).unsqueeze(1))


def flatten_gradients(
    step: RankStep,
    grads: Sequence[torch.Tensor | None],
    scale: float,
    joined: bool,
    scratch: Lent,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The gradients of received rows, flat as those came, and of local rows by stack."""
    if step.packed.repeats is not None:
        grads = step.packed.repeats.summed(grads)
    route, counts, device = step.route, step.num_rows, step.bags.values.device
    flat = scratch.numbers(sum(step.of_rows.wanted), route.dtype, device)
    own = {
        block.stack: flat.new_empty(step.own_requests[block.stack].query.num_bags, block.width)
        for block in route.local_blocks[step.rank]
    }
    there = _of_sums(step, grads, joined)
    copy = _copy_of_gradients(route, there, scale, joined)
    for piece, targets in step.by_piece(flat.split(step.of_rows.wanted), own):
        first, *others = (target.view(-1, piece.width) for target in targets)
        if isinstance(piece, RowGroup) and not step.packed.sums(piece):
            rows = flat.new_empty(int(counts[piece.features].sum()), piece.width)
            copy(piece, rows)
            split = step.packed.split[piece.group]
            rows = _spread_out(split, rows) if route.pooled else rows.index_select(0, split.order)
            sizes = [target.shape[0] for target in (first, *others)]
            for target, part in zip((first, *others), rows.split(sizes), strict=True):
                target.copy_(part)
        else:
            copy(piece, first)
            for target in others:  # owners of other rows get the same
                target.copy_(first)
    return flat, own


def _of_sums(
    step: RankStep, grads: Sequence[torch.Tensor | None], joined: bool
) -> list[torch.Tensor]:
    """Gradients of the outputs as those of sums; zeros for missing ones."""
    route, counts, dims = step.route, step.num_rows.tolist(), step.route.dims
    if joined:
        counts, dims = counts[:1], [sum(dims)]
    nothing = torch.zeros((), dtype=route.dtype, device=step.bags.values.device)
    there = [
        nothing.expand(num, dim) if grad is None else grad
        for num, dim, grad in zip(counts, dims, grads, strict=True)
    ]
    for place in {0} if joined and route.means else route.means:
        there[place] = there[place].clone()
    _average(step, there, joined)
    return there


def _copy_of_gradients(
    route: Route, grads: Sequence[torch.Tensor], scale: float, joined: bool
) -> Callable[[OutputPiece, torch.Tensor], None]:
    """A function that copies the gradients of a piece, times `scale`."""
    columns = route.columns
    if joined and route.has_strips:

        def copy_strip(piece: OutputPiece, rows: torch.Tensor) -> None:
            assert piece.strip is not None, "every piece has one"
            of_features = piece.strip.of(grads[0])
            torch.mul(of_features, scale, out=rows.view(of_features.shape))

        return copy_strip
    of_outputs = [slice(None)] if joined else columns.of_feature
    in_order: list[torch.Tensor] = []
    for grad, mine in zip(grads, of_outputs, strict=True):
        in_order += grad.split(columns.widths[mine], dim=1)
    parts = columns.numbered(in_order)

    def copy(piece: OutputPiece, rows: torch.Tensor) -> None:
        torch.cat(parts[piece.parts], out=rows)
        if scale != 1:
            rows.mul_(scale)

    return copy


def _average(step: RankStep, outputs: Sequence[torch.Tensor], joined: bool) -> None:
    """Divide the bags of features with mean pooling by their lengths, in place."""
    means = step.route.means
    if not means:
        return
    per_feature = outputs[0].split(step.route.dims, dim=1) if joined else outputs
    lengths = [step.bags.lengths_of(feature) for feature in means]
    factors = torch.cat(lengths).clamp(min=1).to(torch.float64).reciprocal_().to(outputs[0].dtype)
    parts = factors.unsqueeze(1).split([length.shape[0] for length in lengths])
    foreach_mul([per_feature[feature] for feature in means], list(parts))
