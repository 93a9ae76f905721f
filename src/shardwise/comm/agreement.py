"""Every rank raises the same error, or none does.

Note [Agreement]
A rank that raises alone leaves the others waiting in the next collective. So each rank sends a
*status*: 0, or the length in bytes of its error message. It is one number in a message that is sent
anyway: a gather (`gather_numbers`, `agree`), an exchange of counts (`Meeting`) or a reduction
(`raise_together`). If a status is not 0, all ranks see it, gather the texts and raise one error
that names the ranks. While nothing fails, nothing more is sent.

The numbers sent with the status must be equal on all ranks, or all ranks must check them in the
same way. Everything here runs for the ranks present: one in a process, all of them in a simulated
world.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from shardwise._torch.compat import VERSION
from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.encode import source_digest
from shardwise.core.mesh import Coordinate, Grid
from shardwise.errors import CollectiveError, LayoutError, RankMismatchError, ShardwiseError
from shardwise.simulation.ranks import by_rank, each_rank, localize, one_part, parts_of
from shardwise.simulation.roster import spans

_T = TypeVar("_T")
#: The errors that keep their type, by name. Any other becomes the first of these that it derives
#: from.
_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        *ShardwiseError.__subclasses__(),
        ShardwiseError,
        torch.linalg.LinAlgError,  # type: ignore[attr-defined]
        IndexError,
        ValueError,
        TypeError,
        RuntimeError,
    )
}
_RANK_BYTES = 4
#: An error message has fewer; a status that says more arrived damaged.
_MAX_TEXT_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong on one rank, and the error that it becomes on all of them."""

    text: str
    error: type[Exception] = LayoutError


def joint_error(lead: str, faults: Mapping[int, Fault], num_ranks: int) -> Exception:
    """One error for all faults, of the first one's type; the message begins with `lead`.

    Ranks are named, unless all of them have the same fault.
    """
    ranks: dict[str, list[int]] = {}
    for rank, fault in sorted(faults.items()):
        ranks.setdefault(fault.text, []).append(rank)
    if len(ranks) == 1 and len(faults) == num_ranks:
        said = next(iter(ranks))
    else:
        said = "\n".join(
            f"On rank{'s' if len(having) > 1 else ''} {spans(having)}: {text}"
            for text, having in ranks.items()
        )
    return _marked(faults[min(faults)].error(lead + said))


def is_agreed(error: Exception) -> bool:
    """Whether all ranks of the group raise this error, so that it need not be compared again."""
    return getattr(error, "_agreed", False)


def _marked(error: Exception) -> Exception:
    error._agreed = True  # type: ignore[attr-defined]
    return error


def _damaged(what: str) -> CollectiveError:
    return CollectiveError(
        f"What the ranks told each other about {what} arrived changed. End all processes, and "
        "start again from a checkpoint."
    )


class Faults:
    """The faults of the ranks present, sent as a status in a message that is sent anyway."""

    def __init__(self, grid: Grid, what: str, lead: str = "") -> None:
        """`what` names the cause of the gather; `lead` begins the error message."""
        self._grid, self._what, self._lead = grid, what, lead
        self._texts: dict[int, bytes] = {}

    def status(self, rank: int, fault: Fault | str | None) -> int:
        """What a rank sends to the others."""
        if fault is None:
            return 0
        fault = Fault(fault) if isinstance(fault, str) else fault
        said = f"{fault.error.__name__}\0{fault.text}".encode(errors="backslashreplace")
        self._texts[rank] = rank.to_bytes(_RANK_BYTES, "little") + said
        return len(self._texts[rank])

    def error(self, statuses: Sequence[int], axes: Sequence[int] | None = None) -> Exception | None:
        """The error that all ranks raise; None if all statuses are 0.

        `statuses` are those of the ranks along `axes` (default: all axes), or their maximum.
        """
        longest = max(statuses)
        if not any(statuses):
            return None
        if not 0 <= longest <= _MAX_TEXT_BYTES:
            return _marked(_damaged(self._what))
        grid, what = self._grid, self._what
        rows = _gather_bytes(grid, what, longest, lambda rank: self._texts.get(rank, b""), axes)
        faults = dict(_fault_in(row) for row in rows if any(row))
        return joint_error(self._lead, faults, len(rows)) if faults else _marked(_damaged(what))

    def check(self, statuses: Sequence[int]) -> None:
        error = self.error(statuses)
        if error is not None:
            raise error


def _fault_in(row: bytes) -> tuple[int, Fault]:
    said = row[_RANK_BYTES:].rstrip(b"\0").decode(errors="backslashreplace")
    name, _, text = said.partition("\0")
    return int.from_bytes(row[:_RANK_BYTES], "little"), Fault(text, _ERRORS.get(name, RuntimeError))


