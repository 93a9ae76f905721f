"""run_processes: a function in several processes of this machine that talk through gloo.

For demonstrations and checks. They are bound to the loopback interface; jobs that span hosts are
started by torchrun.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from shardwise.errors import ShardwiseError, WorldError

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class _Failed:
    """An exception on one rank; the exception itself where it can be sent."""

    error: Exception | None
    trace: str


@dataclass(frozen=True)
class _Note:
    """Something that a rank has to say while it works."""

    value: Any


class Reporter:
    """Sends notes from a rank to the process that started it; see `run_processes`."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def __call__(self, value: Any) -> None:
        self._pipe.send_bytes(pickle.dumps(_Note(value)))


def run_processes(
    fn: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    on_note: Callable[[int, Any], None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """What `fn(*args)` returns on each of `num_ranks` processes, in the order of ranks.

    `fn` must be importable by name. With `on_note`, `fn` gets a first argument more: called with a
    value, it has `on_note(rank, value)` called here. The first error on any rank ends all of them
    and is raised here. `timeout_s` is how long a collective waits for the other ranks.
    """
    if num_ranks < 1:
        raise WorldError(f"At least one process is needed, found {num_ranks}.")
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            work = (rank, num_ranks, store.port, theirs, timeout_s, on_note is not None, fn, args)
            process = context.Process(target=_work, args=work, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _collect(pipes, on_note)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _collect(pipes: Sequence[Connection], on_note: Callable[[int, Any], None] | None) -> list[Any]:
    results: dict[int, Any] = {}
    ranks = {id(pipe): rank for rank, pipe in enumerate(pipes)}
    open_pipes = list(pipes)
    while open_pipes:
        for ready in wait(open_pipes):
            assert isinstance(ready, Connection), "only pipes are waited for"
            rank = ranks[id(ready)]
            try:
                answer = pickle.loads(ready.recv_bytes())
            except EOFError:
                raise WorldError(
                    f"The process of rank {rank} ended without an answer; it may have run out of "
                    "memory."
                ) from None
            if isinstance(answer, _Note):
                if on_note is not None:
                    on_note(rank, answer.value)
                continue
            if isinstance(answer, _Failed):
                _raise(rank, answer)
            results[rank] = answer
            open_pipes.remove(ready)
    return [results[rank] for rank in range(len(pipes))]


def _raise(rank: int, failed: _Failed) -> None:
    if isinstance(failed.error, ShardwiseError):
        failed.error.add_note(f"On rank {rank}.")
        raise failed.error
    raise WorldError(f"Rank {rank} failed:\n{failed.trace}")


def _work(
    rank: int,
    num_ranks: int,
    port: int,
    pipe: Connection,
    timeout_s: float,
    noting: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = _loopback_interface()
    torch.set_num_threads(1)
    try:
        store = TCPStore(LOOPBACK, port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=num_ranks,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        answer: Any = fn(Reporter(pipe), *args) if noting else fn(*args)
        dist.barrier()  # or a rank that is done takes its connections away from the others
    except Exception as error:
        answer = _Failed(_sendable(error), traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    if dist.is_initialized():
        dist.destroy_process_group()


def _sendable(error: Exception) -> Exception | None:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None
    return error


def _loopback_interface() -> str:
    import socket

    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
