"""Ops without a rule of their own: taken apart into ops that have one.

Each part is planned like any other call, so the result is right where the parts are. An op that is
handled above autograd comes here where there is no autograd: in `torch.inference_mode`, and on the
meta device. Its kernel takes it apart there too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.schema import OpOverload, decompositions, is_composite
from shardwise.dtensor.foreach import FUSED_STEPS, count_writes, is_foreach
from shardwise.dtensor.fused_step import fused_step
from shardwise.dtensor.gradients import reduced_together
from shardwise.dtensor.reduced import remember
from shardwise.rules.catalog import rule_caches
from shardwise.simulation.ranks import one_for_all

aten = torch.ops.aten

#: Ops that torch does not take apart itself, or not for all sizes; `ops.catalog` adds more.
DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {}

#: The kernels above autograd, by op; `ops.catalog` fills it.
kernels_above: dict[Any, Callable[..., Any]] = {}


@functools.lru_cache(maxsize=1024)
def parts_of(op: Any) -> Callable[..., Any] | None:
    """A function that does what `op` does with other ops, or None."""
    if not isinstance(op, OpOverload):
        return None
    if op in DECOMPOSITIONS:
        return DECOMPOSITIONS[op]
    if op in kernels_above:
        return kernels_above[op]
    if op in FUSED_STEPS:
        return functools.partial(fused_step, op)
    if is_foreach(op):
        return functools.partial(_one_by_one, op)
    if op._schema.is_mutable:
        return None
    if is_composite(op):
        return op.decompose
    # Asked last: its import takes most of a second, and most programs never need it.
    return decompositions().get(op)


rule_caches.append(parts_of.cache_clear)


def _one_by_one(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A foreach op as a loop: the same op for a single tensor, once per tensor."""
    name = op._schema.name.removeprefix("aten::_foreach_")
    writes = op._schema.is_mutable
    second = args[1] if len(args) > 1 else None
    single, in_place = _single_form(name.removesuffix("_") if writes else name, second, writes)
    if single is None:
        raise NotImplementedError(f"{op} has no form for a single tensor")
    # What is positional for many tensors may be a keyword for one: the value of addcmul.
    schema = getattr(single, single.overloads()[0])._schema
    num_positional = sum(not a.kwarg_only for a in schema.arguments)
    names = [a.name for a in schema.arguments if a.kwarg_only]
    kwargs |= dict(zip(names, args[num_positional:], strict=False))
    args = args[:num_positional]
    results = [single(*_item(args, i), **_named_item(kwargs, i)) for i in range(len(args[0]))]
    if writes and not in_place:
        for tensor, result in zip(args[0], results, strict=True):
            tensor.copy_(result)
    if writes:
        count_writes(args[0])
        return None
    return results


#: Where the op for one tensor has another name: when the second argument is a tensor, else.
_OTHER_NAMES = {
    "maximum": ("maximum", "clamp_min"),
    "minimum": ("minimum", "clamp_max"),
    "norm": ("linalg_vector_norm", "linalg_vector_norm"),
}


def _single_form(name: str, second: Any, writes: bool) -> tuple[Any, bool]:
    """The op for one tensor, and whether it is the one that writes."""
    items = second if isinstance(second, (list, tuple)) else [second]
    with_tensors, with_numbers = _OTHER_NAMES.get(name, (name, name))
    name = with_tensors if any(isinstance(item, torch.Tensor) for item in items) else with_numbers
    if writes and hasattr(aten, name + "_"):
        return getattr(aten, name + "_"), True
    return getattr(aten, name, None), False


def _unscale(tensors: Sequence[Any], found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
    """What a GradScaler does: scale gradients, and note whether any holds an infinity or NaN.

    Partial gradients are reduced together, and remember it. The counts of all gradients are added
    up first, so that every axis of a mesh is asked once.
    """
    distributed = [tensor for tensor in tensors if hasattr(tensor, "_layout")]
    whole = [tensor for tensor in tensors if not hasattr(tensor, "_layout")]
    for tensor, (local, layout) in zip(distributed, reduced_together(distributed), strict=True):
        if local is not tensor._local:
            remember(tensor, local, layout)
        whole.append(type(tensor)._wrap(local, layout))
    total: Any = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in whole]).sum()
    found_inf.masked_fill_(one_for_all(total.full_tensor()) > 0, 1.0)
    for tensor in tensors:
        tensor.mul_(inv_scale)
    count_writes(tensors)


DECOMPOSITIONS.update(
    {
        aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
        aten._is_any_true.default: aten.any.default,
        aten._is_all_true.default: aten.all.default,
        # Asked of a value and its tangent, which may lie otherwise: what counts is the whole.
        aten._has_same_storage_numel.default: lambda x, other: x.numel() == other.numel(),
        # What torch's C++ asks where it takes no symbols: the sizes are fixed, as on one device.
        aten.size.default: lambda x: tuple(map(int, x.shape)),
        aten.stride.default: lambda x: tuple(map(int, x.stride())),
        aten.storage_offset.default: lambda x: 0,
    }
)


def _item(args: Sequence[Any], number: int) -> list[Any]:
    return [a[number] if isinstance(a, (list, tuple)) else a for a in args]


def _named_item(kwargs: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {k: v[number] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
