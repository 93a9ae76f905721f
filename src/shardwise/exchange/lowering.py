"""The order of ops with effects in code that inductor makes.

Each of them runs collectives, so all ranks must run them in one order, whatever the sizes on a
rank. Graphs have them in order. But torch 2.13 hands the order on to inductor's scheduler under
names that the scheduler does not look up, and where it sorts kernels for the least memory it may
swap two of them, on one rank and not on another. So their kernels are told here what ran before.
"""

from __future__ import annotations

from typing import Any

from shardwise._torch.inductor import is_imported, lower_in_order

_ops: list[Any] = []


def stays_in_order(op: Any) -> None:
    """Inductor is to keep calls of `op` in order, among each other and with others of these."""
    _ops.append(op)


def keep_order() -> None:
    """Tell inductor, if it is there."""
    while _ops and is_imported():
        lower_in_order(_ops.pop())
