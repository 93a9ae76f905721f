"""Local computation between two collectives, with its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.core.mesh import Grid
from shardwise.simulation.ranks import each_rank


class Stage:
    """A function that each rank runs locally, under torch's autograd.

    It returns a tensor that has a gradient, and perhaps more that have none.
    """

    def __init__(self, needs: Sequence[bool]) -> None:
        self.needs = needs
        self.graphs: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}

    def run(
        self, rank: int, fn: Callable[..., tuple[torch.Tensor, ...]], leaves: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        own = [x.detach().requires_grad_(n) for x, n in zip(leaves, self.needs, strict=True)]
        with torch.set_grad_enabled(any(self.needs)):
            result, *more = fn(*own)
        self.graphs[rank] = (own, result)
        return result.detach(), *more

    def backward(self, grid: Grid, grad: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of every leaf; zeros where none is needed or there is none."""

        def here(place: Any, mine: torch.Tensor) -> list[torch.Tensor]:
            leaves, result = self.graphs[grid.ranks[place[0]]]
            wanted = [x for x, need in zip(leaves, self.needs, strict=True) if need]
            found: Any = [None] * len(wanted)
            if result.requires_grad:
                found = torch.autograd.grad(
                    result, wanted, mine, allow_unused=True, retain_graph=True
                )
            grads = iter(found)
            given = [next(grads) if need else None for need in self.needs]
            return [
                torch.zeros_like(x) if g is None else g for x, g in zip(leaves, given, strict=True)
            ]

        return list(each_rank(grid, here, grad))
