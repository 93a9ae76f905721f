"""The gradient of the weights of ids: the dot product of each id's row and its bag's gradient.

After the exchange of gradients, a row's owner has both. So owners compute one number per id and
send it back to the rank that requested the id; owners of different columns send partial sums.
Ranks whose weights do not require grad get none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.embedding.backends.backend import Backend
from shardwise.embedding.backends.by_row import products_of_rows
from shardwise.embedding.exchange.gradients import Lookups
from shardwise.embedding.exchange.routing import FeatureRoute, Route
from shardwise.embedding.exchange.step import RankStep
from shardwise.lookup.exchange import finished, start_exchange

#: The weights flag of a note; see `routing._note`.
_WANTED = 2


def weights_train(steps: Sequence[RankStep]) -> bool:
    """Whether the weights of any rank require grad: the same on every rank."""
    return any(_wanted_by(step, place) for step in steps for place in range(len(step.notes)))


def _wanted_by(step: RankStep, place: int) -> bool:
    return int(step.notes[place, -1]) == _WANTED


def weight_gradients(
    route: Route,
    grid: Grid | None,
    steps: Sequence[RankStep],
    tables: Sequence[Sequence[torch.Tensor]],
    lookups: Sequence[Lookups],
    local_lookups: Sequence[Lookups],
    backend: Backend,
) -> list[torch.Tensor]:
    """Per rank present, one number for each of its ids."""
    answers, local_rows = [], []
    for place, step in enumerate(steps):
        answers.append(_answers(route, step, _along(tables[place], lookups[place], backend)))
        local_rows.append(_along(tables[place], local_lookups[place], backend))
    if grid is not None and route.travels:
        sent = [_num_answered(step, route.num_ranks) for step in steps]
        wanted = [_num_wanted(step) for step in steps]
        with because("gradients of the weights of ids", implicit=False):
            answers = finished(grid, start_exchange(grid, answers, sent, wanted))
    return [
        _put_back(route, step, flat, local)
        for step, flat, local in zip(steps, answers, local_rows, strict=True)
    ]


def _along(
    tables: Sequence[torch.Tensor], lookups: Lookups, backend: Backend
) -> dict[int, torch.Tensor]:
    """Per stack, one number for each id: its row times its bag's gradient."""
    own = getattr(backend, "weight_gradient", products_of_rows)
    return {k: own(tables[k], query, grad) for k, (query, grad) in lookups.items()}


def _num_answered(step: RankStep, num_ranks: int) -> list[int]:
    """How many numbers this rank sends to each rank."""
    return [
        sum(request.num_ids[place] for request in step.requests.values())
        if _wanted_by(step, place)
        else 0
        for place in range(num_ranks)
    ]


def _num_wanted(step: RankStep) -> list[int]:
    """How many numbers each rank sends to this one."""
    wanted = step.bags.weights_train
    return [sum(counts) if wanted else 0 for counts in step.packed.ids_per_leg]


def _answers(route: Route, step: RankStep, along: dict[int, torch.Tensor]) -> torch.Tensor:
    """By requesting rank, then by stack, as the ids came."""
    parts = {k: found.split(step.requests[k].num_ids) for k, found in along.items()}
    chosen = [
        of_stack[place]
        for place in range(route.num_ranks)
        if _wanted_by(step, place)
        for of_stack in parts.values()
    ]
    if not chosen:
        return torch.empty(0, dtype=torch.float32, device=step.bags.values.device)
    return torch.cat(chosen).to(torch.float32)


def _put_back(
    route: Route, step: RankStep, flat: torch.Tensor, local: dict[int, torch.Tensor]
) -> torch.Tensor:
    bags = step.bags
    dtype = flat.dtype if bags.weights is None else bags.weights.dtype
    found = torch.zeros(bags.values.shape[0], dtype=dtype, device=flat.device)
    if not bags.weights_train:
        return found  # only others wanted theirs
    at = 0
    for rank, legs in enumerate(route.legs):
        for place, leg in enumerate(legs):
            num = step.packed.ids_per_leg[rank][place]
            part = flat[at : at + num].to(dtype)
            at += num
            target = found[bags.ids_from[leg.feature] : bags.ids_to[leg.feature]]
            if leg.split:
                target.index_add_(0, step.packed.positions[rank, leg.feature], part)
            else:
                target += part
    for leg, part in _local_parts(route, step, local):
        found[bags.ids_from[leg.feature] : bags.ids_to[leg.feature]] += part.to(dtype)
    return found


def _local_parts(
    route: Route, step: RankStep, local: dict[int, torch.Tensor]
) -> Iterator[tuple[FeatureRoute, torch.Tensor]]:
    at = dict.fromkeys(local, 0)
    for leg in route.local[step.rank]:
        k, num = leg.shard.stack, step.bags.num_ids(leg.feature)
        yield leg, local[k][at[k] : at[k] + num]
        at[k] += num
