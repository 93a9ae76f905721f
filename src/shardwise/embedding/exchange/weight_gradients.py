"""The gradient of the weights of ids: how far each id's row points along its bag's gradient.

Who owns a row has it and, after the exchange of gradients, that of the bag. So owners compute one
number per id, and send it back the way on which the id came. Owners of different columns of a table
each contribute a part. Weights of ranks that want no gradient get no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.embedding.backends.backend import Backend, Query
from shardwise.embedding.backends.by_row import products_of_rows
from shardwise.embedding.exchange.routing import FeatureRoute, Route
from shardwise.embedding.exchange.step import RankStep
from shardwise.lookup.exchange import finished, start_exchange

_WANTED = 2
#: Per stack: what was looked up, and the gradients of the bags.
Lookups = dict[int, tuple[Query, torch.Tensor]]


def weights_train(visits: Sequence[RankStep]) -> bool:
    """Whether any rank wants the gradient of its weights: the same on all of them."""
    return any(_wanted_by(visit, place) for visit in visits for place in range(len(visit.notes)))


def _wanted_by(visit: RankStep, place: int) -> bool:
    return int(visit.notes[place, -1]) == _WANTED


def weight_gradients(
    route: Route,
    grid: Grid | None,
    visits: Sequence[RankStep],
    tables: Sequence[Sequence[torch.Tensor]],
    asked: Sequence[Lookups],
    at_home: Sequence[Lookups],
    backend: Backend,
) -> list[torch.Tensor]:
    """Per rank present, one number for each of its ids."""
    answers, homes = [], []
    for place, visit in enumerate(visits):
        answers.append(_answers(route, visit, _along(tables[place], asked[place], backend)))
        homes.append(_along(tables[place], at_home[place], backend))
    if grid is not None and route.travels:
        sent = [_num_answered(visit, route.num_ranks) for visit in visits]
        wanted = [_num_wanted(visit) for visit in visits]
        with because("gradients of the weights of ids", implicit=False):
            answers = finished(grid, start_exchange(grid, answers, sent, wanted))
    return [
        _put_back(route, visit, flat, home)
        for visit, flat, home in zip(visits, answers, homes, strict=True)
    ]


def _along(
    tables: Sequence[torch.Tensor], lookups: Lookups, backend: Backend
) -> dict[int, torch.Tensor]:
    """Per stack one number for each id: its row times its bag's gradient."""
    own = getattr(backend, "weight_gradient", products_of_rows)
    return {k: own(tables[k], query, grad) for k, (query, grad) in lookups.items()}


def _num_answered(visit: RankStep, num_ranks: int) -> list[int]:
    """How many numbers this rank sends to each rank."""
    return [
        sum(asked.num_ids[place] for asked in visit.asked.values())
        if _wanted_by(visit, place)
        else 0
        for place in range(num_ranks)
    ]


def _num_wanted(visit: RankStep) -> list[int]:
    """How many numbers each rank sends to this one."""
    wanted = visit.bags.weights_train
    return [sum(counts) if wanted else 0 for counts in visit.packed.ids_per_leg]


def _answers(route: Route, visit: RankStep, along: dict[int, torch.Tensor]) -> torch.Tensor:
    """By asking rank, and then by stack, as the ids came."""
    parts = {k: found.split(visit.asked[k].num_ids) for k, found in along.items()}
    pieces = [
        of_stack[place]
        for place in range(route.num_ranks)
        if _wanted_by(visit, place)
        for of_stack in parts.values()
    ]
    if not pieces:
        return torch.empty(0, dtype=torch.float32, device=visit.bags.values.device)
    return torch.cat(pieces).to(torch.float32)


def _put_back(
    route: Route, visit: RankStep, flat: torch.Tensor, home: dict[int, torch.Tensor]
) -> torch.Tensor:
    bags = visit.bags
    dtype = flat.dtype if bags.weights is None else bags.weights.dtype
    found = torch.zeros(bags.values.shape[0], dtype=dtype, device=flat.device)
    if not bags.weights_train:
        return found  # only others wanted theirs
    at = 0
    for rank, legs in enumerate(route.legs):
        for place, leg in enumerate(legs):
            num = visit.packed.ids_per_leg[rank][place]
            part = flat[at : at + num].to(dtype)
            at += num
            target = found[bags.ids_from[leg.feature] : bags.ids_to[leg.feature]]
            if leg.split:
                target.index_add_(0, visit.packed.positions[rank, leg.feature], part)
            else:
                target += part
    for leg, part in _home_parts(route, visit, home):
        found[bags.ids_from[leg.feature] : bags.ids_to[leg.feature]] += part.to(dtype)
    return found


def _home_parts(
    route: Route, visit: RankStep, home: dict[int, torch.Tensor]
) -> Iterator[tuple[FeatureRoute, torch.Tensor]]:
    at = dict.fromkeys(home, 0)
    for leg in route.home[visit.rank]:
        k, num = leg.tile.stack, visit.bags.num_ids(leg.feature)
        yield leg, home[k][at[k] : at[k] + num]
        at[k] += num
