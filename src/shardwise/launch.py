"""Several processes on this machine that work as one job.

Note [A job ends as a whole]
The launcher watches its processes. When one fails, dies or does not answer in time, it ends the
others and raises an error that names the rank. A process of a job ends with the launcher, however
the launcher ends: the kernel kills it when its parent is gone.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shardwise.errors import ArgumentError, LaunchError

#: How long a process may take to end by itself before it is killed.
GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1
distributed: Any = dist  # the stubs of torch do not list TCPStore


def launch(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    backend: str = "gloo",
    host: str = "127.0.0.1",
    port: int = 0,
    start_timeout_s: float = 120,
    collective_timeout_s: float = 120,
    timeout_s: float | None = None,
) -> list[Any]:
    """Run `fn(*args)` in `num_ranks` processes with a process group; what each rank returns.

    `fn` must be importable, since the processes are started anew. The ranks meet at `host`, which
    only this machine can reach unless told otherwise; port 0 is any free one. Every rank has to be
    there within `start_timeout_s`; a collective waits `collective_timeout_s` for the others; the
    whole job ends after `timeout_s`. A rank that fails ends the job with a `LaunchError`.
    """
    if num_ranks < 1:
        raise ArgumentError(f"A job has at least one rank, found num_ranks={num_ranks}.")
    try:
        store = distributed.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(
            f"The ranks cannot meet at {host}:{port}: {reason}. Choose another port, or 0 for any "
            "that is free."
        ) from error
    context = multiprocessing.get_context("spawn")
    settings = (num_ranks, backend, host, store.port, collective_timeout_s, os.getpid())
    job = _Job()
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(rank, settings, theirs, fn, args), name=f"rank-{rank}"
            )
            process.start()
            theirs.close()
            job.add(process, ours)
        return job.results(start_timeout_s, timeout_s)
    finally:
        job.end()


class _Job:
    """The processes of a job, and what has been heard from them."""

    def __init__(self) -> None:
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._started: set[int] = set()
        self._results: dict[int, Any] = {}

    def add(self, process: Any, pipe: Connection) -> None:
        self._processes.append(process)
        self._pipes.append(pipe)

    def results(self, start_timeout_s: float, timeout_s: float | None) -> list[Any]:
        begin = time.monotonic()
        start_by = begin + start_timeout_s
        end_by = begin + timeout_s if timeout_s is not None else None
        while len(self._results) < len(self._processes):
            starting = len(self._started) < len(self._processes)
            limits = [t for t in (start_by if starting else None, end_by) if t is not None]
            left = max(0.0, min(limits) - time.monotonic()) if limits else None
            waiting = [r for r in range(len(self._pipes)) if r not in self._results]
            ready = wait([self._pipes[r] for r in waiting], left)
            if not ready:
                late = [r for r in waiting if r not in self._started] if starting else waiting
                what = "start" if starting else "finish"
                seconds = start_timeout_s if starting else timeout_s
                raise LaunchError(f"{_ranks(late)} did not {what} within {seconds:g} s.")
            self._hear([r for r in waiting if self._pipes[r] in ready])
        return [self._results[rank] for rank in range(len(self._processes))]

    def _hear(self, ranks: Sequence[int]) -> None:
        failed: dict[int, str] = {}
        died: list[int] = []
        for rank in ranks:
            try:
                kind, content = pickle.loads(self._pipes[rank].recv_bytes())
            except (EOFError, OSError):
                died.append(rank)
                continue
            if kind == "started":
                self._started.add(rank)
            elif kind == "failed":
                failed[rank] = content
            else:
                self._results[rank] = content
        if failed and not died:
            # A rank that dies makes others fail, whose messages may come first: look for it.
            died = [r for r in self._dead(timeout_s=1.0) if r not in failed]
        if died:
            rank = died[0]
            raise LaunchError(f"Rank {rank} {self._end_of(rank)}; the other ranks were ended.")
        if failed:
            rank, text = min(failed.items())
            raise LaunchError(f"Rank {rank} failed; the other ranks were ended.\n{text}")

    def _dead(self, timeout_s: float) -> list[int]:
        """Ranks that ended without a word, looked for during a moment."""
        deadline = time.monotonic() + timeout_s
        while True:
            codes = [p.exitcode for p in self._processes]
            dead = [r for r, code in enumerate(codes) if code and r not in self._results]
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(0.02)

    def _end_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE_S)
        code = process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit status {code} before it was done"

    def end(self) -> None:
        """No process of the job is left when this returns."""
        for process in self._processes:
            if process.is_alive() and len(self._results) < len(self._processes):
                process.terminate()
        deadline = time.monotonic() + GRACE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"Rank {ranks[0]}"
    return f"Ranks {', '.join(map(str, ranks))}"


def _work(
    rank: int, settings: tuple[Any, ...], pipe: Connection, fn: Any, args: tuple[Any, ...]
) -> None:
    """The life of one process."""
    num_ranks, backend, host, port, timeout_s, parent = settings
    _end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    try:
        if host in ("127.0.0.1", "localhost"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(num_ranks),
            LOCAL_WORLD_SIZE=str(num_ranks),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
        )
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
        dist.init_process_group(
            backend,
            store=distributed.TCPStore(host, port, is_master=False),
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        pipe.send_bytes(pickle.dumps(("started", None)))
        answer = pickle.dumps(("done", fn(*args)))
        dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps(("failed", traceback.format_exc())))
        pipe.close()
        sys.exit(1)
    pipe.send_bytes(answer)
    pipe.close()


def _end_with(parent: int) -> None:
    """Be killed when the launcher is gone. Only Linux has a way that needs no thread."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it was gone before
            os._exit(1)
