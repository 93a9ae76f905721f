"""The gradient of the weights of ids: the dot product of each id's row and its bag's gradient.

After the exchange of gradients, a row's owner has both. So owners compute one number per id and
send it back to the rank that requested the id; owners of different columns send partial sums.
Ranks whose weights do not require grad get none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwise._torch.functions import foreach_add
from shardwise.comm.watch import because
from shardwise.core.mesh import Grid
from shardwise.lookup.backends.backend import Backend, Lookups
from shardwise.lookup.backends.by_row import products_of_rows
from shardwise.lookup.bags import FeatureBags
from shardwise.lookup.exchange import finished, start_exchange
from shardwise.lookup.routing import LegBlock, Route, RowGroup
from shardwise.lookup.step import RankStep

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
        wanted = [_num_wanted(route, step) for step in steps]
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


def _num_wanted(route: Route, step: RankStep) -> list[int]:
    """How many numbers each rank sends to this one."""
    if not step.bags.weights_train:
        return [0] * route.num_ranks
    return [sum(step.packed.ids_of(route, block) for block in blocks) for blocks in route.blocks]


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
        return torch.empty(0, dtype=route.weight_dtype, device=step.bags.values.device)
    return torch.cat(chosen).to(route.weight_dtype)


def _put_back(
    route: Route, step: RankStep, flat: torch.Tensor, local: dict[int, torch.Tensor]
) -> torch.Tensor:
    bags = step.bags
    dtype = flat.dtype if bags.weights is None else bags.weights.dtype
    found = torch.zeros(bags.num_given, dtype=dtype, device=flat.device)
    if not bags.weights_train:
        return found  # only others wanted theirs
    targets, packed = _views(bags, found), step.packed
    blocks = [block for each in route.blocks for block in each]
    pieces = flat.to(dtype).split([packed.ids_of(route, block) for block in blocks])
    of_groups: list[list[torch.Tensor]] = [[] for _ in route.groups]
    for block, piece in zip(blocks, pieces, strict=True):
        if block.group < 0:
            _add(targets, block, packed.num_ids, piece)
        else:
            of_groups[block.group].append(piece)
    for group, split, owners in zip(route.groups, packed.split, of_groups, strict=True):
        numbers = torch.cat(owners)
        _add(
            targets,
            group,
            packed.num_ids,
            torch.empty_like(numbers).index_copy_(0, split.order, numbers),
        )
    for block in route.local_blocks[step.rank]:
        _add(targets, block, packed.num_ids, local[block.stack].to(dtype))
    return found


def _views(bags: FeatureBags, found: torch.Tensor) -> list[torch.Tensor]:
    return [found[a:b] for a, b in zip(bags.ids_from, bags.ids_to, strict=True)]


def _add(
    targets: Sequence[torch.Tensor],
    where: LegBlock | RowGroup,
    num_ids: np.ndarray,
    numbers: torch.Tensor,
) -> None:
    """Add a number per id to those of some features."""
    parts = numbers.split(num_ids[where.features].tolist())
    foreach_add(list(where.of_features(targets)), list(parts))
