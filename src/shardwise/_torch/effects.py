"""Ops with effects, which a compiled graph keeps in program order."""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.compat import Missing, Names, Probe
from shardwise._torch.dispatch import active_modes

_names = Names()
_WITHOUT = "sharded modules and collections cannot be compiled"
_register: Any = _names.find("torch.library._register_effectful_op", _WITHOUT)
_ordered: Any = _names.find("torch._library.effects.EffectType.ORDERED", _WITHOUT)
_checkpointed: Any = _names.find("torch.utils.checkpoint._CachingTorchDispatchMode", _WITHOUT)
_tracing: Any = _names.find("torch._guards.TracingContext", _WITHOUT)


def mark_ordered(op: str, library: torch.library.Library) -> None:
    """Have the compiler keep an op in order. Call `require_effects` before tracing one."""
    if not isinstance(_register, Missing) and not isinstance(_ordered, Missing):
        _register(op, _ordered, lib=library)


def require_effects() -> None:
    """Raise where this torch has no ops with effects."""
    _names.require()


def current_compilation() -> Any:
    """The compilation that runs now, the same object in all of its traces; None outside."""
    return _tracing.try_get()


def let_decide(decides: Any) -> None:
    """Let `bool(decides)` say whether torch may cache code of ops with effects on disk."""
    wrapper: Any = torch.ops.higher_order.with_effects
    wrapper._cacheable = decides


def is_checkpointed() -> bool:
    """Whether the compiler traces a part that backward recomputes."""
    if torch.fx.traceback.get_current_meta().get("recompute") is not None:
        return True
    return any(isinstance(mode, _checkpointed) for mode in active_modes())


def probe() -> Probe:
    return _names.probe(_is_outside, "compiled code does not keep the order of collectives")


def _is_outside() -> bool:
    return current_compilation() is None and not is_checkpointed()
