"""Code of graphs that hold ops with effects, in torch's caches on disk.

Torch keeps no code on disk of a graph with an op with effects, whatever the op: its wrapper
`with_effects` is not marked as one that a cache may hold. But nothing of the ops of this package
comes from anywhere else than the graph: what they run is a name and a text, and the text says of
which version of this package it is. So graphs of them may be kept; about others torch decides.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

from shardwise._torch.effects import current_compilation, let_decide

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
