"""The output of a lookup from the rows that arrived, and its gradient in the form of those rows.

Columns from several ranks are concatenated. Where rows of a table are on several ranks, pooled
results are partial sums, which are added; unpooled, each row goes to the position of its id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise._torch.functions import foreach_mul
from shardwise.lookup.ids import edges_of, repeated, segment_sums
from shardwise.lookup.messages import RankBatch, SplitIds
from shardwise.lookup.routing import OutputPiece, RowGroup
from shardwise.lookup.scratch import Lent

#: The rows of each piece, by the number of its first part.
_Made = dict[int, tuple[OutputPiece, torch.Tensor]]


def assemble_output(
    batch: RankBatch, flat: torch.Tensor, local: dict[int, torch.Tensor], joined: bool
) -> list[torch.Tensor]:
    """One tensor per feature, or one with all of them side by side, from the received rows."""
    route, counts = batch.route, batch.num_sent
    by_strips = joined and route.has_strips
    whole = flat.new_empty(int(counts[0]), sum(route.dims)) if by_strips else flat
    made: _Made = {}
    for piece, found in batch.by_piece(flat.split(batch.of_rows.wanted), local):
        rows = [each.view(-1, piece.width) for each in found]
        if by_strips:
            _rows_of(batch, piece, rows, out=piece.strip_of(whole))
            continue
        made[piece.parts.start] = piece, _rows_of(batch, piece, rows)
    if joined:
        whole = whole if by_strips else torch.cat(_in_order(batch, made), 1)
        _average(batch, [whole], joined)
        return [whole]
    outputs = _of_features(batch, made)
    _average(batch, outputs, joined)
    repeats = batch.repeats
    return outputs if repeats is None else repeats.spread(outputs)


def _in_order(batch: RankBatch, made: _Made) -> list[torch.Tensor]:
    """The parts of all features in the order of columns, from the rows of pieces."""
    columns = batch.route.columns
    parts: list[Any] = [None] * len(columns.widths)
    for piece, rows in made.values():
        parts[piece.parts] = rows.split(batch.num_sent[piece.features].tolist())
    return list(columns.in_order(parts))


def _of_features(batch: RankBatch, made: _Made) -> list[torch.Tensor]:
    columns = batch.route.columns
    if columns.by_features:  # all columns of some features at once
        outputs: list[torch.Tensor] = []
        for pieces in columns.by_features:
            rows = [made[piece.parts.start][1] for piece in pieces]
            whole = rows[0] if len(rows) == 1 else torch.cat(rows, 1)
            outputs += whole.split(batch.num_sent[pieces[0].features].tolist())
        return list(columns.from_pieces(outputs))
    parts = _in_order(batch, made)
    return [
        parts[mine.start] if mine.stop - mine.start == 1 else torch.cat(parts[mine], 1)
        for mine in columns.of_feature
    ]


def _rows_of(
    batch: RankBatch,
    piece: OutputPiece,
    found: Sequence[torch.Tensor],
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The rows of a piece from those of its blocks, in `out` or perhaps in the first of these."""
    if isinstance(piece, RowGroup) and batch.sums(piece):
        total = found[0]
        for more in found[1:-1]:
            total.add_(more)
        last, out = found[-1], total if out is None else out
        return torch.add(total.view(out.shape), last.view(out.shape), out=out)
    rows = found[0]
    if isinstance(piece, RowGroup):
        split, rows = batch.split[piece.group], torch.cat(list(found))
        rows = _pooled_here(split, rows) if batch.route.pooled else split.in_batch(rows)
    return rows if out is None else out.copy_(rows.view(out.shape))


