"""Tensors in nested containers: what modules take and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch


def cast(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    """`x` in a floating dtype, if it has one."""
    return x.to(dtype) if x.is_floating_point() else x


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers."""
    found: list[torch.Tensor] = []
    mapped(value, lambda x: found.append(x) or x)  # type: ignore[func-returns-value]
    return found


def mapped(value: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `fn` applied to its tensors; the same object where none changes."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, dict):
        items = {key: mapped(item, fn) for key, item in value.items()}
        if all(items[key] is value[key] for key in items):
            return value
        made = copy.copy(value)
        for key, item in items.items():
            made[key] = item
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        fields = {name: mapped(item, fn) for name, item in held.items()}
        same = all(fields[name] is held[name] for name in held)
        return value if same else dataclasses.replace(value, **fields)
    if isinstance(value, (list, tuple)):
        parts = [mapped(item, fn) for item in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
