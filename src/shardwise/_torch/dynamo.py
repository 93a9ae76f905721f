"""torch.compile's bytecode tracer: which frames it leaves alone, and when it starts anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise._torch.compat import Names, Probe

_names = Names()
_reset: Callable[[], Any] = _names.later(
    "torch._dynamo.reset", "the sweep over ops cannot compile each case anew"
)
_FRAMES = "torch._C._dynamo.eval_frame"


def _leave_untraced(set_strategy: Any, strategy: Any, action: Any) -> Callable[[Any], None]:
    as_it_is = strategy(action.SKIP, action.SKIP)
    return lambda code: set_strategy(code, as_it_is)


#: Has a code object run as it is, with all that it calls, where a compiled region is interrupted.
leave_untraced: Callable[[Any], None] = _names.make(
    "set_code_exec_strategy _FrameExecStrategy _FrameAction",
    _FRAMES,
    "torch.compile also compiles this package where a graph breaks, and may fail there",
    _leave_untraced,
    instead=lambda code: None,
)


def break_graph(fn: Any, reason: str) -> None:
    """Have compiled regions that call `fn` end before it and go on after it.

    What `torch.compiler.disable` does, without its import of the whole compiler.
    """
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = reason


def reset() -> None:
    """Forget all that was compiled."""
    _reset()()


def probe() -> Probe:
    return _names.probe(_is_left, "torch.compile looks into this package where a graph breaks")


def _is_left() -> bool:
    leave_untraced((lambda: None).__code__)
    return True
