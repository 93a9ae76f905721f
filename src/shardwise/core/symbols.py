"""Arithmetic of symbolic sizes that a compiler's graph need not hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from shardwise._torch.symint import compute
from shardwise.core.world import in_simulated_world

_Result = TypeVar("_Result")


def unrecorded(fn: Callable[..., _Result], *args: Any) -> _Result:
    """`fn(*args)`; what it computes with sizes does not enter a graph that is being traced.

    When it makes a tensor, torch notes how it got a size, such as `s = 1 + (s - 1)` for the memory
    of `s` entries, and the last note about `s` answers for every `s` that has none of its own: that
    one would answer for itself. Sizes without notes are built from a graph's inputs when needed.
    """
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with disable_proxy_modes_tracing():
        return fn(*args)


def decided(claim: Callable[[], Any]) -> bool:
    """What the compiler says to a claim about symbolic sizes, which makes its graphs simpler.

    Where one process plays all ranks, it has a graph for each answer: there the sizes of all ranks
    meet, and simple ones matter. Where it is one rank, one graph serves all sizes, and so does an
    exported program. These, and sizes that depend on values, have the answer False where it is not
    known to be True.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

    one_graph = torch.compiler.is_exporting() or not in_simulated_world()
    answer = statically_known_true if one_graph else guard_or_false
    if torch.compiler.is_dynamo_compiling():
        return bool(answer(claim()))
    return unrecorded(lambda: bool(answer(claim())))


def noted(numbers: Sequence[Any]) -> Sequence[Any]:
    """`numbers`, which a graph that is being traced can hold: the same object where it does.

    torch builds some expressions of sizes when it needs them, but not powers, such as `s * s`, nor
    products of three: those it must have seen. A size that it has not seen is looked up by its
    symbol, each time anew; where it was computed with in the meantime, as above, that would lead
    back to itself.
    """
    if all(type(n) is not torch.SymInt for n in numbers):
        return numbers
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    if mode is None:
        return numbers
    found = tuple(_noted(n, mode.tracer) if type(n) is torch.SymInt else n for n in numbers)
    changed = any(a is not b for a, b in zip(found, numbers, strict=True))
    return found if changed else numbers


def _noted(number: torch.SymInt, tracer: Any) -> Any:
    if not number.node.is_symbolic() or number in tracer.symnode_tracker:
        return number
    is_symbol = number.node.expr.is_Symbol
    return _tracked(number, tracer) if is_symbol else _computed(number, tracer)


def _tracked(number: Any, tracer: Any) -> Any:
    from torch.fx.experimental.proxy_tensor import get_proxy_slot, set_proxy_slot

    proxy = get_proxy_slot(number, tracer, None)
    if proxy is None:
        proxy = _under_another_name(number, tracer)
    if proxy is not None:
        set_proxy_slot(number, tracer, proxy)
    return number


def _under_another_name(number: torch.SymInt, tracer: Any) -> Any:
    """The note about a size that only values tell: each trace has a symbol of its own for it.

    Torch then gives it the name of the first trace, and finds its notes under the other one.
    """
    env, name = number.node.shape_env, number.node.expr
    found = (e.proxy for s, e in tracer.sympy_expr_tracker.items() if env.replace(s) == name)
    return next(found, None)


def _computed(number: torch.SymInt, tracer: Any) -> Any:
    expr, env = number.node.expr, number.node.shape_env
    symbols = {
        symbol: _tracked(env.create_symintnode(symbol, hint=None), tracer)
        for symbol in expr.free_symbols
    }
    found = compute(expr, symbols)
    # Sizes that went through floats, as those of scaled images, are not computed in Python.
    return found if isinstance(found, (int, torch.SymInt)) else number


def settle_ones(sizes: Sequence[Any]) -> None:
    """Let the compiler decide now which of these sizes of a tensor are 1, and so no symbols.

    Of ints that a program brings, such as `(1, n, 1)` for a split, it may find out when it traces
    the graph: too late, since by then it has noted which sizes of the outputs are symbols.
    """
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    for size in sizes:
        if type(size) is torch.SymInt and size.node.is_symbolic():
            guard_or_false(size == 1)
