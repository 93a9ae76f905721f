"""Ops with effects, which compiled graphs and inductor's code keep in program order."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from shardwise._torch.compat import Missing, Names, Probe
from shardwise._torch.dispatch import active_modes
from shardwise._torch.functions import tree_map

_names = Names()
_WITHOUT = "sharded modules and collections cannot be compiled"
_register: Any = _names.find("torch.library._register_effectful_op", _WITHOUT)
_ordered: Any = _names.find("torch._library.effects.EffectType.ORDERED", _WITHOUT)
_checkpointed: Any = _names.find("torch.utils.checkpoint._CachingTorchDispatchMode", _WITHOUT)
_tracing: Any = _names.find("torch._guards.TracingContext", _WITHOUT)


def mark_ordered(op: str, library: torch.library.Library) -> None:
    """Make the compiler keep an op in program order. Call `require_effects` before tracing one."""
    if not isinstance(_register, Missing) and not isinstance(_ordered, Missing):
        _register(op, _ordered, lib=library)


def require_effects() -> None:
    """Raise where this torch has no ops with effects."""
    _names.require(_WITHOUT)


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
    return _names.probe(
        lambda: _is_outside() and _makes_kernels(),
        "compiled code does not keep the order of collectives",
    )


def _is_outside() -> bool:
    return current_compilation() is None and not is_checkpointed()


# -- inductor ------------------------------------------------------------------------------------


_NO_LOWERING = "torch.compile with inductor fails on sharded modules and collections"
_LOWERING = "torch._inductor.lowering"
_register_lowering: Callable[[], Any] = _names.later(f"{_LOWERING}.register_lowering", _NO_LOWERING)
_kernel: Callable[[], Any] = _names.later("torch._inductor.ir.FallbackKernel", _NO_LOWERING)
_box: Callable[[], Any] = _names.later("torch._inductor.ir.TensorBox", _NO_LOWERING)
_node: Callable[[], Any] = _names.later("torch._inductor.ir.IRNode", _NO_LOWERING)
_virtual: Callable[[], Any] = _names.later("torch._inductor.virtualized.V", _NO_LOWERING)

#: The last of the ordered kernels in a graph that is being lowered.
_last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_imported() -> bool:
    """Whether a program uses inductor: its import takes a second, and not all backends need it."""
    return _LOWERING in sys.modules


def lower_in_order(op: Any) -> None:
    """Make inductor run kernels of `op` after those of earlier ordered ops."""
    _register_lowering()(op, type_promotion_kind=None)(_lowered(op))


def _lowered(op: Any) -> Any:
    kernel_type, node_type, box, virtual = _kernel(), _node(), _box(), _virtual()

    def run(*args: Any, **kwargs: Any) -> Any:
        graph, start = virtual.graph, len(virtual.graph.operations)
        result = kernel_type.create(op, *args, **kwargs)
        made = graph.operations[start:]
        kernel = next(node for node in made if isinstance(node, kernel_type))
        before = _last.get(graph)
        # Older versions have another kind of kernel for ops with effects.
        star_deps = getattr(graph, "additional_star_deps", None)
        if before is not None and star_deps is not None:
            star_deps[kernel.get_operation_name()].add(before.get_name())
        _last[graph] = made[-1]
        return tree_map(lambda x: box.create(x) if isinstance(x, node_type) else x, result)

    return run


def _makes_kernels() -> bool:
    return callable(_kernel().create) and issubclass(_kernel(), _node()) and callable(_box().create)
