"""Where the ranks of a job meet."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch.distributed as dist

from shardwise.errors import LaunchError

LOOPBACK = "127.0.0.1"
"""The address that only this machine can reach."""
distributed: Any = dist  # the stubs of torch do not list TCPStore


def open_store(host: str, port: int) -> Any:
    """A store on `host` alone, where torch would listen on every interface."""
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
