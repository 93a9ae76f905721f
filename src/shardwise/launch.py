"""Local processes that work as one job: start, messages, the end of a rank.

Note [Preloaded processes]
The processes are forked from a server that has only imported torch and shardwise. It is a fresh
process without the launcher's threads and devices, and serves later jobs too.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import set_default_timeout
from shardwise.core.world import post
from shardwise.errors import ArgumentError, LaunchError, ShardwiseError

__all__ = ["LOOPBACK", "PRELOADED", "Note", "join", "launch"]


# -- rank ----------------------------------------------------------------------------------------
# What one process of a job does, from the rendezvous on; see Note [A job ends as a whole].


LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""
before_done: list[Callable[[], None]] = []
"""Called on a rank after its function has returned, before the launcher is told."""
distributed: Any = dist  # the stubs of torch do not list TCPStore


def open_store(host: str, port: int) -> Any:
    """The store for the rendezvous, listening on `host` alone (torch's listens everywhere)."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise LaunchError(
            f"The ranks cannot meet at {host}:{port}: {error.strerror or error}. Choose another "
            "port, or 0 for any that is free."
        ) from error
    with listening:
        number = listening.getsockname()[1]
        return distributed.TCPStore(
            host,
            number,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=os.dup(listening.fileno()),
        )


def run_rank(rank: int, settings: Settings, pipe: Connection, task: bytes) -> None:
    """Join the other ranks, run the function in `task`, and send the result or the error."""
    os.environ.clear()
    os.environ.update(settings.environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    done = threading.Event()
    launcher = threading.Thread(target=_watch_launcher, args=(pipe, done), daemon=True)
    launcher.start()

    def send(kind: str, content: Any = None) -> None:
        pipe.send_bytes(pickle.dumps(Message(kind, content)))

    try:
        fn, args = pickle.loads(task)
        send("here")
        _join(rank, settings)
        send("started")
        extra = (lambda value: send("note", value),) if settings.noting else ()
        result = fn(*extra, *args)
        for finish in before_done:
            finish()
        post(f"had returned from {getattr(fn, '__name__', fn)}")
        send("done", result)
    except BaseException as error:
        summary = f"{type(error).__name__}: {error}".removesuffix(".")
        trace = traceback.format_exc()
        send("failed", Failed(time.monotonic(), _sendable(error), summary, trace))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the launcher ends the others
    done.set()
    launcher.join()
    if dist.is_initialized():  # the function may have ended it
        dist.destroy_process_group()


def _join(rank: int, settings: Settings) -> None:
    """Wait for the other ranks, however late they start, and create the process group."""
    if settings.host in (LOOPBACK, "localhost"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(settings.num_ranks),
        LOCAL_WORLD_SIZE=str(settings.num_ranks),
        MASTER_ADDR=settings.host,
        MASTER_PORT=str(settings.port),
    )
    torch.set_num_threads(max(1, torch.get_num_threads() // settings.num_ranks))
    # The launcher's patience ends first, and it knows who is late.
    patience = datetime.timedelta(seconds=settings.start_timeout_s + 60)
    store = distributed.TCPStore(settings.host, settings.port, is_master=False, timeout=patience)
    store.set(f"here/{rank}", "yes")
    store.wait([f"here/{other}" for other in range(settings.num_ranks)], patience)
    timeout = datetime.timedelta(seconds=settings.collective_timeout_s)
    store.set_timeout(timeout)  # also for a group that other ranks do not make
    set_default_timeout(timeout)
    dist.init_process_group(
        settings.backend, store=store, rank=rank, world_size=settings.num_ranks, timeout=timeout
    )


def _sendable(error: BaseException) -> ShardwiseError | None:
    if not isinstance(error, ShardwiseError):
        return None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _watch_launcher(pipe: Connection, done: threading.Event) -> None:
    """Kill this process when the launcher is gone; it never sends, it only closes the pipe."""
    wait([pipe])
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGKILL)


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])


# -- start ---------------------------------------------------------------------------------------


PRELOADED = ["shardwise.preload"]
"""What every process needs, by name; see Note [Preloaded processes]."""
Note = Callable[[Any], None]
"""Sends a value to the launcher."""


def launch(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    on_note: Callable[[int, Any], None] | None = None,
    backend: str = "gloo",
    host: str = LOOPBACK,
    port: int = 0,
    start_timeout_s: float = 120,
    collective_timeout_s: float = 120,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run `fn(*args)` in `num_ranks` processes with a process group; what each rank returns.

    `fn` must be importable, as the processes do not share the launcher's memory; in a script, call
    this under `if __name__ == "__main__":`. With `on_note`, `fn` gets a callable as an extra first
    argument; `on_note(rank, value)` is called here with each value it is called with.

    The rendezvous is at `host`, by default reachable only from this machine; port 0 means any free
    port. Every rank has to join within `start_timeout_s`. A collective waits `collective_timeout_s`
    for the others, in groups made later too. The whole job ends after `timeout_s`. A rank that
    fails ends the job: with its own error if that is one of shardwise's, otherwise with a
    `LaunchError`.
    """
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise ArgumentError(f"A job has at least one rank, found num_ranks={num_ranks!r}.")
    if not 0 <= port < 1 << 16:  # the sockets would take it modulo 65536
        raise ArgumentError(f"A port is 0, for any that is free, to 65535, found port={port}.")
    task = _packed(fn, args)
    store = open_store(host, port)
    settings = Settings(
        num_ranks,
        backend,
        host,
        store.port,
        start_timeout_s,
        collective_timeout_s,
        dict(os.environ),
        on_note is not None,
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    job = Job(on_note)
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_rank, args=(rank, settings, theirs, task), name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            job.add(process, ours)
        return job.results(start_timeout_s, timeout_s)
    finally:
        job.end()


def join(backend: str | None = None, *, timeout_s: float = 120) -> None:
    """Create the process group in a process that torchrun has started.

    Like `init_process_group`, but each restart (`torchrun --max-restarts`) uses its own key prefix:
    torch's agent keeps one store, in which gloo would find the addresses of dead processes. Groups
    made later have the timeout `timeout_s` too.
    """
    store, rank, size = next(distributed.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    timeout = datetime.timedelta(seconds=timeout_s)
    set_default_timeout(timeout)
    dist.init_process_group(
        backend,
        store=distributed.PrefixStore(f"attempt-{attempt}", store),
        rank=rank,
        world_size=size,
        timeout=timeout,
    )


def _packed(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise ArgumentError(
            f"{getattr(fn, '__name__', fn)!r} and its arguments cannot be sent to other processes: "
            f"{error}. Give a function that can be imported by name, and plain values."
        ) from error


# -- job -----------------------------------------------------------------------------------------
# The processes of a job, as the launcher sees them, and the messages between both.
#
# Note [A job ends as a whole]
# The launcher watches its processes. When one fails, dies or does not answer in time, it ends the
# others and raises an error that names the rank. Each process watches its pipe to the launcher and
# ends when the launcher ends, for whatever reason. No rank exits before all are done, since that
# would close connections that others use.


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
    """The processes of a job, and the messages received so far."""

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
            packed = self.pipes[rank].recv_bytes()
        except (EOFError, OSError):
            self.died.append(rank)
            return
        try:
            message: Message = pickle.loads(packed)
        except Exception as error:
            raise LaunchError(
                f"Rank {rank} sent what cannot be unpickled here ({type(error).__name__}: "
                f"{error}). Return and send plain values. The ranks were ended."
            ) from error
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
