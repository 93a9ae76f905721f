"""Tensors for state that an object does not have yet, such as the moments of a new optimizer."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.checkpoint.index import SavedTensor
from shardwise.core.layout import contiguous_stride, make_layout
from shardwise.core.placements import REPLICATE
from shardwise.dtensor.tensor import DTensor
from shardwise.rules.draws import new_parts


def tensor_like(owner: Any, path: tuple[Any, ...], saved: SavedTensor) -> torch.Tensor:
    """An empty tensor for what was saved at `path` of the state of `owner`.

    The state of an optimizer lies like its parameter where it has the parameter's shape. What has
    another shape is replicated over the parameter's mesh; a number, such as the count of steps, is
    a plain tensor on the CPU, as torch makes it. Anything else is a plain tensor too.
    """
    parameter = _parameter(owner, path)
    if parameter is not None and tuple(parameter.shape) == saved.shape:
        return torch.empty_like(parameter, dtype=saved.dtype, requires_grad=False)
    if saved.shape and isinstance(parameter, DTensor):
        grid = parameter._layout.grid
        whole = (REPLICATE,) * grid.num_axes
        stride = contiguous_stride(saved.shape)
        layout = make_layout(grid, whole, saved.shape, stride, saved.dtype)
        return DTensor._wrap(new_parts(layout, torch.device(grid.device_type)), layout)
    device = parameter.device if parameter is not None and saved.shape else torch.device("cpu")
    return torch.empty(saved.shape, dtype=saved.dtype, device=device)


def _parameter(owner: Any, path: tuple[Any, ...]) -> torch.Tensor | None:
    """The parameter that an entry of an optimizer's state belongs to."""
    if len(path) < 3 or path[0] != "state" or not hasattr(owner, "param_groups"):
        return None
    key = path[1]
    named = getattr(owner, "named_params", None)
    if isinstance(key, str) and named is not None:
        return dict(named).get(key)
    unique = {id(p): p for group in owner.param_groups for p in group["params"]}
    parameters = list(unique.values())
    return parameters[key] if isinstance(key, int) and 0 <= key < len(parameters) else None
