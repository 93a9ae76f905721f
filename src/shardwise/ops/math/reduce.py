"""Reductions over any dims: sums, means, extrema, products, any and all, norms of vectors.

A reduced dim may be sharded: each rank has a term of the result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.core.placements import SUM, NormPartial, Partial, Placement
from shardwise.core.sizes import Size, recorded
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    linear_choices,
    sharded_together,
    table,
)
from shardwise.dtensor.tensor import DTensor
from shardwise.ops.operands import read_from

aten = torch.ops.aten


#: With an empty list of dims these reduce nothing; other ops reduce all.
_EMPTY_IS_NONE = frozenset({aten.any.dims, aten.all.dims})


def reduced_dims(call: Call) -> tuple[int, ...]:
    """The dims that the call reduces, counted from 0; all of them if it names none."""
    ndim = call.inputs[0].ndim
    names = {arg.name for arg in call.op._schema.arguments}
    dims = call.argument("dim") if "dim" in names else None
    if dims == [] and call.op in _EMPTY_IS_NONE and call.outputs[0].ndim == ndim:
        return ()
    if dims is None or dims == []:
        return tuple(range(ndim))
    given = [dims] if isinstance(dims, int) else dims
    return tuple(d % ndim for d in given) if ndim else ()


def result_dim(call: Call, dim: int, reduced: tuple[int, ...]) -> int:
    """The number of a dim that is not reduced in the result."""
    if call.inputs[0].ndim == call.outputs[0].ndim:
        return dim
    return dim - sum(1 for d in reduced if d < dim)


def _choices(call: Call, local: LocalCall | None) -> Iterator[Choice]:
    reduced = reduced_dims(call)
    yield call.replicated()
    for dim in range(call.inputs[0].ndim):
        if dim in reduced:
            yield from sharded_together(call, (dim,), (SUM,), local)
        else:
            yield from sharded_together(call, (dim,), (result_dim(call, dim, reduced),))
    yield from linear_choices(call, ((0,),))


def sum_choices(call: Call) -> Iterator[Choice]:
    yield from _choices(call, None)


@dataclass(frozen=True, slots=True)
class MeanTerm:
    """One rank's term of a mean: its sum over the global count, right for uneven shards too."""

    count: Size
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs["dtype"] = self.dtype
        summed = aten.sum.dim_IntList(x, *args, **kwargs) if args else aten.sum.default(x, **kwargs)
        (count,) = recorded((self.count,))
        return summed / count


def mean_choices(call: Call) -> Iterator[Choice]:
    shape = call.inputs[0].shape
    count = math.prod(shape[d] for d in reduced_dims(call))
    yield from _choices(call, LocalCall(MeanTerm(count, call.outputs[0].dtype)))


