"""Ranks that compare what they were asked to do before they do it.

A rank that fails alone, or was asked for something else, would leave the others waiting in the next
collective. So every rank first says what it is about to do, problems included, and all of them go
on, or all of them raise the same error. Ranks that run different code are found the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise.comm import collectives
from shardwise.comm.watch import because
from shardwise.core.grid import Grid
from shardwise.core.sources import source_digest
from shardwise.errors import LayoutError
from shardwise.simulation.parts import agreed
from shardwise.simulation.ranks import each_rank, localize


def agree(grid: Grid, what: str, request: str, problem: Exception | None = None) -> None:
    """Raise on every rank of the group unless all ask for the same and none has a problem.

    `request` describes what this rank asks for, one line each; lines that differ are named.
    """
    request = f"{code_version()}\n{request}"
    said = f"{type(problem).__name__}: {problem}" if problem else ""
    digest = hashlib.sha256(f"{request}\0{said}".encode()).digest()
    row = torch.frombuffer(bytearray(digest + bytes([bool(said)])), dtype=torch.uint8)
    rows = gather_rows(grid, what, lambda _: row)
    if not rows[:, -1].any() and bool((rows == rows[0]).all()):
        return
    if problem is not None and bool((rows == rows[0]).all()):
        raise _marked(problem)  # the same everywhere: no need to say whose it is
    texts = gather_texts(grid, what, f"{request}\0{said}")
    requests, problems = zip(*(text.split("\0") for text in texts), strict=True)
    own = {rank: text for rank, text in zip(grid.ranks, problems, strict=True) if text}
    if own:
        found = "; ".join(f"rank {rank}: {text}" for rank, text in own.items())
        text = f"{what} fails on ranks {list(own)}, so no rank goes on. {found}"
        raise _marked(LayoutError(text))
    raise _marked(LayoutError(_difference(what, grid.ranks, requests)))


_T = TypeVar("_T")
#: The kinds of errors that torch's ops raise because of values; a number says which.
_KINDS: tuple[type[Exception], ...] = (
    RuntimeError,
    IndexError,
    ValueError,
    torch.linalg.LinAlgError,  # type: ignore[attr-defined]
)
#: How much of a message the other ranks are told.
_MESSAGE_BYTES = 256


def raise_together(grid: Grid, axes: Sequence[int], call: Callable[[], _T]) -> _T:
    """What `call` returns; where it raises on a rank, all ranks along `axes` raise that error.

    For a call that may fail because of values which the ranks along `axes` do not share. It must
    not communicate after the point where it may fail. Costs one all-reduce of 8 bytes per axis.
    """
    error: Exception | None = None
    try:
        result = call()
    except Exception as raised:
        error = raised
    number = localize(grid, torch.tensor([0 if error is None else _kind_number(error)]))
    for axis in axes:
        number = collectives.all_reduce(number, "max", grid, axis)
    if not int(number):
        return result
    said = localize(grid, _row(str(error or "")))
    for axis in axes:
        said = collectives.all_gather(said, grid, axis)
    if error is not None:
        raise error
    texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in said]
    raise _KINDS[int(number) - 1](next(text for text in (*texts, "no message") if text))


def _row(message: str) -> torch.Tensor:
    text = message.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)[None]


def _kind_number(error: Exception) -> int:
    exact = [n for n, kind in enumerate(_KINDS) if type(error) is kind]
    return 1 + (exact or [n for n, kind in enumerate(_KINDS) if isinstance(error, kind)] or [0])[0]


def is_agreed(error: Exception) -> bool:
    """Whether all ranks of the group raise because of this one: then they need not compare."""
    return getattr(error, "_agreed", False)


def _marked(error: Exception) -> Exception:
    error._agreed = True  # type: ignore[attr-defined]
    return error


def code_version() -> str:
    """The code that this process runs: torch's version, and a digest of this package's files."""
    return f"torch {torch.__version__}, shardwise code {source_digest()[:12]}"


def _difference(what: str, ranks: tuple[int, ...], requests: tuple[str, ...]) -> str:
    first = requests[0].splitlines()
    for rank, request in zip(ranks, requests, strict=True):
        lines = request.splitlines()
        if lines != first:
            here = "; ".join(line for line in lines if line not in first) or "nothing more"
            there = "; ".join(line for line in first if line not in lines) or "nothing more"
            order = " (the same, in another order)" if sorted(lines) == sorted(first) else ""
            return (
                f"The ranks disagree about {what}{order}. Rank {ranks[0]} has: {there}. Rank "
                f"{rank} has: {here}. Give every rank the same."
            )
    raise AssertionError("some rank asked for something else, or nothing would be compared")


def gather_rows(grid: Grid, what: str, row: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """What `row(rank)` gives on each rank of the group, as the rows of one plain tensor."""
    device = grid.device_type
    rank_at = {place: rank for rank, place in grid.coordinates.items()}
    gathered: Any = each_rank(grid, lambda place: row(rank_at[tuple(place)]).to(device)[None])
    with because(what, implicit=False):
        for axis in reversed(range(grid.num_axes)):
            gathered = collectives.all_gather(gathered, grid, axis)
    return agreed(gathered).cpu()


def gather_texts(grid: Grid, what: str, text: str | Callable[[int], str]) -> list[str]:
    """Every rank's text, in the order of ranks."""

    def encoded(rank: int) -> bytes:
        return (text if isinstance(text, str) else text(rank)).encode()

    sizes = gather_rows(grid, what, lambda rank: torch.tensor([len(encoded(rank))]))
    longest = max(int(sizes.max()), 1)

    def padded(rank: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(encoded(rank).ljust(longest)), dtype=torch.uint8)

    rows = gather_rows(grid, what, padded)
    return [
        bytes(row[:size].tolist()).decode()
        for row, (size,) in zip(rows, sizes.tolist(), strict=True)
    ]
