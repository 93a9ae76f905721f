"""The two parts of a DTensor, for the code that plans its calls and that the class itself needs."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.core.layout import Layout


class Wrapped(torch.Tensor):
    """A global tensor in two parts: what this process holds, and how all of it is laid out."""

    __slots__ = ("_layout", "_local")
    _local: torch.Tensor
    _layout: Layout

    @staticmethod
    def _wrap(local: torch.Tensor, layout: Layout, requires_grad: bool = False) -> Any:
        """The two parts as one tensor, unchecked."""
        raise NotImplementedError

    @staticmethod
    def _wrap_view(local: torch.Tensor, layout: Layout) -> Any:
        """As `_wrap`, inside an autograd function that got a leaf: nobody may write to its memory.

        Autograd refuses that for a view that such a function returns, as it does on one device for
        a view of a leaf.
        """
        raise NotImplementedError


def as_layouts(value: Any) -> Any:
    """`value` with the layout of each tensor in its place."""
    if isinstance(value, Wrapped):
        return value._layout
    if isinstance(value, (list, tuple)):
        return [as_layouts(v) for v in value]
    return value