# -- maxima, minima, products, any and all ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardExtreme:
    """The op on a rank's shard; the neutral element if that is empty."""

    op: Any
    terms: tuple[str, ...]

    def __call__(self, coordinate: Any, layouts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        x = args[0]
        if x.numel():
            return self.op(*args, **kwargs)
        made = [
            x.new_full(layout.local_shape(coordinate), _limit(layout.dtype, term))
            for layout, term in zip(layouts[1:], self.terms, strict=True)
        ]
        return made[0] if len(made) == 1 else tuple(made)


def _limit(dtype: torch.dtype, term: str) -> float:
    """The largest value for a minimum, the smallest for a maximum."""
    if dtype is torch.bool:
        return term == "min"
    if dtype.is_floating_point:
        return float("inf") if term == "min" else float("-inf")
    bounds = torch.iinfo(dtype)
    return bounds.max if term == "min" else bounds.min


def _reduction(*ops: Any, terms: tuple[str, ...], fails_on_empty: bool = False) -> Any:
    """An entry of a table: `terms` has the reduction of each result."""

    def choices(call: Call) -> Iterator[Choice]:
        reduced = reduced_dims(call)
        local = LocalCall(ShardExtreme(call.op, terms), per_rank=True) if fails_on_empty else None
        outputs: tuple[Placement, ...] = tuple(map(Partial, terms))
        yield call.replicated()
        sizes_reduced = [call.inputs[0].shape[dim] for dim in reduced]
        if any(type(size) is int and size == 0 for size in sizes_reduced):
            return  # torch raises: nothing has no extreme
        for dim in range(call.inputs[0].ndim):
            if dim not in reduced:
                outs = [result_dim(call, dim, reduced)] * len(terms)
                yield from sharded_together(call, (dim,), outs, local)
            elif not call.inputs[0].dtype.is_complex:
                # No backend has this reduction of complex numbers.
                yield from sharded_together(call, (dim,), outputs, local)
        if len(terms) == 1 and call.inputs[0].dtype == call.outputs[0].dtype:
            yield Choice(outputs, outputs, local)

    return ops, Rule(choices, "... [reduced] -> ...")


# -- norms of vectors: the norm of the shards' norms -----------------------------------------


def largest_term(x: torch.Tensor, ord: float = math.inf, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The largest magnitude of a rank's shard; zero if that is empty."""
    # The 1-norm of nothing is defined: zeros of the right shape and dtype.
    return aten.linalg_vector_norm.default(x, ord if x.numel() else 1, *args, **kwargs)


def vector_norm_choices(call: Call) -> Iterator[Choice]:
    """Any dim may be sharded; a reduced one only for positive orders and 0.

    Other orders have no norm of an empty shard.
    """
    order, reduced = float(call.argument("ord")), reduced_dims(call)
    yield call.replicated()
    terms: list[Placement] = []
    if order > 0:
        terms.append(NormPartial(norm_type=order))
    if order in (0, 1):
        terms.append(Partial("sum"))
    local = LocalCall(largest_term) if order == math.inf else None
    for dim in range(call.inputs[0].ndim):
        for out in terms if dim in reduced else [result_dim(call, dim, reduced)]:
            yield from sharded_together(call, (dim,), (out,), local)
    for term in terms:
        if isinstance(term, NormPartial) and term in call.placed:
            yield Choice((term,), (term,), local)


# -- prod, above autograd: see Note [Above autograd] -----------------------------------------
#
# Torch has two formulas for its gradient. The one for subclasses passes the gradient of a single
# factor on; on one device it is computed from the factor, and requires grad.
class Prod(SkipsNone):
    """`args` are those of the op; without a dim, the product of all entries."""

    @staticmethod
    def forward(ctx: Any, x: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = DTensor.__torch_dispatch__(op, None, (x, *args), kwargs)
        ctx.save_for_backward(x, out)  # as torch does: neither may be written to
        ctx.args = args
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, _ = ctx.saved_tensors
        return _prod_grad(grad, x.to(grad.dtype), *ctx.args).to(x.dtype), None, None, None


def _prod_grad(grad: Any, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if not x.dim():
        return grad.clone()
    if dim is None:
        return _prod_grad(grad, x.reshape(-1), 0).reshape(x.shape)
    return (grad if keepdim else grad.unsqueeze(dim)) * _product_of_others(x, dim).conj()


def _product_of_others(x: Any, dim: int) -> Any:
    """For each factor the product of the others, without division: a factor may be zero."""
    if not x.numel():
        return x
    num = x.shape[dim] - 1
    if not num:
        return read_from(torch.ones_like(x), x)
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, num)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, num).flip(dim)], dim).cumprod(dim)
    return before * after.flip(dim)


def prod(x: Any, *, dtype: Any = None) -> Any:
    return _prod(aten.prod.default, x, (), dtype)


def prod_dim(x: Any, dim: int, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return _prod(aten.prod.dim_int, x, (dim, keepdim), dtype)


def _prod(op: Any, x: Any, args: tuple[Any, ...], dtype: Any) -> Any:
    kwargs = {} if dtype is None else {"dtype": dtype}
    if torch.is_grad_enabled() and x.requires_grad:
        return Prod.apply(x, op, args, kwargs)
    return DTensor.__torch_dispatch__(op, None, (x, *args), kwargs)


RULES: Table = table(
    ((aten.sum.default, aten.sum.dim_IntList), Rule(sum_choices, "... [reduced] -> ...")),
    ((aten.mean.default, aten.mean.dim), Rule(mean_choices, "... [reduced] -> ...")),
    _reduction(aten.amax.default, aten.max.default, terms=("max",), fails_on_empty=True),
    _reduction(aten.amin.default, aten.min.default, terms=("min",), fails_on_empty=True),
    _reduction(aten.aminmax.default, terms=("min", "max"), fails_on_empty=True),
    _reduction(aten.prod.default, aten.prod.dim_int, terms=("product",)),
    _reduction(aten.any.default, aten.any.dim, aten.any.dims, terms=("max",)),
    _reduction(aten.all.default, aten.all.dim, aten.all.dims, terms=("min",)),
    (
        (aten.linalg_vector_norm.default,),
        Rule(vector_norm_choices, "... [reduced] -> ...", by_value=True),
    ),
)

KERNELS: tuple[tuple[str, Any], ...] = (("prod", prod), ("prod.dim_int", prod_dim))
