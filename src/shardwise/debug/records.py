"""Noted: one recorded call of `agree`, and its text; see Note [Journals]."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from shardwise.core.layout import Layout


class Noted:
    """One call: its key, its code, what it is, and the line of the program that first made it."""

    __slots__ = ("code", "key", "line", "text")

    def __init__(self, key: list[Any] | None, code: int, text: str, line: str | None) -> None:
        self.key, self.code, self.text, self.line = key, code, text, line

    def __str__(self) -> str:
        return f"{self.text} at {self.line}" if self.line is not None else self.text


#: Stands for a record where there is none.
NOTHING = Noted(None, 0, "nothing", None)


def code_of(text: str) -> int:
    hashed = hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=8)
    return int.from_bytes(hashed.digest(), "little", signed=True)


#: Types of arguments that are written into a record as they are.
PLAIN = frozenset(
    {
        bool,
        int,
        float,
        complex,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


def call_text(func: Any, key: Sequence[Any]) -> str:
    name = str(func) if hasattr(func, "_schema") else func.__qualname__
    return f"{name}({listed(key[1:])})"


def listed(parts: Sequence[Any]) -> str:
    """The parts of a key as text."""
    words: list[str] = []
    before: Any = None
    for part in parts:
        if type(part) is int and isinstance(before, Layout):
            words[-1] += f" ({_which_text(part)})"
        elif isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str):
            words.append(f"{part[0]}={listed(part[1:])}")
        elif isinstance(part, tuple):
            words.append(f"({listed(part)})")
        else:
            words.append(repr(part) if isinstance(part, (str, Layout)) else str(part))
        before = part
    return ", ".join(words)


def _which_text(number: int) -> str:
    if number < 0:
        return f"tensor {-number:,}"
    return "the last tensor" if number == 1 else f"{number:,} tensors back"
