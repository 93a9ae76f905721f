"""Values that torch.compile keeps as constants of a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from shardwise._torch.compat import VERSION, Names, Probe

_names = Names()
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


def probe() -> Probe:
    return _names.probe(_registers, _WITHOUT)


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
