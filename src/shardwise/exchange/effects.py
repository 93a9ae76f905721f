"""Ops of a compiled graph that run what eager code does, collectives included.

The compiler keeps such ops in the order of the program: they count as ops with effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.effects import is_checkpointed, mark_ordered, require_effects
from shardwise.comm.watch import watch
from shardwise.errors import UnsupportedError
from shardwise.exchange.caching import may_be_kept
from shardwise.exchange.lowering import keep_order, stays_in_order


def install(
    library: torch.library.Library, name: str, fn: Callable[..., Any], hollow: Callable[..., Any]
) -> None:
    """Let an op of this package run `fn`, and `hollow` where there are shapes alone."""
    library.impl(name, fn, "CompositeExplicitAutograd")
    watch.kernels[getattr(torch.ops.shardwise, name)] = fn
    mark_ordered(f"shardwise::{name}", library)
    torch.library.register_fake(f"shardwise::{name}", hollow, lib=library)
    stays_in_order(getattr(torch.ops.shardwise, name).default)


def check_place(what: str, instead: str) -> None:
    """Raise where an op with effects cannot stand; called wherever one is traced.

    `instead` says what can be exported.
    """
    require_effects()
    keep_order()
    may_be_kept()
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            f"torch.export of {what}: an exported graph cannot ask other ranks. Use torch.compile"
            f"{instead}."
        )
    if torch.is_grad_enabled() and is_checkpointed():
        raise UnsupportedError(
            f"{what[0].upper()}{what[1:]} inside activation checkpointing, in compiled code: torch "
            "saves for backward that it ran, and fails. Checkpoint what stands around it, or "
            "compile without it."
        )
