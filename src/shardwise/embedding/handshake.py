"""The handshake: before anything else moves, ranks tell each other how much, or what is wrong.

One small exchange of equal size on every rank. A rank whose batch does not fit says so there, and
then all ranks raise the same error; nobody waits for a batch that will not come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.core.grid import Grid
from shardwise.embedding.batch import Complaint
from shardwise.errors import BatchError, IdRangeError, ShardwiseError
from shardwise.exchange.between import ranks_present, swap_rows

_TEXT_BYTES = 480
_FINE, _WRONG, _WRONG_IDS = 0, 1, 2


def shake_hands(
    grid: Grid, notes: Sequence[torch.Tensor | Complaint], width: int
) -> list[torch.Tensor]:
    """Row i of each rank's note goes to place i; one row from each place comes back.

    A note is an int64 matrix of `width` columns. A complaint in place of one is raised everywhere.
    """
    num = len(grid.ranks)
    rows = [
        torch.full((num, width + 1), _WRONG_IDS if note.about_ids else _WRONG)
        if isinstance(note, Complaint)
        else torch.cat([torch.full((num, 1), _FINE), note], 1)
        for note in notes
    ]
    arrived = [matrix.cpu() for matrix in swap_rows(grid, [_sent(grid, r) for r in rows])]
    flags = arrived[0][:, 0].tolist()
    if any(flag != _FINE for flag in flags):
        raise _gathered(grid, notes, flags)
    return [matrix[:, 1:] for matrix in arrived]


def error_of(complaint: Complaint, who: str = "") -> ShardwiseError:
    """The exception that a complaint becomes."""
    text = f"{who}{complaint.text}."
    if complaint.about_ids:
        return IdRangeError(text)
    return BatchError(text)


def _gathered(
    grid: Grid, notes: Sequence[torch.Tensor | Complaint], flags: Sequence[int]
) -> ShardwiseError:
    """The complaints of all ranks in one exception, the same on each."""
    parts = []
    for _, note in zip(ranks_present(grid), notes, strict=True):
        text = note.text if isinstance(note, Complaint) else ""
        raw = text.encode()[:_TEXT_BYTES]
        padded = raw + bytes(_TEXT_BYTES - len(raw))
        row = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        parts.append(_sent(grid, row.expand(len(grid.ranks), -1).contiguous()))
    arrived = swap_rows(grid, parts)[0].cpu()
    said = []
    for place, flag in enumerate(flags):
        if flag != _FINE:
            raw = bytes(arrived[place].tolist()).rstrip(b"\0")
            said.append(f"rank {grid.ranks[place]}: {raw.decode(errors='replace')}")
    about_ids = all(flag in (_FINE, _WRONG_IDS) for flag in flags)
    return error_of(Complaint("; ".join(said), about_ids), "A batch does not fit. On ")


def _sent(grid: Grid, row: torch.Tensor) -> torch.Tensor:
    """On the device of the mesh: NCCL moves nothing else."""
    return row if grid.device_type == "cpu" else row.to(grid.device_type)
