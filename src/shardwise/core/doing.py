"""What each rank is doing, written to the store of the rendezvous.

For ranks whose collective failed: the group cannot be used any more, but the store can.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from shardwise._torch.c10d import default_store

_EVERY_S = 0.02


def _key(topic: str, rank: int) -> str:
    return f"shardwise/{topic}/{rank}"


def tell(text: str, topic: str = "doing") -> None:
    """Write what this rank does; what it wrote first stays."""
    with contextlib.suppress(RuntimeError):  # the store may be gone as well
        default_store().compare_set(_key(topic, dist.get_rank()), "", text)


def heard(num_ranks: int, wait_s: float, topic: str = "doing") -> dict[int, str]:
    """What each rank has written; waits so long for those that have not."""
    said: dict[int, str] = {}
    until_s = time.monotonic() + wait_s
    with contextlib.suppress(RuntimeError):
        store = default_store()
        while True:
            for rank in range(num_ranks):
                if rank not in said and store.check([_key(topic, rank)]):
                    said[rank] = store.get(_key(topic, rank)).decode()
            if len(said) == num_ranks or time.monotonic() > until_s:
                break
            time.sleep(_EVERY_S)
    return said
