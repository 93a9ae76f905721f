"""Assemble a collection's output from received rows, and flatten its gradient the same way.

Columns from several ranks are concatenated. Where rows of a table are on several ranks, pooled
results are partial sums, which are added; unpooled, each row goes to the position of its id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.embedding.exchange.routing import FeatureRoute, Route
from shardwise.embedding.exchange.scratch import Scratch
from shardwise.embedding.exchange.step import RankStep, leg_views, local_views


def assemble_output(
    route: Route, step: RankStep, flat: torch.Tensor, local: dict[int, torch.Tensor], joined: bool
) -> list[torch.Tensor]:
    """One tensor per feature, or one with all of them side by side, from the received rows."""
    targets = _Targets(route, step, flat.dtype, flat.device, joined)
    for leg, rows, positions in leg_views(route, step, flat):
        targets.put(leg, rows, positions)
    for leg, rows in local_views(route, step, local):
        targets.put(leg, rows, None)
    targets.finish()
    for feature, factor in _mean_factors(route, step):
        targets.of(feature).mul_(factor.to(flat.dtype))
    return targets.outputs()


class _Targets:
    """Where the rows of each feature go."""

    def __init__(
        self, route: Route, step: RankStep, dtype: torch.dtype, device: torch.device, joined: bool
    ) -> None:
        self.route, self.step, self.dtype, self.device = route, step, dtype, device
        self.dims = _dims(route)
        self.begun: set[int] = set()
        #: The first partial sum of a feature, until the second one comes.
        self.waiting: dict[int, torch.Tensor] = {}
        self.found: dict[int, torch.Tensor] = {}
        self.whole: torch.Tensor | None = None
        if joined:
            num = step.bags.num_bags[0]
            self.whole = torch.empty(num, sum(self.dims), dtype=dtype, device=device)
            self.found = dict(enumerate(self.whole.split(self.dims, dim=1)))

    def of(self, feature: int) -> torch.Tensor:
        if feature not in self.found:
            bags = self.step.bags
            num = bags.num_bags[feature] if self.route.pooled else bags.num_ids(feature)
            shape = (num, self.dims[feature])
            self.found[feature] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.found[feature]

    def put(self, leg: FeatureRoute, rows: torch.Tensor, positions: torch.Tensor | None) -> None:
        feature, (start, end) = leg.feature, leg.shard.columns
        dim = self.route.tiling.tables[leg.table].embedding_dim
        if not leg.split and end - start == dim and feature not in self.found:
            self.found[feature] = rows  # the only one: no copy
            return
        target = self.of(feature)
        part = target if end - start == dim else target[:, start:end]
        if positions is not None:
            part.index_copy_(0, positions, rows)
        elif not leg.split:
            part.copy_(rows)
        elif feature in self.begun:
            part.add_(rows)
        elif feature in self.waiting:
            torch.add(self.waiting.pop(feature), rows, out=part)
            self.begun.add(feature)
        else:
            self.waiting[feature] = rows

    def finish(self) -> None:
        """Write the partial sums that no second one was added to."""
        for feature, rows in self.waiting.items():
            self.of(feature).copy_(rows)

    def outputs(self) -> list[torch.Tensor]:
        if self.whole is not None:
            return [self.whole]
        return [self.of(feature) for feature in range(self.route.num_features)]


def flatten_gradients(
    route: Route,
    step: RankStep,
    grads: Sequence[torch.Tensor | None],
    scale: float,
    joined: bool,
    scratch: Scratch,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The gradients of received rows, flat as those came, and of local rows by stack."""
    sample = next(grad for grad in grads if grad is not None)
    per_feature: list[torch.Tensor | None] = list(grads)
    if joined:
        per_feature = list(sample.split(_dims(route), dim=1))
    for feature, factor in _mean_factors(route, step):
        grad = per_feature[feature]
        per_feature[feature] = None if grad is None else grad * factor.to(grad.dtype)
    flat = scratch.numbers(_flat_size(route, step), sample.dtype, sample.device)
    written: dict[int, torch.Tensor] = {}
    for leg, rows, positions in leg_views(route, step, flat):
        if leg.feature in written:
            rows.copy_(written[leg.feature])
            continue
        _scaled_into(rows, per_feature[leg.feature], leg, positions, scale)
        if leg.split and positions is None:
            written[leg.feature] = rows  # owners of other rows get the same
    local = {
        k: torch.empty(
            request.total_rows,
            route.tiling.stacks[step.rank][k].width,
            dtype=sample.dtype,
            device=sample.device,
        )
        for k, request in step.local_requests.items()
    }
    for leg, rows in local_views(route, step, local):
        _scaled_into(rows, per_feature[leg.feature], leg, None, scale)
    return flat, local


def _scaled_into(
    rows: torch.Tensor,
    grad: torch.Tensor | None,
    leg: FeatureRoute,
    positions: torch.Tensor | None,
    scale: float,
) -> None:
    if grad is None:
        rows.zero_()
        return
    start, end = leg.shard.columns
    part = grad[:, start:end]
    if positions is not None:
        torch.mul(part.index_select(0, positions), scale, out=rows)
    elif scale == 1:
        rows.copy_(part)
    else:
        torch.mul(part, scale, out=rows)


def _flat_size(route: Route, step: RankStep) -> int:
    total = 0
    for rank, legs in enumerate(route.legs):
        for place, leg in enumerate(legs):
            num = (
                step.bags.num_bags[leg.feature]
                if route.pooled
                else step.packed.ids_per_leg[rank][place]
            )
            total += num * leg.shard.width
    return total


def _mean_factors(route: Route, step: RankStep) -> list[tuple[int, torch.Tensor]]:
    """For features with mean pooling, one over the length of each bag, as a column."""
    found: list[tuple[int, torch.Tensor]] = []
    if not route.pooled:
        return found
    for feature, table in enumerate(route.feature_tables):
        if route.tiling.tables[table].pooling == "mean":
            lengths = step.bags.lengths_of(feature).clamp(min=1)
            found.append((feature, lengths.to(torch.float64).reciprocal_().unsqueeze(1)))
    return found


def _dims(route: Route) -> list[int]:
    return [route.tiling.tables[t].embedding_dim for t in route.feature_tables]
