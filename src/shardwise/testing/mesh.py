"""Mesh: the axes of a mesh as text, before there is a world."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise.errors import ArgumentError

TENSOR_AXIS = "tp"

#: Up to a million ranks along an axis.
_SIZE = re.compile(r"[1-9][0-9]{0,5}")


@dataclass(frozen=True)
class Mesh:
    """The names and sizes of a mesh's axes, before there is a world.

    >>> Mesh.parse("dp=2,tp=4")
    Mesh(names=('dp', 'tp'), sizes=(2, 4))
    >>> Mesh.parse("4")
    Mesh(names=('tp',), sizes=(4,))
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def parse(text: str) -> Mesh:
        names, sizes = [], []
        for part in text.split(","):
            name, equals, size = part.strip().rpartition("=")
            right = _SIZE.fullmatch(size) is not None and (not equals or name.isidentifier())
            if not right:
                raise ArgumentError(f"A mesh is written dp=2,tp=4 or 4; found {text!r}.")
            names.append(name or TENSOR_AXIS)
            sizes.append(int(size))
        if len(set(names)) < len(names):
            raise ArgumentError(f"Each axis of a mesh has a name of its own; found {text!r}.")
        return Mesh(tuple(names), tuple(sizes))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    def num_parts(self, axes: Collection[str]) -> int:
        """The number of parts of a batch that is split along some axes."""
        return math.prod(s for n, s in zip(self.names, self.sizes, strict=True) if n in axes)

    def part_of(self, rank: int, axes: Collection[str]) -> int:
        """The number of a rank's part.

        >>> [Mesh.parse("dp=2,tp=2").part_of(rank, ["dp"]) for rank in range(4)]
        [0, 0, 1, 1]
        """
        part, weight = 0, 1
        for name, size in zip(reversed(self.names), reversed(self.sizes), strict=True):
            rank, coordinate = divmod(rank, size)
            if name in axes:
                part, weight = part + weight * coordinate, weight * size
        return part

    def make(self) -> DeviceMesh:
        """The mesh in the current world."""
        return init_device_mesh("cpu", self.sizes, mesh_dim_names=self.names)

    def __str__(self) -> str:
        return ", ".join(f"{n}={s}" for n, s in zip(self.names, self.sizes, strict=True))
