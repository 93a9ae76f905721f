"""torch.compile's bytecode tracer: which frames it skips, graph breaks, and its reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise._torch.compat import Names, Probe

_names = Names()
_reset: Callable[[], Any] = _names.later(
    "torch._dynamo.reset", "the sweep over ops cannot compile each case separately"
)
_FRAMES = "torch._C._dynamo.eval_frame"


def _leave_untraced(set_strategy: Any, strategy: Any, action: Any) -> Callable[[Any], None]:
    skip = strategy(action.SKIP, action.SKIP)
    return lambda code: set_strategy(code, skip)


#: Has dynamo skip a code object and all that it calls, where a graph breaks.
leave_untraced: Callable[[Any], None] = _names.make(
    "set_code_exec_strategy _FrameExecStrategy _FrameAction",
    _FRAMES,
    "torch.compile also compiles this package where a graph breaks, and may fail there",
    _leave_untraced,
    instead=lambda code: None,
)


def break_graph(fn: Any, reason: str) -> None:
    """Have compiled regions break their graph at calls of `fn`.

    As `torch.compiler.disable` does, without importing the compiler.
    """
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = reason


def reset() -> None:
    """Drop all compiled code."""
    _reset()()


def probe() -> Probe:
    return _names.probe(_is_left, "torch.compile looks into this package where a graph breaks")


def _is_left() -> bool:
    leave_untraced((lambda: None).__code__)
    return True
