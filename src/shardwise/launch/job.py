"""The processes of a job, as the launcher sees them, and the messages between both.

Note [A job ends as a whole]
The launcher watches its processes. When one fails, dies or does not answer in time, it ends the
others and raises an error that names the rank. A process of a job ends with the launcher, however
that ends, by watching their pipe. No rank exits before all are done, as that would close the
connections of others.
"""

from __future__ import annotations

import pickle
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from shardwise.errors import LaunchError, ShardwiseError

#: How long a process may take to end by itself before it is killed.
GRACE_S = 5.0
#: How long after a first failure the launcher looks for a rank that died and caused it.
CAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What the launcher tells each process of a job."""

    num_ranks: int
    backend: str
    host: str
    port: int
    start_timeout_s: float
    collective_timeout_s: float
    environment: Mapping[str, str]
    #: Whether the function gets a callable that sends notes.
    noting: bool


@dataclass(frozen=True, slots=True)
class Message:
    """A message of a rank to the launcher: "here", "started", "note", "failed" or "done"."""

    kind: str
    content: Any = None


@dataclass(frozen=True, slots=True)
class Failed:
    """An exception on one rank, and when; the exception itself where it can be sent."""

    at_s: float
    error: ShardwiseError | None
    summary: str
    trace: str


class RankTraceback(Exception):
    """Where a rank failed: the cause of a `LaunchError`, shown with its traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass
class Job:
    """The processes of a job, and their messages so far."""

    on_note: Callable[[int, Any], None] | None
    processes: list[Any] = field(default_factory=list)
    pipes: list[Connection] = field(default_factory=list)
    here: set[int] = field(default_factory=set)
    started: set[int] = field(default_factory=set)
    answers: dict[int, Any] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    died: list[int] = field(default_factory=list)

    def add(self, process: Any, pipe: Connection) -> None:
        self.processes.append(process)
        self.pipes.append(pipe)

    @property
    def size(self) -> int:
        return len(self.processes)

    def results(self, start_timeout_s: float, timeout_s: float | None) -> list[Any]:
        begin = time.monotonic()
        end_by = begin + timeout_s if timeout_s is not None else None
        while len(self.answers) < self.size:
            starting = len(self.started) < self.size
            limits = [begin + start_timeout_s] if starting else []
            limits += [end_by] if end_by is not None else []
            if not self._receive(min(limits) if limits else None):
                late = end_by is not None and time.monotonic() >= end_by
                raise LaunchError(
                    self._timeout_text(timeout_s if late else start_timeout_s, starting)
                )
            if self.failed or self.died:
                self._raise()
        return [self.answers[rank] for rank in range(self.size)]

    def _timeout_text(self, seconds: float | None, starting: bool) -> str:
        ranks = range(self.size)
        absent = [r for r in ranks if r not in self.here]
        if absent:
            return f"{_ranks(absent)} did not start within {seconds:g} s; the others were ended."
        if starting:
            missing = [r for r in ranks if r not in self.started]
            return f"{_ranks(missing)} did not meet the others within {seconds:g} s."
        busy = [r for r in ranks if r not in self.answers]
        return f"{_ranks(busy)} did not finish within {seconds:g} s; all ranks were ended."

    def _receive(self, until_s: float | None) -> bool:
        """Receive one message of each rank that has sent one; False if none came in time."""
        silent = {*self.answers, *self.failed, *self.died}
        ranks = {id(self.pipes[r]): r for r in range(self.size) if r not in silent}
        left = None if until_s is None else max(0.0, until_s - time.monotonic())
        ready = wait([self.pipes[r] for r in ranks.values()], left)
        for pipe in ready:
            self._handle(ranks[id(pipe)])
        return bool(ready)

    def _handle(self, rank: int) -> None:
        try:
            message: Message = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, OSError):
            self.died.append(rank)
            return
        if message.kind == "here":
            self.here.add(rank)
        elif message.kind == "started":
            self.started.add(rank)
        elif message.kind == "failed":
            self.failed[rank] = message.content
        elif message.kind == "done":
            self.answers[rank] = message.content
        elif self.on_note is not None:
            self.on_note(rank, message.content)

    def _raise(self) -> None:
        # A rank that dies makes others fail, whose messages may come first: wait for it.
        until_s = time.monotonic() + CAUSE_S
        while not self.died and len({*self.answers, *self.failed}) < self.size:
            if not self._receive(until_s):
                break
        if self.died:
            ends = "; ".join(f"Rank {rank} {self._exit_text(rank)}" for rank in sorted(self.died))
            raise LaunchError(f"{ends}; the other ranks were ended.")
        rank, first = min(self.failed.items(), key=lambda item: item[1].at_s)
        if first.error is not None:
            first.error.add_note(f"On rank {rank}; the other ranks were ended.")
            raise first.error
        raise LaunchError(
            f"Rank {rank} failed: {first.summary}; the other ranks were ended."
        ) from RankTraceback(first.trace)

    def _exit_text(self, rank: int) -> str:
        process = self.processes[rank]
        process.join(GRACE_S)
        code = process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code} before it was done"

    def end(self) -> None:
        """End all processes; none is left when this returns."""
        if len(self.answers) < self.size:
            for process in self.processes:
                process.terminate()
        for pipe in self.pipes:
            pipe.close()  # ranks that are done wait for this
        deadline = time.monotonic() + GRACE_S
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks))}"
