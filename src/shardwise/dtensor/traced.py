"""Local tensors that become DTensors inside a compiled region, and moves in exported programs.

torch.compile reads the Python of a region and refuses what it cannot read, such as the making of a
tensor subclass. An op of ours it takes as it is. The arguments of an op are numbers and texts, so
placements are encoded as numbers and meshes as text.

`torch.export` notes ops on DTensors, not what they do to local tensors, and asks for the origin of
each local tensor that is read: `redistribute` and `to_local` are ops there too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import is_function_mode_enabled, without_torch_function
from shardwise.core.encode import decode_mesh, decode_placements, encode_placements
from shardwise.core.placements import (
    Placement,
)
from shardwise.errors import UnsupportedError

_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    "from_local(Tensor local, str mesh, int[]? placements, SymInt[]? shape, SymInt[]? stride, "
    "int[]? grad_placements) -> Tensor"
)
_library.define(
    "redistribute(Tensor x, int[] placements, int[]? order, ScalarType? forward_dtype, "
    "ScalarType? backward_dtype) -> Tensor"
)
_library.define("to_local(Tensor x, int[]? grad_placements) -> Tensor")
_library.define("from_uneven(Tensor local, str mesh, int[] placements) -> Tensor")


def traced_from_local(
    local: torch.Tensor,
    mesh: str,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Placement] | None,
) -> Any:
    """`DTensor.from_local`, as torch.compile reads it."""
    if run_check:
        raise UnsupportedError(
            "from_local(run_check=True) in compiled code: what the ranks hold is compared in "
            "Python. Check outside torch.compile, and leave run_check out inside."
        )
    return torch.ops.shardwise.from_local(
        local,
        mesh,
        encode_placements(placements),
        shape,
        stride,
        encode_placements(grad_placements),
    )


def traced_from_uneven(local: torch.Tensor, mesh: str, placements: Any) -> Any:
    """What `install_from_uneven` was given, as torch.compile reads it."""
    return torch.ops.shardwise.from_uneven(local, mesh, encode_placements(placements))


def install_from_uneven(from_uneven: Callable[[torch.Tensor, Any, list[Placement]], Any]) -> None:
    """Let the op do what this does."""

    def run(local: torch.Tensor, mesh: str, placements: Any) -> Any:
        return from_uneven(local, decode_mesh(mesh), decode_placements(placements) or [])

    _library.impl("from_uneven", unwatched(run), "CompositeImplicitAutograd")


def is_traced() -> bool:
    """Whether a compiler or an exporter notes the calls of the program that runs."""
    return torch.compiler.is_dynamo_compiling() or is_exported()


def is_exported() -> bool:
    """Whether torch.export watches the program: not inside our ops, which it takes as they are."""
    return torch.compiler.is_exporting() and is_function_mode_enabled()


def unwatched(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, of which torch.export does not see what it reads: it knows no tensor made in there."""

    def run(*args: Any) -> Any:
        with without_torch_function():
            return fn(*args)

    return run


def exported_redistribute(
    x: torch.Tensor,
    placements: Sequence[Placement],
    order: Sequence[int] | None = None,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
) -> Any:
    """`x.redistribute(...)`, as torch.export notes it."""
    return torch.ops.shardwise.redistribute(
        x, encode_placements(placements), order, forward_dtype, backward_dtype
    )


def exported_to_local(x: torch.Tensor, grad_placements: Sequence[Placement] | None) -> Any:
    """`x.to_local(...)`, as torch.export notes it."""
    return torch.ops.shardwise.to_local(x, encode_placements(grad_placements))


def install(from_local: Any, redistribute: Any, to_local: Any) -> None:
    """Let the ops do what these do."""

    def run(
        local: torch.Tensor, mesh: str, placements: Any, shape: Any, stride: Any, grad: Any
    ) -> Any:
        return from_local(
            local,
            decode_mesh(mesh),
            decode_placements(placements),
            shape=shape,
            stride=stride,
            grad_placements=decode_placements(grad),
        )

    def move(x: Any, placements: Any, order: Any, forward_dtype: Any, backward_dtype: Any) -> Any:
        return redistribute(
            x,
            placements=decode_placements(placements),
            order=order,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )

    def leave(x: Any, grad_placements: Any) -> Any:
        return to_local(x, grad_placements=decode_placements(grad_placements))

    _library.impl("from_local", unwatched(run), "CompositeImplicitAutograd")
    _library.impl("redistribute", unwatched(move), "CompositeImplicitAutograd")
    _library.impl("to_local", unwatched(leave), "CompositeImplicitAutograd")
