"""Ops of a compiled graph that run what eager code does, collectives included.

The compiler keeps such ops in the order of the program: they count as ops with effects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._library.effects import EffectType
from torch.utils.checkpoint import _CachingTorchDispatchMode

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
    torch.library._register_effectful_op(f"shardwise::{name}", EffectType.ORDERED, lib=library)
    torch.library.register_fake(f"shardwise::{name}", hollow, lib=library)
    stays_in_order(getattr(torch.ops.shardwise, name).default)


def check_place(what: str, instead: str) -> None:
    """Raise where an op with effects cannot stand; called wherever one is traced.

    `instead` says what can be exported.
    """
    keep_order()
    may_be_kept()
    if torch.compiler.is_exporting():
        raise UnsupportedError(
            f"torch.export of {what}: an exported graph cannot ask other ranks. Use torch.compile"
            f"{instead}."
        )
    if torch.is_grad_enabled() and _is_checkpointed():
        raise UnsupportedError(
            f"{what[0].upper()}{what[1:]} inside activation checkpointing, in compiled code: torch "
            "saves for backward that it ran, and fails. Checkpoint what stands around it, or "
            "compile without it."
        )


def _is_checkpointed() -> bool:
    """Whether the compiler goes through a part that it is to compute again in backward."""
    if torch.fx.traceback.get_current_meta().get("recompute") is not None:
        return True
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, _CachingTorchDispatchMode) for mode in modes)


@contextlib.contextmanager
def with_autograd(enabled: bool) -> Iterator[None]:
    """Autograd as a program has it: compiled code runs below it."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        keys.ADInplaceOrView,
        keys.AutogradFunctionality,
        keys.AutogradOther,
        keys.AutogradNestedTensor,
    ):
        excluded = excluded.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.set_grad_enabled(enabled):
        yield
