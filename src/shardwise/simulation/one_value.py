"""One value from those of all ranks: they agree, or an error names the ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.errors import RankMismatchError
from shardwise.simulation.roster import Roster


def same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; NaN equals NaN."""
    if torch.equal(one, other):
        return True
    if one.shape != other.shape or not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def agreed_value(values: Sequence[Any], roster: Roster, asked: str) -> Any:
    """The value that all parts have, or an error that names the ranks."""
    first = values[0]
    for value in values[1:]:
        if value != first and not (value != value and first != first):
            raise mismatch(asked, roster, values)
    return first


def mismatch(asked: str, roster: Roster, values: Sequence[Any]) -> RankMismatchError:
    found = "; ".join(
        f"rank {spans(roster.ranks_of(part))} has {_brief(value)}"
        for part, value in enumerate(values)
    )
    return RankMismatchError(
        f"One value was asked for ({asked}), but the ranks differ: {found}. Ask for one rank with "
        ".on_rank(r), or map over ranks with LocalTensor.per_rank(fn)."
    )


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return str(value)


def spans(ranks: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as `0-2, 5`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][-1] == rank - 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return ", ".join("-".join(map(str, span)) for span in spans)
