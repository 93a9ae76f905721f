"""Inductor's lowerings: the order of ordered ops in generated code."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from shardwise._torch.compat import Names, Probe
from shardwise._torch.functions import tree_map

_names = Names()
_WITHOUT = "torch.compile with inductor fails on sharded modules and collections"
_LOWERING = "torch._inductor.lowering"
_register: Callable[[], Any] = _names.later(f"{_LOWERING}.register_lowering", _WITHOUT)
_kernel: Callable[[], Any] = _names.later("torch._inductor.ir.FallbackKernel", _WITHOUT)
_box: Callable[[], Any] = _names.later("torch._inductor.ir.TensorBox", _WITHOUT)
_node: Callable[[], Any] = _names.later("torch._inductor.ir.IRNode", _WITHOUT)
_virtual: Callable[[], Any] = _names.later("torch._inductor.virtualized.V", _WITHOUT)

#: The last of the ordered kernels in a graph that is being lowered.
_last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def is_imported() -> bool:
    """Whether a program uses inductor: its import takes a second, and not all backends need it."""
    return _LOWERING in sys.modules


def lower_in_order(op: Any) -> None:
    """Have inductor run kernels of `op` after those of earlier ordered ops."""
    _register()(op, type_promotion_kind=None)(_lowered(op))


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


def probe() -> Probe:
    return _names.probe(_makes_kernels, _WITHOUT)


def _makes_kernels() -> bool:
    return callable(_kernel().create) and issubclass(_kernel(), _node()) and callable(_box().create)
