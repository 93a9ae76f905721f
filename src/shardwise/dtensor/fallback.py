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

from shardwise.dtensor import inference
from shardwise.dtensor.foreach import FUSED_STEPS, count_writes, is_foreach
from shardwise.dtensor.fused_step import fused_step
from shardwise.dtensor.gradients import reduced_together
from shardwise.dtensor.reduced import remember
from shardwise.rules.catalog import rule_caches
from shardwise.rules.loss import bce
from shardwise.simulation.ranks import one_for_all

aten = torch.ops.aten

#: The kernels of dtensor.above_autograd, by op.
kernels_above: dict[Any, Callable[..., Any]] = {}


@functools.lru_cache(maxsize=1024)
def parts_of(op: Any) -> Callable[..., Any] | None:
    """A function that does what `op` does with other ops, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if op in _OWN_PARTS:
        return _OWN_PARTS[op]
    if op in kernels_above:
        return kernels_above[op]
    if op in FUSED_STEPS:
        return functools.partial(fused_step, op)
    if is_foreach(op):
        return functools.partial(_one_by_one, op)
    if op._schema.is_mutable:
        return None
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"):
        return op.decompose
    # Imported late: it takes most of a second, and most programs never need it.
    from torch._decomp import decomposition_table

    return decomposition_table.get(op)


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
        whole.append(type(tensor).wrap(local, layout))
    total: Any = torch.stack([(~torch.isfinite(tensor)).sum() for tensor in whole]).sum()
    found_inf.masked_fill_(one_for_all(total.full_tensor()) > 0, 1.0)
    for tensor in tensors:
        tensor.mul_(inv_scale)
    count_writes(tensors)


def _weight_norm_backward(
    grad: torch.Tensor, v: torch.Tensor, g: torch.Tensor, norms: torch.Tensor, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of `v * (g / norms)`, where `norms` are those of the slices of `v` along `dim`."""
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    along = (grad * v).sum(others, keepdim=True) / norms
    return (g / norms) * (grad - v * (along / norms)), along


def _of_nothing_too(op: Any, grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The gradient of a mean, which torch's parts divide by the number of elements."""
    from torch._decomp import decomposition_table

    return decomposition_table[op](grad, x, *rest) if x.numel() else x * grad


def _repeat(x: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    """Of a tensor that is repeated zero times, torch's parts make a plain one."""
    from torch._decomp import decomposition_table

    if len(repeats) < x.dim() or all(repeats):  # the first is an error that torch has
        return decomposition_table[aten.repeat.default](x.contiguous(), repeats)  # as one device
    sizes = (1,) * (len(repeats) - x.dim()) + tuple(x.shape)
    return x.new_empty([size * times for size, times in zip(sizes, repeats, strict=True)])


def _binary_cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    """By the kernel of one device, which torch's parts of it are not: it looks at the values."""
    losses = type(x).__torch_dispatch__(bce, None, (x, target))
    losses = losses if weight is None else losses * weight
    return losses if reduction == 0 else losses.mean() if reduction == 1 else losses.sum()


#: Ops that torch does not take apart itself, or not for all sizes.
_OWN_PARTS: dict[Any, Callable[..., Any]] = {
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten.repeat.default: _repeat,
    aten.binary_cross_entropy.default: _binary_cross_entropy,
    **{
        op: functools.partial(_of_nothing_too, op)
        for op in (
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
        )
    },
    aten._is_any_true.default: aten.any.default,
    aten._is_all_true.default: aten.all.default,
    # Asked of a value and its tangent, which may lie otherwise: what counts is the whole.
    aten._has_same_storage_numel.default: lambda x, other: x.numel() == other.numel(),
    # What torch's C++ asks where it takes no symbols: then the sizes are fixed, as on one device.
    aten.size.default: lambda x: tuple(map(int, x.shape)),
    aten.stride.default: lambda x: tuple(map(int, x.stride())),
    aten.storage_offset.default: lambda x: 0,
    **inference.PARTS,
}


def _item(args: Sequence[Any], number: int) -> list[Any]:
    return [a[number] if isinstance(a, (list, tuple)) else a for a in args]


def _named_item(kwargs: Mapping[str, Any], number: int) -> dict[str, Any]:
    return {k: v[number] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
