"""Putting rows together to what a collection returns, and gradients apart again.

Columns of a table that several ranks hold stand side by side. Rows that several ranks hold are
partial sums of bags, which are added; unpooled, each row goes where its id stood.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.embedding.exchange.routing import FeatureRoute, Route
from shardwise.embedding.exchange.scratch import Scratch
from shardwise.embedding.exchange.step import RankStep, home_views, leg_views


def put_together(
    route: Route, visit: RankStep, flat: torch.Tensor, home: dict[int, torch.Tensor], joined: bool
) -> list[torch.Tensor]:
    """One tensor per feature, or one with all of them side by side, from the rows that came."""
    targets = _Targets(route, visit, flat.dtype, flat.device, joined)
    for leg, rows, positions in leg_views(route, visit, flat):
        targets.put(leg, rows, positions)
    for leg, rows in home_views(route, visit, home):
        targets.put(leg, rows, None)
    targets.finish()
    for feature, factor in _mean_factors(route, visit):
        targets.of(feature).mul_(factor.to(flat.dtype))
    return targets.outputs()


class _Targets:
    """Where the rows of each feature go."""

    def __init__(
        self, route: Route, visit: RankStep, dtype: torch.dtype, device: torch.device, joined: bool
    ) -> None:
        self.route, self.visit, self.dtype, self.device = route, visit, dtype, device
        self.dims = _dims(route)
        self.begun: set[int] = set()
        #: The first of several sums of a feature's bags, until the second one comes.
        self.waiting: dict[int, torch.Tensor] = {}
        self.found: dict[int, torch.Tensor] = {}
        self.whole: torch.Tensor | None = None
        if joined:
            num = visit.bags.num_bags[0]
            self.whole = torch.empty(num, sum(self.dims), dtype=dtype, device=device)
            self.found = dict(enumerate(self.whole.split(self.dims, dim=1)))

    def of(self, feature: int) -> torch.Tensor:
        if feature not in self.found:
            bags = self.visit.bags
            num = bags.num_bags[feature] if self.route.pooled else bags.num_ids(feature)
            shape = (num, self.dims[feature])
            self.found[feature] = torch.empty(shape, dtype=self.dtype, device=self.device)
        return self.found[feature]

    def put(self, leg: FeatureRoute, rows: torch.Tensor, positions: torch.Tensor | None) -> None:
        feature, (start, end) = leg.feature, leg.tile.columns
        dim = self.route.tiling.tables[leg.table].embedding_dim
        if not leg.split and end - start == dim and feature not in self.found:
            self.found[feature] = rows  # the only one: as it came
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
        """Write what nothing was added to."""
        for feature, rows in self.waiting.items():
            self.of(feature).copy_(rows)

    def outputs(self) -> list[torch.Tensor]:
        if self.whole is not None:
            return [self.whole]
        return [self.of(feature) for feature in range(self.route.num_features)]


def take_apart(
    route: Route,
    visit: RankStep,
    grads: Sequence[torch.Tensor | None],
    scale: float,
    joined: bool,
    scratch: Scratch,
) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """The gradients of the rows that came, flat as they came, and of those found at home."""
    sample = next(grad for grad in grads if grad is not None)
    per_feature: list[torch.Tensor | None] = list(grads)
    if joined:
        per_feature = list(sample.split(_dims(route), dim=1))
    for feature, factor in _mean_factors(route, visit):
        grad = per_feature[feature]
        per_feature[feature] = None if grad is None else grad * factor.to(grad.dtype)
    flat = scratch.numbers(_flat_size(route, visit), sample.dtype, sample.device)
    written: dict[int, torch.Tensor] = {}
    for leg, rows, positions in leg_views(route, visit, flat):
        if leg.feature in written:
            rows.copy_(written[leg.feature])
            continue
        _scaled_into(rows, per_feature[leg.feature], leg, positions, scale)
        if leg.split and positions is None:
            written[leg.feature] = rows  # whoever holds other rows of the table gets the same
    home = {
        k: torch.empty(
            asked.total_rows,
            route.tiling.stacks[visit.rank][k].width,
            dtype=sample.dtype,
            device=sample.device,
        )
        for k, asked in visit.home.items()
    }
    for leg, rows in home_views(route, visit, home):
        _scaled_into(rows, per_feature[leg.feature], leg, None, scale)
    return flat, home


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
    start, end = leg.tile.columns
    part = grad[:, start:end]
    if positions is not None:
        torch.mul(part.index_select(0, positions), scale, out=rows)
    elif scale == 1:
        rows.copy_(part)
    else:
        torch.mul(part, scale, out=rows)


def _flat_size(route: Route, visit: RankStep) -> int:
    total = 0
    for rank, legs in enumerate(route.legs):
        for place, leg in enumerate(legs):
            num = (
                visit.bags.num_bags[leg.feature]
                if route.pooled
                else visit.packed.ids_per_leg[rank][place]
            )
            total += num * leg.tile.width
    return total


def _mean_factors(route: Route, visit: RankStep) -> list[tuple[int, torch.Tensor]]:
    """For features whose bags are averaged, one over the length of each bag, as a column."""
    found: list[tuple[int, torch.Tensor]] = []
    if not route.pooled:
        return found
    for feature, table in enumerate(route.feature_tables):
        if route.tiling.tables[table].pooling == "mean":
            lengths = visit.bags.lengths_of(feature).clamp(min=1)
            found.append((feature, lengths.to(torch.float64).reciprocal_().unsqueeze(1)))
    return found


def _dims(route: Route) -> list[int]:
    return [route.tiling.tables[t].embedding_dim for t in route.feature_tables]
