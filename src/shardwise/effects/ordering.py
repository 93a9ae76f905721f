"""Ops of a compiled graph that run what eager code does, collectives included.

The compiler keeps such ops in the order of the program: they count as ops with effects.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.effects import (
    current_compilation,
    is_checkpointed,
    let_decide,
    mark_ordered,
    require_effects,
)
from shardwise._torch.inductor import is_imported, lower_in_order
from shardwise.comm.watch import watch
from shardwise.errors import UnsupportedError

# Code of graphs that hold ops with effects, in torch's caches on disk.
#
# Torch keeps no code on disk of a graph with an op with effects, whatever the op: its wrapper
# `with_effects` is not marked as one that a cache may hold. But nothing of the ops of this
# package comes from anywhere else than the graph: what they run is a name and a text, and the
# text says of which version of this package it is. So graphs of them may be kept; about others
# torch decides.

#: The compilations that came by an op of this package.
_compiling: weakref.WeakSet[Any] = weakref.WeakSet()


class _OfThisPackage:
    """True while a graph is compiled that holds an op of this package."""

    def __bool__(self) -> bool:
        return current_compilation() in _compiling


def may_be_kept() -> None:
    """The graph that is being traced may be kept on disk; called for each op with effects."""
    context = current_compilation()
    if context is not None:
        _compiling.add(context)
        _mark()


@functools.cache
def _mark() -> None:
    let_decide(_OfThisPackage())


# The order of ops with effects in code that inductor makes.
#
# Each of them runs collectives, so all ranks must run them in one order, whatever the sizes on a
# rank. Graphs have them in order. But torch 2.13 hands the order on to inductor's scheduler under
# names that the scheduler does not look up, and where it sorts kernels for the least memory it
# may swap two of them, on one rank and not on another. So their kernels are told here what ran
# before.

_ops: list[Any] = []


def stays_in_order(op: Any) -> None:
    """Inductor is to keep calls of `op` in order, among each other and with others of these."""
    _ops.append(op)


def keep_order() -> None:
    """Tell inductor, if it is there."""
    while _ops and is_imported():
        lower_in_order(_ops.pop())


# MERGED
# MERGED


def install(
    library: torch.library.Library, name: str, fn: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Let an op of this package run `fn`, and `fake` where there are shapes alone."""
    library.impl(name, fn, "CompositeExplicitAutograd")
    watch.kernels[getattr(torch.ops.shardwise, name)] = fn
    mark_ordered(f"shardwise::{name}", library)
    torch.library.register_fake(f"shardwise::{name}", fake, lib=library)
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
