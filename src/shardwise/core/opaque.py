"""Values that torch.compile keeps as constants of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._library.opaque_object import MemberType, register_opaque_type
from torch._opaque_base import OpaqueBase

_Class = TypeVar("_Class", bound=type)

#: Older compilers read a mesh and a value otherwise.
IS_OLD_COMPILER = torch.__version__ < "2.13"
#: What a class of such values derives from. Older torch wants this metaclass, which slows every
#: isinstance().
if TYPE_CHECKING:
    ValueBase = object
else:
    ValueBase = OpaqueBase if IS_OLD_COMPILER else object


def graph_constant(cls: _Class) -> _Class:
    """A frozen dataclass that may be made, read and passed on inside a compiled region."""
    fields: tuple[str, ...] = cls.__match_args__  # type: ignore[attr-defined]
    methods = [name for base in cls.__mro__[:-1] for name in vars(base) if name.startswith("is_")]
    names = (*fields, *methods, "__repr__", *(("__eq__",) if IS_OLD_COMPILER else ()))
    members = dict.fromkeys(names, MemberType.USE_REAL)
    cls.__fx_repr__ = _spelling  # type: ignore[attr-defined]
    register_opaque_type(cls, typ="value", members=members)
    return cls


def _spelling(self: Any) -> tuple[str, dict[str, type]]:
    """How the code of a graph spells the value, and what the names in it stand for."""
    cls = type(self)
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in cls.__match_args__)
    return f"{cls.__name__}({fields})", {cls.__name__: cls}