def backward_error(
    lead: str, ranks: Sequence[int], needs: Sequence[Any], lacks: Sequence[Any]
) -> Exception | None:
    """The error that all ranks raise where one `needs` the backward of a rank that `lacks` one.

    Both have an entry for each of `ranks`, and are the same on all of them.
    """
    if not (any(needs) and any(lacks)):
        return None
    needing, lacking = _named(ranks, needs), _named(ranks, lacks)
    return _marked(
        RankMismatchError(
            f"{lead}{needing} will need the backward of all ranks, and {lacking} cannot "
            "run one: autograd is off there (torch.no_grad or inference_mode), or, in compiled "
            "code, nothing requires grad there. Run all ranks with autograd or none; in compiled "
            "code, freeze a weight on all ranks or on none."
        )
    )


def freezing_error(lead: str, ranks: Sequence[int], unlike: Sequence[Any]) -> Exception:
    """The error that all ranks raise where some freeze other copied tables, `unlike` the first."""
    alike = _named(ranks, [not each for each in unlike])
    return _marked(
        RankMismatchError(
            f"{lead}on {_named(ranks, unlike)} other replicated tables require grad than on "
            f"{alike}, so that copies would differ. Call requires_grad_() alike on all ranks."
        )
    )


def _named(ranks: Sequence[int], flags: Sequence[Any]) -> str:
    found = [rank for rank, flag in zip(ranks, flags, strict=True) if flag]
    return f"rank{'s' if len(found) > 1 else ''} {spans(found)}"


# -- gathering ------------------------------------------------------------------------------------


