"""torch.compile: which frames its tracer skips, graph breaks, plain gradients, and its reset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def _as_tangent(self: torch.Tensor, context: Any, expected_type: type | None = None) -> Any:
    """A plain gradient as a compiled graph expects it; None where it expects another class.

    For an output that has no gradient torch makes plain zeros, whatever the output was, and then
    asks the zeros to become what the graph expects.
    """
    made = getattr(expected_type, "_plain_tangent", None)
    return None if made is None else made(self, context)


leave_untraced(_as_tangent.__code__)
if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
    torch.Tensor.__coerce_same_metadata_as_tangent__ = _as_tangent  # type: ignore[attr-defined]


def probe() -> Probe:
    return _names.probe(
        _behaves,
        "torch.compile looks into this package where a graph breaks; modules with unused outputs "
        "fail in backward",
    )


def _behaves() -> bool:
    leave_untraced((lambda: None).__code__)
    expected = type("Expected", (), {"_plain_tangent": lambda plain, context: context})
    coerce = torch.zeros(1).__coerce_same_metadata_as_tangent__  # type: ignore[attr-defined]
    return bool(coerce("laid out", expected) == "laid out")
