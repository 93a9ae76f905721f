"""Before ids are sent, ranks tell each other how much, or what is wrong.

One small exchange of equal size on every rank. A rank whose batch does not fit says so there, and
then all ranks know the same error; nobody waits for a batch that will not come.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.watch import because
from shardwise.core.grid import Grid
from shardwise.embedding.batch import Complaint
from shardwise.errors import BatchError, IdRangeError, ShardwiseError
from shardwise.exchange.between import finished, ranks_present, start_swap

_TEXT_BYTES = 480
#: How a rank says that its batch is fine, or which error it is to become: the last of several.
_FINE = 0
_ERRORS: tuple[type[ShardwiseError], ...] = (IdRangeError, BatchError, ShardwiseError)

#: A note is an int64 matrix whose row i is for place i; a complaint may stand in for one.
Note = torch.Tensor | Complaint


class Handshake:
    """Notes of all ranks on their way to each other; begun at once, awaited in `finish`.

    What each rank sends first is whether its batch fits.
    """

    def __init__(self, grid: Grid, notes: Sequence[Note], width: int) -> None:
        self._grid, self._notes = grid, notes
        num = len(grid.ranks)
        rows = [
            torch.full((num, width + 1), 1 + _ERRORS.index(note.error))
            if isinstance(note, Complaint)
            else torch.cat([torch.full((num, 1), _FINE), note], 1)
            for note in notes
        ]
        with because("counts of a batch", implicit=False):
            self._swap = start_swap(grid, [_sent(grid, each) for each in rows])

    def finish(self) -> list[torch.Tensor] | ShardwiseError:
        """One row from each place, per rank present; or what is wrong on some rank."""
        arrived = [matrix.cpu() for matrix in finished(self._grid, self._swap)]
        flags = arrived[0][:, 0].tolist()
        if any(flag != _FINE for flag in flags):
            return self._gathered(flags)
        return [matrix[:, 1:] for matrix in arrived]

    def _gathered(self, flags: Sequence[int]) -> ShardwiseError:
        """The complaints of all ranks in one exception, the same on each."""
        grid, parts = self._grid, []
        for _, note in zip(ranks_present(grid), self._notes, strict=True):
            row = _text_row(note.text if isinstance(note, Complaint) else "")
            parts.append(_sent(grid, row.expand(len(grid.ranks), -1).contiguous()))
        with because("what is wrong with a batch", implicit=False):
            arrived = finished(grid, start_swap(grid, parts))[0].cpu()
        said = []
        for place, flag in enumerate(flags):
            if flag != _FINE:
                raw = bytes(arrived[place].tolist()).rstrip(b"\0")
                said.append(f"rank {grid.ranks[place]}: {raw.decode(errors='ignore')}")
        return error_of(Complaint("; ".join(said), _ERRORS[max(flags) - 1]), "On ")


def error_of(complaint: Complaint, who: str = "") -> ShardwiseError:
    """The exception that a complaint becomes."""
    if complaint.error is ShardwiseError:
        return ShardwiseError(f"{who}{complaint.text}.")
    return complaint.error(f"A batch does not fit{'. ' if who else ': '}{who}{complaint.text}.")


def _text_row(text: str) -> torch.Tensor:
    """A text in as many bytes as every rank sends."""
    raw = text.encode()
    if len(raw) > _TEXT_BYTES:
        more = " …".encode()
        raw = raw[: _TEXT_BYTES - len(more)].decode(errors="ignore").encode() + more
    return torch.frombuffer(bytearray(raw.ljust(_TEXT_BYTES, b"\0")), dtype=torch.uint8)


def _sent(grid: Grid, row: torch.Tensor) -> torch.Tensor:
    """On the device of the mesh: NCCL moves nothing else."""
    return row if grid.device_type == "cpu" else row.to(grid.device_type)
