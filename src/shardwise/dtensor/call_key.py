"""The key of a call: what decides how it is planned, and the local operands beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.dtensor.foreach import takes_lists
from shardwise.dtensor.keywords import TensorByKeyword
from shardwise.dtensor.mixing import check_plain
from shardwise.dtensor.plain_gradients import keep_plain
from shardwise.dtensor.wrapped import Wrapped


class _Flag:
    """Stands for True or False in a key, where they would equal 1 and 0."""


TRUE, FALSE = _Flag(), _Flag()


def add_argument(
    op: Any, value: Any, key: list[Any], operands: list[Any] | None, position: int | None = None
) -> None:
    """Add an argument other than a DTensor or an int to the key and to the local operands.

    `position` is that of the list which holds it; without, it is the next argument.
    """
    kind = type(value)
    if kind is float or kind is torch.SymFloat:
        # A number changes a value, never a layout: keyed by kind, or every step would be a miss.
        # The hash of one that compiled code takes as an argument would make it a constant.
        key.append(float)
    elif kind is bool:
        key.append(TRUE if value else FALSE)
    elif kind is list or kind is tuple:
        part, value = _list_key(op, value, None if operands is None else len(operands))
        key.append(part)
    elif isinstance(value, Wrapped):
        if operands is None:
            raise TensorByKeyword
        key.append(value._layout)
        value = value._local
    elif isinstance(value, torch.Tensor):
        if position is None and operands is not None:
            position = len(operands)
        check_plain(op, value, position)
        if value.requires_grad:
            keep_plain(value)
        key.append((torch.Tensor, value.dtype, value.shape, value.stride()))
    elif kind is torch.Generator:
        key.append(kind)  # its state changes values, never a layout
    else:
        key.append(value)
    if operands is not None:
        operands.append(value)


def _list_key(op: Any, items: Sequence[Any], position: int | None) -> tuple[Any, list[Any]]:
    """What a list adds to the key, and its items as local operands.

    `position` is that of the argument, or None for a keyword.
    """
    first = type(items[0]) if items else None
    if first is not None and issubclass(first, Wrapped) and position is not None:
        try:  # the lists of a foreach op are long, and of tensors only
            return tuple([x._layout for x in items]), [x._local for x in items]
        except AttributeError:
            pass
    elif first is float and set(map(type, items)) == {float}:
        return (float, len(items)), list(items)
    key: list[Any] = []
    operands: list[Any] = []
    for item in items:
        if type(item) is int:
            key.append(item)
            operands.append(item)
        elif isinstance(item, torch.Tensor) and not isinstance(item, Wrapped) and takes_lists(op):
            key.append(torch.Tensor)  # plain tensors beside DTensors do not meet them
            operands.append(item)
        else:
            add_argument(op, item, key, None if position is None else operands, position)
    return tuple(key), operands
