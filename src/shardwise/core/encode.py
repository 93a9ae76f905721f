"""Placements and meshes as text and numbers, and a digest of this package's code.

Plan files hold a placement as text. An op in a graph takes numbers and strings: placements are
encoded as numbers, which the compiler can trace, and a mesh as a string.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.mesh import Grid, grid_like, grid_of
from shardwise.core.placements import REDUCE_OPS, REPLICATE, Partial, Placement, Replicate, Shard
from shardwise.errors import ArgumentError, LayoutError

#: Enough for the sizes of ten thousand ranks. A size has at most 18 digits, a dim at most 4.
MAX_PLACEMENT_CHARS = 1 << 18
_REPLICATE, _SHARD, _PARTIAL = range(3)

# -- placements as text --------------------------------------------------------------------------


def encode_placement(placement: Placement) -> str:
    """A placement as text; the inverse of `decode_placement`.

    >>> encode_placement(Shard(1)), encode_placement(Replicate()), encode_placement(Partial())
    ('Shard(1)', 'Replicate()', 'Partial(sum)')
    """
    if type(placement) not in (Shard, Replicate, Partial):
        raise ArgumentError(
            f"{placement!r} cannot be written to a plan: use Shard, Replicate or Partial."
        )
    return repr(placement)


def decode_placement(text: str) -> Placement:
    """The placement that `text` encodes.

    >>> decode_placement("Shard(-1)")
    Shard(-1)
    """
    plain = text.strip() if len(text) <= MAX_PLACEMENT_CHARS else ""
    if plain in ("Replicate()", "Replicate"):
        return Replicate()
    if plain in ("Partial()", "Partial"):
        return Partial()
    kind, _, inside = plain.removesuffix(")").partition("(")
    if plain.endswith(")") and kind == "Partial" and inside in REDUCE_OPS:
        return Partial(inside)
    if plain.endswith(")") and kind == "Shard" and (found := _decode_shard(inside)) is not None:
        return found
    raise LayoutError(
        f"{text[:60]!r} is not a placement: write Shard(1), Replicate() or Partial(sum)."
    )


def _decode_shard(inside: str) -> Shard | None:
    """The shard written `1` or `1, sizes=(2, 3)`; in linear time, whatever the text."""
    dim, comma, rest = inside.partition(", sizes=(")
    if not _is_number(dim.removeprefix("-"), 4) or (comma and not rest.endswith(")")):
        return None
    if not comma:
        return Shard(int(dim))
    parts = [part.strip(" ") for part in rest[:-1].split(",")]
    if not parts[-1]:  # nothing, or a last comma
        parts.pop()
    if not all(_is_number(part, 18) for part in parts):
        return None
    return Shard(int(dim), tuple(map(int, parts)))


def _is_number(text: str, max_digits: int) -> bool:
    return 0 < len(text) <= max_digits and text.isascii() and text.isdigit()


# -- placements as numbers -----------------------------------------------------------------------


def encode_placements(placements: Sequence[Placement] | None) -> list[int] | None:
    """Placements as numbers.

    >>> encode_placements([Shard(1, sizes=(3, 0)), REPLICATE, Partial("max")])
    [1, 1, 2, 3, 0, 0, 2, 3]
    """
    if placements is None:
        return None
    numbers: list[int] = []
    for placement in [placements] if isinstance(placements, Placement) else placements:
        if isinstance(placement, Shard):
            sizes = placement.sizes
            numbers += [_SHARD, placement.dim, -1 if sizes is None else len(sizes)]
            numbers += [] if sizes is None else list(sizes)
        elif isinstance(placement, Partial):
            numbers += [_PARTIAL, REDUCE_OPS.index(placement.reduce_op)]
        else:
            numbers.append(_REPLICATE)
    return numbers


def decode_placements(numbers: Sequence[int] | None) -> list[Placement] | None:
    """The placements that `encode_placements` encoded.

    >>> decode_placements([1, 1, 2, 3, 0, 0, 2, 3])
    [Shard(1, sizes=(3, 0)), Replicate(), Partial(max)]
    """
    if numbers is None:
        return None
    left, found = iter(numbers), list[Placement]()
    for kind in left:
        if kind == _SHARD:
            dim, num = next(left), next(left)
            found.append(Shard(dim, None if num < 0 else tuple(next(left) for _ in range(num))))
        elif kind == _PARTIAL:
            found.append(Partial(REDUCE_OPS[next(left)]))
        else:
            found.append(REPLICATE)
    return found


# -- meshes --------------------------------------------------------------------------------------


def encode_mesh(mesh: DeviceMesh) -> str:
    """`mesh` as text, for compiled code and for exported programs, which are saved.

    The world is not encoded: a loaded program uses a mesh of its own world.
    """
    return json.dumps(encode_grid(grid_of(mesh)))


# The compiler runs it and keeps the result as a constant, also for a mesh that is new to it.
encode_mesh._dynamo_marked_constant = True  # type: ignore[attr-defined]


def decode_mesh(text: str) -> DeviceMesh:
    """The mesh of the current world that `encode_mesh` encoded."""
    return decode_grid(json.loads(text)).mesh


def encode_grid(grid: Grid) -> Any:
    """A grid as JSON."""
    return grid.identity


def decode_grid(encoded: Any) -> Grid:
    """The grid of the current world that `encode_grid` encoded."""
    device_type, shape, ranks, names = encoded
    return grid_like(device_type, tuple(shape), tuple(ranks), names and tuple(names))


# -- code version --------------------------------------------------------------------------------
# A digest of this package's code, which tells versions apart in caches and between ranks.


#: The folder of this package's code.
PACKAGE = Path(__file__).resolve().parents[1]


@functools.cache
def source_digest() -> str:
    """A digest of the names and contents of this package's files."""
    digest = hashlib.sha256()
    for file in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
