"""The order of ops with effects in code that inductor makes.

Each of them runs collectives, so all ranks must run them in one order, whatever the sizes on a
rank. Graphs have them in order. But torch 2.13 hands the order on to inductor's scheduler under
names that the scheduler does not look up, and where it sorts kernels for the least memory it may
swap two of them, on one rank and not on another. So their kernels are told here what ran before.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from torch.utils._pytree import tree_map

_ops: list[Any] = []
#: The last of these kernels in a graph that is being lowered.
_last: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def stays_in_order(op: Any) -> None:
    """Inductor is to keep calls of `op` in order, among each other and with others of these."""
    _ops.append(op)


def keep_order() -> None:
    """Tell inductor, if it is there: it takes a second to import, and other backends need none."""
    lowering = sys.modules.get("torch._inductor.lowering")
    while lowering is not None and _ops:
        op = _ops.pop()
        lowering.register_lowering(op, type_promotion_kind=None)(_lowered(op))


def _lowered(op: Any) -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    def run(*args: Any, **kwargs: Any) -> Any:
        graph, start = V.graph, len(V.graph.operations)
        result = ir.FallbackKernel.create(op, *args, **kwargs)
        made = graph.operations[start:]
        kernel = next(node for node in made if isinstance(node, ir.FallbackKernel))
        before = _last.get(graph)
        # Older ones have another kind of kernel for ops with effects.
        star_deps = getattr(graph, "additional_star_deps", None)
        if before is not None and star_deps is not None:
            star_deps[kernel.get_operation_name()].add(before.get_name())
        _last[graph] = made[-1]
        return tree_map(lambda x: ir.TensorBox.create(x) if isinstance(x, ir.IRNode) else x, result)

    return run
