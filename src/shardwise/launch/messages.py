"""What the launcher tells a process of a job, and what that tells the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.errors import ShardwiseError


@dataclass(frozen=True, slots=True)
class Settings:
    """What a process has to know to take part in a job."""

    num_ranks: int
    backend: str
    host: str
    port: int
    start_timeout_s: float
    collective_timeout_s: float
    environment: Mapping[str, str]
    #: Whether the function gets a way to send notes.
    noting: bool


@dataclass(frozen=True, slots=True)
class Said:
    """What a rank tells the launcher: "here", "started", "note", "failed" or "done"."""

    word: str
    content: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception on one rank, and when; the exception itself where it can be sent."""

    at_s: float
    error: ShardwiseError | None
    summary: str
    trace: str
