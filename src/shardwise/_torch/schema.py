"""Ops as objects: their types, decompositions, and faster bindings."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwise._torch.compat import Names, Probe
from shardwise._torch.dispatch import has_kernel_for_key

_names = Names()
_NO_PLANS = "calls of DTensors cannot be planned"

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._prims_common import is_contiguous_or_false as is_contiguous_or_false
    from torch._prims_common import suggest_memory_format as suggest_memory_format
else:
    OpOverload = _names.find("torch._ops.OpOverload", _NO_PLANS)
    OpOverloadPacket = _names.find("torch._ops.OpOverloadPacket", "register_rule() fails")
    is_contiguous_or_false = _names.find(
        "torch._prims_common.is_contiguous_or_false", "DTensors with symbolic sizes fail"
    )
    suggest_memory_format = _names.find(
        "torch._prims_common.suggest_memory_format", "convolutions of DTensors fail"
    )

#: Torch's Python decompositions, by op; takes most of a second to import.
decompositions: Callable[[], dict[Any, Callable[..., Any]]] = _names.later(
    "torch._decomp.decomposition_table", "ops without a rule that torch could decompose fail"
)

_SLOWER = "local ops take longer"
#: Where torch keeps the Python bindings of ops, by the name of the op.
BINDINGS = tuple(
    home
    for name in ("_VariableFunctions", "_nn", "TensorBase")
    if (home := _names.find(f"torch._C.{name}", _SLOWER, instead=None)) is not None
)

_meta_key: Any = _names.make("DispatchKey", "torch._C", _NO_PLANS, lambda key: key.Meta)


def has_python_meta(op: OpOverload) -> bool:
    """Whether torch infers the op's shapes in Python, which imports its compiler."""
    return _meta_key in op.py_kernels


def is_composite(op: OpOverload) -> bool:
    """Whether torch implements an op by other ops, below Python."""
    return has_kernel_for_key(op.name(), "CompositeImplicitAutograd")


def probe() -> Probe:
    return _names.probe(
        _is_known, "ops are not recognised, and calls of DTensors cannot be planned"
    )


def _is_known() -> bool:
    mm, linear, x = torch.ops.aten.mm.default, torch.ops.aten.linear.default, torch.empty(2, 3)
    kinds = isinstance(mm, OpOverload) and isinstance(torch.ops.aten.mm, OpOverloadPacket)
    composite = is_composite(linear) and not is_composite(mm)
    formats = is_contiguous_or_false(x) and suggest_memory_format(x) is torch.contiguous_format
    quick = any(hasattr(home, "mm") for home in BINDINGS)
    return (
        kinds and composite and formats and quick and torch.ops.aten.t.default in decompositions()
    )
