"""Indices that `nn.init.sparse_` draws: plain tensors, the same on every rank.

Torch draws the rows of each column from its default generator, which all ranks keep in step, and
writes `tensor[rows, column] = 0`. Any other plain index may be one rank's own, and is refused as
every plain tensor is that meets a DTensor.
"""

from __future__ import annotations

import inspect
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise.comm.agreement import agree_once
from shardwise.random.generators import generator_digest, generator_kind

_SPARSE = inspect.unwrap(nn.init.sparse_).__code__


def is_drawn(index: Any, caller: FrameType | None) -> bool:
    """Whether `caller`, the code that writes by `index`, is torch's own `sparse_`."""
    return type(index) is tuple and caller is not None and caller.f_code is _SPARSE


def replicated(x: Any, index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index with a replicated DTensor in place of each tensor that was drawn."""
    return tuple(_wrapped(x, item) if isinstance(item, torch.Tensor) else item for item in index)


def _wrapped(x: Any, drawn: torch.Tensor) -> Any:
    # A generator that is given to `sparse_` draws its values only: this is another one.
    agree_once(
        x._layout.grid,
        generator_kind(drawn.device, None),
        lambda: generator_digest(drawn.device, None),
    )
    return x.from_local(drawn.to(x.device), x.device_mesh)
