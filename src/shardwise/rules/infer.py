"""The global shape, stride and dtype of an op's outputs: the op itself, run without data."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise._torch.dispatch import outside_modes
from shardwise._torch.pytree import tree_leaves, tree_map
from shardwise._torch.schema import OpOverload, is_contiguous_or_false, suggest_memory_format
from shardwise._torch.symint import detect_fake_mode
from shardwise.core.layout import Layout, contiguous_stride
from shardwise.core.symbols import noted
from shardwise.rules.rule import Rule, TensorMeta


def _batch_norm(x: torch.Tensor, *rest: Any) -> Any:
    """With given statistics none are returned, whatever torch's shape function says."""
    if rest[4]:
        return torch.ops.aten.native_batch_norm.default(x, *rest)
    return torch.empty_like(x), x.new_empty(0), x.new_empty(0)


def _like_first(first: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(first.shape, dtype=first.dtype, device=first.device)


def _new_normal(op: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Dense, however a deviation for each element lies in memory."""
    made = op(*args, **kwargs)
    return torch.empty(made.shape, dtype=made.dtype, device=made.device)


def _convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Channels stand last where those of an operand do; torch's shape function knows no kernels."""
    made = torch.ops.aten.convolution.default(x, weight, *rest)
    for channels_last in (torch.channels_last, torch.channels_last_3d):
        if channels_last in (suggest_memory_format(x), suggest_memory_format(weight)):
            return torch.empty_like(made, memory_format=channels_last)
    return made


def _power(x: torch.Tensor, exponent: Any) -> torch.Tensor:
    """Of bools a bool, whatever torch's shape function says."""
    if x.dtype is torch.bool and type(exponent) is bool:
        return torch.empty_like(x)
    return torch.ops.aten.pow.Tensor_Scalar(x, exponent)


def _power_(x: torch.Tensor, exponent: Any) -> torch.Tensor:
    if x.dtype is torch.bool and type(exponent) is bool:
        return x
    return torch.ops.aten.pow_.Scalar(x, exponent)


def _vector_norm(
    x: torch.Tensor, ord: Any = 2, dim: Any = None, keepdim: bool = False, **kwargs: Any
) -> torch.Tensor:
    """Dims from the front: torch 2.11's shape function keeps one of size 1 counted from behind."""
    if dim is not None:
        dims = [dim] if isinstance(dim, int) else dim
        dim = [d + x.ndim if -x.ndim <= d < 0 else d for d in dims]
    return torch.ops.aten.linalg_vector_norm.default(x, ord, dim, keepdim, **kwargs)


#: Ops whose shape function torch does not have, or does not have right.
_SHAPES: dict[Any, Any] = {
    torch.ops.aten.fractional_max_pool3d_backward.default: lambda grad, x, *_: torch.empty_like(x),
    torch.ops.aten.native_batch_norm.default: _batch_norm,
    torch.ops.aten.convolution.default: _convolution,
    **{
        op: functools.partial(_new_normal, op)
        for op in (torch.ops.aten.normal.float_Tensor, torch.ops.aten.normal.Tensor_Tensor)
    },
    torch.ops.aten.linalg_vector_norm.default: _vector_norm,
    torch.ops.aten.binomial.default: _like_first,
    torch.ops.aten._sample_dirichlet.default: _like_first,
    torch.ops.aten._standard_gamma.default: _like_first,
    torch.ops.aten._standard_gamma_grad.default: _like_first,
    torch.ops.aten._dirichlet_grad.default: _like_first,
    torch.ops.aten.pow.Tensor_Scalar: _power,
    torch.ops.aten.pow_.Scalar: _power_,
}

_TENSORS = ("Tensor", "List[Tensor]", "Optional[Tensor]")


def infer_outputs(
    op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, symbolic: bool
) -> tuple[tuple[TensorMeta, ...], Any]:
    """The outputs' metas, and the op's result with a meta in place of each tensor.

    Tensors in `args` are given by their layouts.
    """
    schema = getattr(op, "_schema", None)
    if schema is not None and not any(str(r.type) in _TENSORS for r in schema.returns):
        return (), None  # a number: only the data can tell it
    with _without_data(symbolic):
        result = _call_hollow(op, args, kwargs)
        dense = {id(t) for t in tree_leaves(result) if symbolic and _is_dense(t)}
        if _makes_anew(op):
            dense |= {id(t) for t in tree_leaves(result) if _is_expanded(t)}
    metas: list[TensorMeta] = []
    shape = tree_map(lambda leaf: _meta(leaf, metas, id(leaf) in dense), result)
    return tuple(metas), shape


def _makes_anew(op: Any) -> bool:
    """Whether each entry of a result is one of its own, whatever torch's shape function says.

    In some versions that of `diagonal_scatter` keeps the strides of a tensor that is expanded.
    """
    if not isinstance(op, OpOverload) or op is torch.ops.aten._unsafe_view.default:
        return False
    aliased = any(x.alias_info for x in (*op._schema.returns, *op._schema.arguments))
    return not aliased and not op._schema.name.endswith("_strided")


def _is_expanded(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and any(type(s) is int and s == 0 for s in x.stride())


def outputs_of(
    rule: Rule,
    op: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    inputs: Sequence[TensorMeta],
    *,
    symbolic: bool,
) -> tuple[tuple[TensorMeta, ...], Any]:
    """As `infer_outputs`, for an op whose rule may know more than torch does."""
    if rule.shaped_like is None:
        return infer_outputs(op, args, kwargs, symbolic=symbolic)
    model = inputs[rule.shaped_like]
    meta = TensorMeta(model.shape, contiguous_stride(model.shape), model.dtype)
    return (meta,), meta


def _call_hollow(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`fn` on tensors without data in place of layouts and tensors."""
    hollow_args, hollow_kwargs = hollowed(args, kwargs)
    try:
        return _SHAPES.get(fn, fn)(*hollow_args, **hollow_kwargs)
    except Exception:
        _raise_as_on_one_device(fn, hollow_args, hollow_kwargs)
        raise


def _raise_as_on_one_device(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Some kernels raise another type of error than their shape functions.

    That is so for empty tensors and single numbers: small enough to ask the kernel itself.
    """
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(not isinstance(t.numel(), int) or t.numel() > 1 for t in tensors) or kwargs.get(
        "device"
    ):
        return
    on_cpu = tree_map(
        lambda leaf: (
            torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
        ),
        (list(args), dict(kwargs)),
    )
    fn(*on_cpu[0], **on_cpu[1])


def hollowed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with tensors without data in place of layouts and tensors."""
    kwargs = dict(kwargs)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")  # a real one would ask for memory
    return tree_map(_hollow, list(args)), tree_map(_hollow, kwargs)


def _hollow(leaf: Any) -> Any:
    if isinstance(leaf, Layout):
        return torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    if isinstance(leaf, torch.Generator):
        return None  # some shape functions take none, and no shape depends on it
    return leaf


def _is_dense(leaf: Any) -> bool:
    """Whether it surely is: a size that values decide cannot be asked whether it is 0 or 1."""
    return isinstance(leaf, torch.Tensor) and is_contiguous_or_false(leaf)


def _meta(leaf: Any, metas: list[TensorMeta], multiply: bool) -> Any:
    """With `multiply`, strides are made of sizes here, under the eyes of the tracer.

    It cannot make out a square of a size that it did not see being multiplied.
    """
    if not isinstance(leaf, torch.Tensor):
        return leaf
    shape = tuple(noted(leaf.shape))
    stride = contiguous_stride(shape) if multiply else tuple(noted(leaf.stride()))
    metas.append(TensorMeta(shape, stride, leaf.dtype))
    return metas[-1]


@contextlib.contextmanager
def _without_data(symbolic: bool) -> Any:
    """Outside all modes, so that nothing is counted or traced; symbolic sizes need a fake mode."""
    fake = detect_fake_mode() if symbolic else None
    with outside_modes(), torch.no_grad(), fake or contextlib.nullcontext():
        yield
