"""What one process of a job does, from the rendezvous on; see Note [A job ends as a whole]."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shardwise._torch.c10d import set_default_timeout
from shardwise.core.doing import tell
from shardwise.errors import LaunchError, ShardwiseError
from shardwise.launch.job import Failed, Message, Settings

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""
before_done: list[Callable[[], None]] = []
"""Called on a rank whose function has returned, before the launcher hears of it."""
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
        tell(f"had returned from {getattr(fn, '__name__', fn)}")
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
