"""Values that torch.compile keeps as constants of a graph."""

from __future__ import annotations

from typing import Any, TypeVar

from shardwise._torch.opaque import IS_OLD_COMPILER, register_value

_Class = TypeVar("_Class", bound=type)


def graph_constant(cls: _Class) -> _Class:
    """A frozen dataclass that may be made, read and passed on inside a compiled region."""
    fields: tuple[str, ...] = cls.__match_args__  # type: ignore[attr-defined]
    methods = [name for base in cls.__mro__[:-1] for name in vars(base) if name.startswith("is_")]
    names = (*fields, *methods, "__repr__", *(("__eq__",) if IS_OLD_COMPILER else ()))
    cls.__fx_repr__ = _spelling  # type: ignore[attr-defined]
    register_value(cls, names)
    return cls


def _spelling(self: Any) -> tuple[str, dict[str, type]]:
    """How the code of a graph spells the value, and what the names in it stand for."""
    cls = type(self)
    fields = ", ".join(f"{name}={getattr(self, name)!r}" for name in cls.__match_args__)
    return f"{cls.__name__}({fields})", {cls.__name__: cls}
