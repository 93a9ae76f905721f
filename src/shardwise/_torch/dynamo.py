"""torch.compile: frames that it skips, graph breaks, plain gradients, constants of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.compat import VERSION, Names, Probe

_names = Names()
_reset: Callable[[], Any] = _names.later(
    "torch._dynamo.reset", "the sweep over ops cannot compile each case separately"
)
_FRAMES = "torch._C._dynamo.eval_frame"


def _leave_untraced(set_strategy: Any, strategy: Any, action: Any) -> Callable[[Any], None]:
    skip = strategy(action.SKIP, action.SKIP)
    return lambda code: set_strategy(code, skip)


#: Makes dynamo skip a code object and all that it calls, where a graph breaks.
leave_untraced: Callable[[Any], None] = _names.make(
    "set_code_exec_strategy _FrameExecStrategy _FrameAction",
    _FRAMES,
    "torch.compile also compiles this package where a graph breaks, and may fail there",
    _leave_untraced,
    instead=lambda code: None,
)


def break_graph(fn: Any, reason: str) -> None:
    """Make compiled regions break their graph at calls of `fn`.

    As `torch.compiler.disable` does, without importing the compiler.
    """
    fn._torchdynamo_disable = True
    fn._torchdynamo_disable_msg = reason


def reset() -> None:
    """Drop all compiled code."""
    _reset()()


def _as_tangent(self: torch.Tensor, context: Any, expected_type: type | None = None) -> Any:
    """A plain gradient as a compiled graph expects it; None if it expects another class.

    For an output without a gradient torch makes plain zeros, whatever class the output has, and
    then calls this to convert them.
    """
    made = getattr(expected_type, "_plain_tangent", None)
    return None if made is None else made(self, context)


leave_untraced(_as_tangent.__code__)
if not hasattr(torch.Tensor, "__coerce_same_metadata_as_tangent__"):
    torch.Tensor.__coerce_same_metadata_as_tangent__ = _as_tangent  # type: ignore[attr-defined]


def probe() -> Probe:
    return _names.probe(
        lambda: _behaves() and _registers(),
        "torch.compile looks into this package where a graph breaks; modules with unused outputs "
        "fail in backward",
    )


def _behaves() -> bool:
    leave_untraced((lambda: None).__code__)
    expected = type("Expected", (), {"_plain_tangent": lambda plain, context: context})
    coerce = torch.zeros(1).__coerce_same_metadata_as_tangent__  # type: ignore[attr-defined]
    return bool(coerce("laid out", expected) == "laid out")


# -- opaque --------------------------------------------------------------------------------------
# Values that torch.compile keeps as constants of a graph.


_WITHOUT = "compiled code cannot make or pass placements and layouts"

#: Older compilers treat meshes and values differently.
IS_OLD_COMPILER = VERSION < "2.13"
#: The base class of such values. Older torch needs its metaclass, which slows every isinstance().
if TYPE_CHECKING:
    ValueBase = object
elif IS_OLD_COMPILER:
    ValueBase = _names.find("torch._opaque_base.OpaqueBase", _WITHOUT, instead=object)
else:
    ValueBase = object


def _register(member: Any, register: Any) -> Callable[[type, Iterable[str]], None]:
    return lambda cls, names: register(
        cls, typ="value", members=dict.fromkeys(names, member.USE_REAL)
    )


#: Lets compiled code make objects of a class and read the named attributes.
register_value: Callable[[type, Iterable[str]], None] = _names.make(
    "MemberType register_opaque_type",
    "torch._library.opaque_object",
    _WITHOUT,
    _register,
    instead=lambda cls, names: None,
)


def _registers() -> bool:
    class Value(ValueBase):
        def __eq__(self, other: object) -> bool:
            return type(other) is Value

        def __hash__(self) -> int:
            return 0

        def __fx_repr__(self) -> tuple[str, dict[str, type]]:
            return "Value()", {"Value": Value}

    register_value(Value, ("__repr__", *(("__eq__",) if IS_OLD_COMPILER else ())))
    return True
