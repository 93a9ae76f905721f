"""Installing ops with effects, which the compiler keeps in program order.

Note [Order]
Each op runs collectives, so all ranks must run them in one order, whatever their sizes. Graphs keep
that order. But torch 2.13 passes it to inductor's scheduler under names that the scheduler does not
look up, and where it sorts kernels to save memory it may swap two of them, on one rank and not on
another. So the lowering of these ops declares which kernel comes first.

Note [Cached code]
Torch does not cache the code of a graph with an op with effects on disk: its wrapper `with_effects`
is not marked as cacheable. The ops of this package depend on nothing but the graph: what they run
is a name and a string, which includes the version of this package. So their graphs may be cached;
about others torch decides.
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

#: The compilations that contain an op of this package.
_compiling: weakref.WeakSet[Any] = weakref.WeakSet()
#: Ops that inductor does not know yet; see `_keep_order`.
_unordered: list[Any] = []


def install(
    library: torch.library.Library, name: str, fn: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Give an op of this package its kernel and its fake kernel, and mark it as ordered."""
    library.impl(name, fn, "CompositeExplicitAutograd")
    watch.kernels[getattr(torch.ops.shardwise, name)] = fn
    mark_ordered(f"shardwise::{name}", library)
    torch.library.register_fake(f"shardwise::{name}", fake, lib=library)
    _unordered.append(getattr(torch.ops.shardwise, name).default)


def check_place(what: str, instead: str) -> None:
    """Raise where an op with effects cannot be; called wherever one is traced.

    `instead` says what can be exported.
    """
    require_effects()
    _keep_order()
    _allow_caching()
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            f"torch.export of {what}: an exported graph cannot ask other ranks. Use torch.compile"
            f"{instead}."
        )
    if torch.is_grad_enabled() and is_checkpointed():
        raise UnsupportedError(
            f"{what[0].upper()}{what[1:]} inside activation checkpointing, in compiled code: torch "
            "saves for backward that it ran, and fails. Checkpoint the code around it, or compile "
            "without it."
        )


def _keep_order() -> None:
    """Have inductor keep calls of these ops in order, once it is imported; Note [Order]."""
    while _unordered and is_imported():
        lower_in_order(_unordered.pop())


def _allow_caching() -> None:
    """Let torch cache the code of the graph that is being traced; Note [Cached code]."""
    context = current_compilation()
    if context is not None:
        _compiling.add(context)
        _decide_caching()


class _OfThisPackage:
    """True while a graph is compiled that holds an op of this package."""

    def __bool__(self) -> bool:
        return current_compilation() in _compiling


@functools.cache
def _decide_caching() -> None:
    let_decide(_OfThisPackage())
