"""New tensors inside a compiled region.

As in `traced`, the compiler takes an op where it would refuse to read how a subclass is made. One
makes a tensor of one number, or without values; draws are then written to it, as to any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.encode import (
    decode_mesh,
    decode_placements,
    encode_mesh,
    encode_placements,
)
from shardwise.core.placements import Placement
from shardwise.dtensor.mesh_context import current_mesh
from shardwise.dtensor.traced import is_traced, unwatched
from shardwise.errors import ArgumentError

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "create(SymInt[] size, Scalar? value, str mesh, int[]? placements, ScalarType? dtype) -> Tensor"
)
_library.define("distribute(Tensor x, str mesh, int[]? placements, int? source) -> Tensor")


def is_traceable(requires_grad: bool, generator: torch.Generator | None = None) -> bool:
    """Whether torch.compile reads the program and takes such a call.

    As of plain tensors, it makes no leaves that require grad and knows no generators but the
    default one.
    """
    return is_traced() and not requires_grad and generator is None


def traced_create(
    size: Sequence[Any],
    value: Any,
    dtype: torch.dtype | None,
    layout: torch.layout,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
) -> Any:
    """A tensor of one number, or without values where that is None."""
    if layout is not torch.strided:
        raise ArgumentError(f"A DTensor is strided, and layout={layout} was asked for.")
    encoded = encode_mesh(mesh if mesh is not None else current_mesh())
    return torch.ops.shardwise.create(size, value, encoded, encode_placements(placements), dtype)


def traced_distribute(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    source: int | None,
) -> Any:
    """`distribute_tensor` of a tensor that needs no gradient."""
    encoded = encode_mesh(mesh if mesh is not None else current_mesh())
    return torch.ops.shardwise.distribute(tensor, encoded, encode_placements(placements), source)


def install(create: Callable[..., Any], distribute: Callable[..., Any]) -> None:
    """Let the ops do what these do.

    They are called as `create(size, value, device_mesh=, placements=, dtype=)` and
    `distribute(tensor, mesh, placements, src_data_rank=)`.
    """

    def run_create(size: Any, value: Any, mesh: str, placements: Any, dtype: Any) -> Any:
        options = {
            "device_mesh": decode_mesh(mesh),
            "placements": decode_placements(placements),
            "dtype": dtype,
        }
        return create(size, value, **options)

    def run_distribute(tensor: Any, mesh: str, placements: Any, source: Any) -> Any:
        return distribute(
            tensor, decode_mesh(mesh), decode_placements(placements), src_data_rank=source
        )

    _library.impl("create", unwatched(run_create), "CompositeImplicitAutograd")
    _library.impl("distribute", unwatched(run_distribute), "CompositeImplicitAutograd")
