"""RankDevice: a rank and its device, written `rank:1/cuda:1`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from shardwise._torch.c10d import RemoteDevice
from shardwise.errors import ArgumentError, LayoutError

_TEXT = re.compile(r"rank:(\d+)/(.+)")


@dataclass(frozen=True, slots=True, repr=False)
class RankDevice:
    """Where a piece lives. The rank is one of the world, also inside a smaller group.

    >>> place = parse_device("rank:1/cuda:3")
    >>> place.rank, place.device, place
    (1, device(type='cuda', index=3), rank:1/cuda:3)
    """

    rank: int
    device: torch.device

    def __repr__(self) -> str:
        return f"rank:{self.rank}/{self.device}"


def parse_device(given: Any) -> RankDevice:
    """The place that a text names."""
    if isinstance(given, RankDevice):
        return given
    if isinstance(given, RemoteDevice):
        given = str(given)
    if not isinstance(given, str):
        raise ArgumentError(f"A placement is a text such as 'rank:0/cpu', found {given!r}.")
    found = _TEXT.fullmatch(given)
    if found is None:
        raise LayoutError(
            f"{given!r} names no rank and device: write 'rank:0/cpu' or 'rank:1/cuda:1'. (Names of "
            "RPC workers mean nothing here.)"
        )
    try:
        device = torch.device(found[2])
    except RuntimeError as error:
        raise LayoutError(f"{given!r}: {found[2]!r} is no device of torch.") from error
    return RankDevice(int(found[1]), device)
