"""Running steps on local tensors: all of them, or in two parts around the last collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise._torch.dispatch import autocast_off, is_autocast
from shardwise.comm.collectives import doing_now, is_lost, what_ranks_did
from shardwise.core.layout import Layout
from shardwise.core.mesh import Coordinate
from shardwise.errors import CollectiveError
from shardwise.redistribute.moves import PREPARE, Run
from shardwise.redistribute.steps import Step, local_bytes
from shardwise.simulation.ranks import each_rank


def execute(local: torch.Tensor, steps: Sequence[Step]) -> torch.Tensor:
    """The local tensor after `steps`. It may share memory with `local` when nothing was sent."""
    return prepare(steps)(local)


def prepare(steps: Sequence[Step]) -> Run:
    """`execute` for these steps; what depends on the layouts alone is computed here, once.

    Autocast must not cast the concatenation around a collective (`_named`). The ops that slice and
    restride are not among those that it casts.
    """
    if steps and steps[0].source.grid.outside:
        return _unchanged
    return _chain(_runs(steps))


def _unchanged(local: torch.Tensor) -> torch.Tensor:
    """All that a rank outside the mesh does."""
    return local


def prepare_async(steps: Sequence[Step]) -> tuple[Run, Run]:
    """`execute` in two: up to the start of the last collective, and the rest."""
    last = max(number for number, step in enumerate(steps) if step.communicates)
    move = PREPARE[steps[last].kind](steps[last])
    assert move.finish is not None, "a collective is awaited"
    start = [*_runs(steps[:last], ends=False), _named(steps[last], move.start)]
    finish = [_named(steps[last], move.finish), *_runs(steps[last + 1 :], ends=False)]
    finish = [*finish, *_ending(steps)]
    return _chain(start), _chain(finish)


def _runs(steps: Sequence[Step], *, ends: bool = True) -> list[Run]:
    runs = []
    for step in steps:
        start, finish = PREPARE[step.kind](step)
        runs.append(start if finish is None else _named(step, start, finish))
    return [*runs, *_ending(steps)] if ends else runs


def _ending(steps: Sequence[Step]) -> list[Run]:
    if not steps:
        return []
    target = steps[-1].target
    return [_reorder(target)] if target.memory_order or target.expanded else []


def _chain(runs: Sequence[Run]) -> Run:
    if len(runs) == 1:
        return runs[0]

    def run(local: torch.Tensor) -> torch.Tensor:
        for each in runs:
            local = each(local)
        return local

    return run


def _named(step: Step, start: Run, finish: Run | None = None) -> Run:
    """`start`, then `finish`, without autocast; a failure of the backend names the step."""

    def run(x: torch.Tensor) -> torch.Tensor:
        try:
            if is_autocast():
                with autocast_off():
                    return start(x) if finish is None else finish(start(x))
            return start(x) if finish is None else finish(start(x))
        except RuntimeError as error:
            if is_lost(error):
                raise CollectiveError(_failure(step, error)) from error
            raise

    return run


def _failure(step: Step, error: Exception) -> str:
    source = step.source
    grid, placements = source.grid, source.placements
    num_bytes = int(local_bytes(source.shape, source.dtype.itemsize, placements, grid.shape))
    they_did = what_ranks_did(doing_now(f"{step} of {source!r}"))
    return (
        f"{step} of {source!r}, about {num_bytes:,} bytes per rank, failed on rank "
        f"{grid.world.rank}: {error} {they_did} If this rank has run out of memory, it was the "
        "first to fail; if it timed out, another one was, and its error says why. The ranks are "
        "out of step: end all processes, and start again from a checkpoint."
    )


def _reorder(layout: Layout) -> Run:
    def reorder(_: Coordinate, t: torch.Tensor) -> torch.Tensor:
        return in_memory_order(t, layout)

    return lambda x: each_rank(layout.grid, reorder, x, axes=())


def copied(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy in which the expanded dims of the layout stay expanded."""
    copy = local.clone()
    return _reorder(layout)(copy) if layout.expanded and not layout.grid.outside else copy


def in_memory_order(x: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The same tensor, dense, with its dims in the memory order of the layout.

    Expanded dims of the layout are expanded: an op that derives its result's strides from its
    input's must see the same on every rank as on one device.
    """
    order = layout.memory_order
    shape = x.shape if layout.expanded else ()
    for dim in layout.expanded:
        if type(shape[dim]) is int and shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    if order is None:
        x = x.contiguous()
    else:
        inverse = sorted(range(len(order)), key=lambda i: order[i])
        x = x.permute(order).contiguous().permute(inverse)
    return x.expand(shape) if layout.expanded else x