def gather(
    grid: Grid,
    what: str,
    row: Callable[..., Sequence[int]],
    *tensors: torch.Tensor,
    axes: Sequence[int] | None = None,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """The numbers `row(rank, *its tensors)` of each rank along `axes`, or of all ranks.

    Every rank gives equally many. Returns them as the rows of one plain tensor on the CPU; if there
    are parallel submeshes, those of the first.
    """
    return one_part(_gathered(grid, what, row, tensors, axes, dtype)).cpu()


def _gathered(
    grid: Grid,
    what: str,
    row: Callable[..., Sequence[int]],
    tensors: Sequence[torch.Tensor],
    axes: Sequence[int] | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    def mine(rank: int, *held: torch.Tensor) -> torch.Tensor:
        return torch.tensor([row(rank, *held)], dtype=dtype, device=grid.device_type)

    found = by_rank(grid, mine, *tensors)
    with because(what, implicit=False):
        for axis in reversed(range(grid.num_axes) if axes is None else axes):
            found = collectives.all_gather(found, grid, axis)
    return found


def gather_numbers(
    grid: Grid,
    what: str,
    describe: Callable[..., tuple[Sequence[int], str | None]],
    *tensors: torch.Tensor,
) -> list[tuple[int, ...]]:
    """The numbers that `describe(*its tensors)` returns on each rank, by rank.

    It also returns what is wrong on its rank, or None; if something is, every rank raises.
    """
    faults = Faults(grid, what, f"{what}: ")

    def row(rank: int, *mine: torch.Tensor) -> list[int]:
        numbers, wrong = describe(*mine)
        return [faults.status(rank, wrong), *numbers]

    rows = gather(grid, what, row, *tensors).tolist()
    faults.check([status for status, *_ in rows])
    return [tuple(numbers) for _, *numbers in rows]


def gather_texts(grid: Grid, what: str, text: Callable[[int], str]) -> list[str]:
    """What `text(rank)` gives on each rank, in the order of ranks."""

    def encoded(rank: int) -> bytes:
        return text(rank).encode()

    sizes = gather(grid, what, lambda rank: [len(encoded(rank))]).tolist()
    rows = _gather_bytes(grid, what, max(size for (size,) in sizes), encoded)
    return [
        row[:size].decode(errors="backslashreplace")
        for row, (size,) in zip(rows, sizes, strict=True)
    ]


def _gather_bytes(
    grid: Grid,
    what: str,
    size: int,
    data: Callable[[int], bytes],
    axes: Sequence[int] | None = None,
) -> list[bytes]:
    """What each rank gives, of all parallel submeshes."""

    def row(rank: int) -> list[int]:
        return list(data(rank).ljust(max(size, 1), b"\0"))

    found = _gathered(grid, what, row, (), axes, torch.uint8)
    return [bytes(row.tolist()) for part in parts_of(found) for row in part.cpu()]


class Meeting:
    """An all-to-all of rows of numbers along one axis, started at once; see `finish`.

    Row i of `rows` goes to coordinate i, and `shared` to all coordinates.
    """

    def __init__(self, grid: Grid, axis: int, rows: torch.Tensor, shared: torch.Tensor) -> None:
        def label(_: Coordinate, rows: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            both = torch.cat([rows, shared.to(rows.device).expand(len(rows), -1)], 1)
            return both.to(grid.device_type)

        self._grid, self._width = grid, rows.shape[1]
        labels = each_rank(grid, label, rows, shared, axes=())
        self._arriving = collectives.start_all_to_all(labels, grid, axis)

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Each coordinate's row for this rank, and its `shared`; on the CPU."""

        def parted(_: Coordinate, arrived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return arrived[:, : self._width], arrived[:, self._width :]

        arrived = collectives.awaited(self._arriving).cpu()
        return each_rank(self._grid, parted, arrived, axes=())


def raise_together(grid: Grid, axes: Sequence[int], call: Callable[[], _T]) -> _T:
    """What `call` returns; if it raises on one rank, all ranks along `axes` raise that error.

    For a call that may fail because of values that differ along `axes`. It must not communicate
    after the point where it may fail. Costs one all-reduce of 8 bytes per axis.
    """
    own: Exception | None = None
    try:
        result = call()
    except Exception as raised:
        own = raised
    faults = Faults(grid, "an error on some rank")
    longest = localize(grid, torch.tensor([0], device=grid.device_type))
    if own is not None:
        kind = next((k for k in _ERRORS.values() if isinstance(own, k)), RuntimeError)
        status = functools.partial(faults.status, fault=Fault(str(own), kind))
        longest = by_rank(grid, lambda rank: torch.tensor([status(rank)], device=grid.device_type))
    for axis in axes:
        longest = collectives.all_reduce(longest, "max", grid, axis)
    error = faults.error([int(one_part(longest))], axes)
    if error is None:
        return result
    if own is not None and str(own) == str(error):
        raise own  # the same everywhere
    raise error from own


# -- comparing -------------------------------------------------------------------------------------


def agree(grid: Grid, what: str, request: str, problem: Exception | None = None) -> None:
    """Raise on every rank of the group unless all have the same request and none has a problem.

    `request` describes what this rank asks for, line by line; the error names lines that differ.
    Ranks that run different code are found the same way. A rank outside the mesh takes no part.
    """
    if grid.outside:
        if problem is not None:
            raise problem
        return
    request = f"torch {VERSION}, shardwise code {source_digest()[:12]}\n{request}"
    wrong = f"{type(problem).__name__}: {problem}" if problem is not None else None
    faults = Faults(grid, what, f"{what} fails, so no rank goes on. ")
    digest = hashlib.blake2b(f"{request}\0{wrong}".encode(), digest_size=16).digest()
    compared = struct.unpack("<2q", digest)
    rows = gather(grid, what, lambda rank: [faults.status(rank, wrong), *compared])
    same = bool((rows == rows[0]).all())
    if problem is not None and same:
        raise _marked(problem)
    faults.check(rows[:, 0].tolist())
    if not same:
        texts = gather_texts(grid, what, lambda _: request)
        raise _marked(_difference(what, grid.submeshes[0], texts))


@contextlib.contextmanager
def agreeing(grid: Grid, what: str) -> Iterator[list[str]]:
    """`agree` at the end of a block of checks; yields the lines of the request, to be added to.

    The block must not communicate. If one rank raises in it, all ranks raise at its end.
    """
    request: list[str] = []
    problem: Exception | None = None
    try:
        yield request
    except Exception as error:  # of any kind: the other ranks wait for this one
        problem = error
    agree(grid, what, "\n".join(request), problem)


def _difference(what: str, ranks: Sequence[int], requests: Sequence[str]) -> Exception:
    first = requests[0].splitlines()
    for rank, request in zip(ranks, requests, strict=True):
        lines = request.splitlines()
        if lines != first:
            here = "; ".join(line for line in lines if line not in first) or "nothing more"
            there = "; ".join(line for line in first if line not in lines) or "nothing more"
            order = " (the same, in another order)" if sorted(lines) == sorted(first) else ""
            # Torch's words, where they fit on a line.
            short = here != there and len(there) < 40 and len(here) < 40
            unlike = f", which does not match with {there}" if short else ""
            return LayoutError(
                f"The ranks disagree about {what}{order}. Rank {ranks[0]} has: {there}. Rank "
                f"{rank} has: {here}{unlike}. Give every rank the same."
            )
    return _damaged(what)  # only the digests differ
