"""Launch several processes on this machine as one job.

Note [One import for all]
The processes are forked from a server that has only imported torch and shardwise. It is a fresh
process without the launcher's threads and devices, and serves later jobs too.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardwise._torch.c10d import set_default_timeout
from shardwise.errors import ArgumentError
from shardwise.launch.job import Job, Settings
from shardwise.launch.rank import LOOPBACK, distributed, open_store, run_rank

PRELOADED = ["shardwise.preload"]
"""What every process needs, by name; see Note [One import for all]."""
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

    `fn` must be importable, as the processes do not share the launcher's memory. With `on_note`,
    `fn` gets a callable as an extra first argument; `on_note(rank, value)` is called here with each
    value it is called with.

    The rendezvous is at `host`, by default reachable from this machine only; port 0 is any free
    one. Every rank has to join within `start_timeout_s`; a collective waits
    `collective_timeout_s` for the others, also in groups made later; the whole job ends after
    `timeout_s`. A rank that fails ends the job: with its own error where that is one of
    shardwise's, else with a `LaunchError`.
    """
    if num_ranks < 1:
        raise ArgumentError(f"A job has at least one rank, found num_ranks={num_ranks}.")
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
    torch's agent keeps one store, in which gloo would find the addresses of dead processes. All
    groups made later wait `timeout_s` too.
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