def _pooled_here(split: SplitIds, rows: torch.Tensor) -> torch.Tensor:
    """The sums of bags, from a row for each id; see Note [Rows instead of sums]."""
    return segment_sums(rows, split.places, edges_of(split.bag_lengths), split.bag_weights)


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
    batch: RankBatch,
    grads: Sequence[torch.Tensor | None],
    scale: float,
    joined: bool,
    scratch: Lent,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The gradients of received rows, flat as those came, and of local rows by stack."""
    if batch.repeats is not None:
        grads = batch.repeats.summed(grads)
    route, counts, device = batch.route, batch.num_sent, batch.bags.values.device
    flat = scratch.numbers(sum(batch.of_rows.wanted), route.dtype, device)
    own = {
        block.stack: flat.new_empty(batch.own_requests[block.stack].query.num_bags, block.width)
        for block in route.local_blocks[batch.rank]
    }
    copy = _copy_of_gradients(batch, _without_gaps(batch, grads, joined), scale, joined)
    for piece, targets in batch.by_piece(flat.split(batch.of_rows.wanted), own):
        first, *others = (target.view(-1, piece.width) for target in targets)
        if not isinstance(piece, RowGroup) or batch.sums(piece):
            copy(piece, first)
            for target in others:  # owners of other rows get the same
                target.copy_(first)
            continue
        rows = flat.new_empty(int(counts[piece.features].sum()), piece.width)
        copy(piece, rows)
        split = batch.split[piece.group]
        rows = _spread_out(split, rows) if route.pooled else rows.index_select(0, split.order)
        sizes = [target.shape[0] for target in (first, *others)]
        for target, part in zip((first, *others), rows.split(sizes), strict=True):
            target.copy_(part)
    return flat, own


def _without_gaps(
    batch: RankBatch, grads: Sequence[torch.Tensor | None], joined: bool
) -> list[torch.Tensor]:
    """Gradients of the outputs; zeros for missing ones."""
    route, counts, dims = batch.route, batch.num_sent.tolist(), batch.route.dims
    if joined:
        counts, dims = counts[:1], [sum(dims)]
    nothing = torch.zeros((), dtype=route.dtype, device=batch.bags.values.device)
    return [
        nothing.expand(num, dim) if grad is None else grad
        for num, dim, grad in zip(counts, dims, grads, strict=True)
    ]


def _copy_of_gradients(
    batch: RankBatch, grads: Sequence[torch.Tensor], scale: float, joined: bool
) -> Callable[[OutputPiece, torch.Tensor], None]:
    """A function that copies the gradients of a piece as those of sums, times `scale`."""
    route, columns = batch.route, batch.route.columns

    def factor(piece: OutputPiece) -> torch.Tensor:
        return torch.cat(piece.of_features(batch.factors)).mul_(scale)

    if joined and route.has_strips:

        def copy_strip(piece: OutputPiece, rows: torch.Tensor) -> None:
            of_features = piece.strip_of(grads[0])
            each = factor(piece).view(*of_features.shape[:2], 1) if route.means else scale
            torch.mul(of_features, each, out=rows.view(of_features.shape))

        return copy_strip
    of_outputs = [slice(None)] if joined else columns.of_feature
    in_order: list[torch.Tensor] = []
    for grad, mine in zip(grads, of_outputs, strict=True):
        widths = columns.widths[mine]
        in_order += [grad] if len(widths) == 1 else grad.split(widths, dim=1)
    parts = columns.numbered(in_order)

    def copy(piece: OutputPiece, rows: torch.Tensor) -> None:
        torch.cat(parts[piece.parts], out=rows)
        if route.means:
            rows.mul_(factor(piece))
        elif scale != 1:
            rows.mul_(scale)

    return copy


def _average(batch: RankBatch, outputs: Sequence[torch.Tensor], joined: bool) -> None:
    """Divide the bags of features with mean pooling by their lengths, in place."""
    means = batch.route.means
    if not means:
        return
    per_feature = outputs[0].split(batch.route.dims, dim=1) if joined else outputs
    factors = [batch.factors[feature] for feature in means]
    foreach_mul([per_feature[feature] for feature in means], factors)
