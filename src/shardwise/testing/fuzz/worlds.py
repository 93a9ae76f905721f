"""The two worlds that a program runs in: their leaves and conversions.

On one device a conversion is a copy. Writes after a conversion are therefore undefined: the
generator writes to neither side of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise.core.layout import canonical_order, contiguous_stride, make_layout, normalize
from shardwise.core.mesh import grid_of
from shardwise.core.placements import REPLICATE, Partial, Placement
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.testing.compare import gathered
from shardwise.testing.layouts import scatter


def values(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0, high: int = 5
) -> torch.Tensor:
    """The values of a leaf: bounded, and the same for the same seed.

    Floats are distinct odd multiples of 1/32: exact in every dtype, without ties, none of them 0.
    Integers are below `high`.

    >>> values((4,), torch.float32)
    tensor([ 0.7812,  0.9062, -0.9062, -1.7812])
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        real = torch.float64
        parts = [values(shape, real, seed + offset) for offset in (0, 1000)]
        return torch.complex(*parts).to(dtype)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, high, shape, generator=generator).to(dtype)
    num = math.prod(shape)
    # An odd multiple within ±2 as long as there are enough of them.
    places = torch.randperm(max(num, 64), generator=generator)[:num]
    return ((2 * places + 1 - max(num, 64)).double() / 32).reshape(shape).to(dtype)


Placements = Sequence[Placement]


class OneDevice:
    """Plain torch."""

    def leaf(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: Placements,
        seed: int = 0,
        *,
        order: tuple[int, ...] | None = None,
        grad: bool = False,
        high: int = 5,
    ) -> Any:
        # A copy: `values` may return a view, which would not be an ordinary leaf.
        return values(shape, dtype, seed, high).clone().requires_grad_(grad)

    def redistribute(self, x: Any, placements: Placements, order: Any = None) -> Any:
        return x.clone()

    def full_tensor(self, x: Any) -> Any:
        return x.clone()

    def round_trip(self, x: Any) -> Any:
        return x.clone()

    def from_whole(self, x: Any) -> Any:
        return x.clone()

    def distribute(self, x: Any, placements: Placements) -> Any:
        return x.detach().clone()

    def weighted(self, x: Any) -> Any:
        """A weighted sum, so that entries have different gradients."""
        return (x * _weights(x)).sum()

    def read(self, x: Any) -> Any:
        """What one device would hold."""
        return x


class Sharded(OneDevice):
    """DTensors on a mesh of the given shape, in the current simulated world."""

    def __init__(self, mesh: tuple[int, ...]) -> None:
        self.mesh = init_device_mesh("cpu", mesh)
        self.grid = grid_of(self.mesh)

    def leaf(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        placements: Placements,
        seed: int = 0,
        *,
        order: tuple[int, ...] | None = None,
        grad: bool = False,
        high: int = 5,
    ) -> DTensor:
        """A new leaf, Partial ones included; no redistribution takes part."""
        normal = normalize(placements, shape, self.grid, order)
        stride = contiguous_stride(shape)
        layout = make_layout(self.grid, normal, shape, stride, dtype, order)
        local = scatter(values(shape, dtype, seed, high), layout)
        return DTensor._wrap(local, layout).requires_grad_(grad)

    def redistribute(self, x: DTensor, placements: Placements, order: Any = None) -> DTensor:
        """In other placements; never the tensor itself, and dense as a copy on one device is."""
        moved = x.redistribute(placements=placements, order=order)
        return cast(DTensor, moved.clone()) if moved is x or _has_gaps(moved) else moved

    def full_tensor(self, x: DTensor) -> torch.Tensor:
        """The whole on every rank."""
        return x.full_tensor()

    def round_trip(self, x: DTensor) -> DTensor:
        """`to_local` and `from_local`, where that is the same tensor again."""
        layout = x._layout
        terms = {p.reduce_op for p in layout.placements if isinstance(p, Partial)}
        if terms - {"sum"} or layout.order != canonical_order(layout.placements, None):
            x = x.redistribute(placements=[REPLICATE] * len(layout.placements))
        x = cast(DTensor, x.clone())  # strides with gaps are lost, as on one device
        local = x.to_local()
        return DTensor.from_local(
            local, self.mesh, x.placements, shape=tuple(x.shape), stride=x.stride()
        )

    def from_whole(self, x: torch.Tensor) -> DTensor:
        """What `full_tensor` gave, or was computed from it, as a replicated DTensor."""
        return DTensor.from_local(x, self.mesh, [REPLICATE] * self.mesh.ndim)

    def distribute(self, x: torch.Tensor, placements: Placements) -> DTensor:
        """A new DTensor of a plain tensor that every rank has."""
        return distribute_tensor(x.detach(), self.mesh, placements)

    def weighted(self, x: torch.Tensor) -> Any:
        """The same weighted sum of what one device would hold."""
        weights = _weights(x)
        return (x * (self.from_whole(weights) if isinstance(x, DTensor) else weights)).sum()

    def read(self, x: Any) -> Any:
        """What one device would hold."""
        return gathered([x])[0]


def _has_gaps(x: torch.Tensor) -> bool:
    """Whether a clone has other strides: some dims are expanded, or entries left out."""
    like = torch.empty_strided(x.shape, x.stride(), device="meta")
    return torch.empty_like(like).stride() != x.stride()


def _weights(x: torch.Tensor) -> torch.Tensor:
    """Multiples of 1/8, which every dtype holds exactly."""
    return ((torch.arange(x.numel()) % 7 + 1) / 8).to(x.dtype).reshape(x.shape)
