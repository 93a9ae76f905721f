"""Random ops: a sharded result holds its shard of the numbers that one device would draw.

Note [Drawn once for all ranks]
A draw changes the generator, so the local functions here are called once for all ranks present
(`LocalCall.collective`): a process fills its own shard, a simulated world fills the shards of all
ranks in one pass over the numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from shardwise.comm.agreement import raise_together
from shardwise.core.layout import Layout, differing_axes
from shardwise.core.placements import REPLICATE, NormPartial, Partial
from shardwise.core.untraced import SkipsNone
from shardwise.dispatch.rule import (
    Call,
    Choice,
    LocalCall,
    Rule,
    Table,
    sharded_together,
    table,
)
from shardwise.dtensor.autograd import direct_apply
from shardwise.dtensor.tensor import DTensor, run
from shardwise.lookup.ids import has_values
from shardwise.ops.math.pointwise import elementwise
from shardwise.random import Draw, assembled, draw_of, draw_parts, model_of, new_parts, sliced
from shardwise.simulation.ranks import localize, one_part, rank_values

aten = torch.ops.aten


# -- draws that depend on no values ----------------------------------------------------------

_random_from: Any = getattr(aten.random_, "from")

#: The in-place op that draws the same numbers, and the arguments before their own.
_WRITERS: dict[Any, tuple[Any, tuple[Any, ...]]] = {
    aten.normal_functional.default: (aten.normal_.default, ()),
    aten.bernoulli.p: (aten.bernoulli_.float, ()),
    aten.rand_like.default: (aten.uniform_.default, ()),
    aten.randn_like.default: (aten.normal_.default, ()),
    aten.randint_like.default: (_random_from, (0,)),
    aten.randint_like.low_dtype: (_random_from, ()),
    aten.uniform.default: (aten.uniform_.default, ()),
    aten.exponential.default: (aten.exponential_.default, ()),
    aten.geometric.default: (aten.geometric_.default, ()),
    aten.cauchy.default: (aten.cauchy_.default, ()),
    aten.log_normal.default: (aten.log_normal_.default, ()),
    aten.random.default: (aten.random_.default, ()),
    getattr(aten.random, "from"): (_random_from, ()),
    aten.random.to: (aten.random_.to, ()),
}
for _packet, _overload, _like in (
    (aten.rand_like, "generator", "default"),
    (aten.randn_like, "generator", "default"),
    (aten.randint_like, "generator", "default"),
    (aten.randint_like, "low_generator_dtype", "low_dtype"),
):
    if hasattr(_packet, _overload):  # since torch 2.12
        _WRITERS[getattr(_packet, _overload)] = _WRITERS[getattr(_packet, _like)]


@dataclass(frozen=True, slots=True)
class Fill:
    """Fills the result: the first argument, or a new tensor."""

    op: Any

    def __call__(self, layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
        return functools.partial(self._run, layouts[-1])

    def _run(self, layout: Layout, x: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        device = torch.device(options.get("device") or x.device)
        generator = options.get("generator")
        writer, before = _WRITERS.get(self.op, (None, ()))
        if not has_values(x):
            drawing = {} if generator is None else {"generator": generator}
            parts = sliced(self.op(model_of(layout, device), *args, **drawing), layout)
            return parts if writer is not None else x.copy_(parts)
        held = x if writer is None else new_parts(layout, device)
        draw_parts(layout, held, draw_of(writer or self.op, (*before, *args), generator))
        return held


def _placed_alike(call: Call, local: LocalCall) -> Iterator[Choice]:
    """All operands have the shape and the placement of the result."""
    yield replace(call.replicated(), local=local)
    for dim in range(call.outputs[0].ndim):
        inputs, outputs = [dim] * len(call.inputs), [dim] * len(call.outputs)
        yield from sharded_together(call, inputs, outputs, local)


def fill_choices(call: Call) -> Iterator[Choice]:
    """The values of the first argument do not matter; a Partial one may be written to."""
    local = LocalCall(Fill(call.op), collective=True)
    yield from _placed_alike(call, local)
    before = call.placed[0] if call.placed else REPLICATE
    # Draws may be negative, norms are not.
    if isinstance(before, Partial) and not isinstance(before, NormPartial):
        yield Choice((before,), (REPLICATE,), local)
        yield Choice((before,), (before,), local)


# -- draws that depend elementwise on a tensor -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """Ones with the probabilities in the last tensor."""

    op: Any

    def __call__(self, layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
        return functools.partial(self._run, layouts[-1])

    def _run(
        self,
        layout: Layout,
        x: torch.Tensor,
        p: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if not has_values(x):
            chances = assembled(layout, x if p is None else p)
            model = model_of(layout, x.device)
            drawn = aten.bernoulli.Tensor(model, chances, generator=generator)
            parts = sliced(drawn, layout)
            return x.copy_(parts) if self.op._schema.is_mutable else parts
        held = x if self.op._schema.is_mutable else new_parts(layout, x.device)
        op = aten.bernoulli_.Tensor
        draw = Draw(lambda tensor, given: op(tensor, given, generator=generator), op, generator)
        draw_parts(layout, held, draw, x if p is None else p)
        return held


def bernoulli_choices(call: Call) -> Iterator[Choice]:
    yield from _placed_alike(call, LocalCall(Bernoulli(call.op), collective=True))


def normal_with(layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
    """Normal values with a mean and a deviation per element."""
    return functools.partial(_normal_with, layouts)


def _normal_with(
    layouts: Sequence[Layout],
    mean: Any,
    std: Any = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    layout = layouts[-1]
    tensor = mean if isinstance(mean, torch.Tensor) else std
    dtype = layout.dtype
    if isinstance(std, torch.Tensor):
        _check_deviations(layouts[-2], std)
    if not has_values(tensor):
        model = model_of(layout, tensor.device)
        drawn = sliced(aten.normal_functional.default(model, generator=generator), layout)
    else:
        drawn = new_parts(layout, tensor.device)
        draw_parts(layout, drawn, draw_of(aten.normal_.default, (), generator))
    if not isinstance(mean, torch.Tensor):
        mean = torch.full((), mean, dtype=dtype, device=tensor.device)
    return drawn.mul(std).to(dtype).add(mean).to(dtype)


def _check_deviations(layout: Layout, std: torch.Tensor) -> None:
    """Raise for a negative one as on one device, before any rank draws."""
    if has_values(std) and std.is_cpu:
        refuse = functools.partial(_refuse_negative, layout, std)
        raise_together(layout.grid, differing_axes([layout]), refuse)


def _refuse_negative(layout: Layout, std: torch.Tensor) -> None:
    for _, part in rank_values(layout.grid, std):
        if part.numel() and float(part.min()) < 0:
            raise RuntimeError("normal expects all elements of std >= 0.0")


def normal_choices(call: Call) -> Iterator[Choice]:
    for choice in elementwise().choices(call):
        yield replace(choice, local=LocalCall(normal_with, collective=True))


# -- dropout ---------------------------------------------------------------------------------


def dropout(layouts: Sequence[Layout]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The result and the mask, which each device type draws in its own way."""
    return functools.partial(_dropout, layouts[-1], layouts[0].dtype)


def _dropout(
    layout: Layout, dtype: torch.dtype, x: torch.Tensor, p: float, train: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False:
        # Not the op: for an empty shard it returns a mask of another dtype.
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if not has_values(x):
        ones = torch.ones_like(model_of(layout, x.device, dtype))
        mask = sliced(aten.native_dropout.default(ones, p, True)[1], layout)
    else:
        mask = new_parts(layout, x.device)
        draw_parts(layout, mask, Draw(_mask_writer(p, dtype), name="dropout"))
    return x.mul(mask).mul(0.0 if p == 1 else 1 / (1 - p)), mask


def _mask_writer(p: float, dtype: torch.dtype) -> Any:
    def write(mask: torch.Tensor, _: Any) -> None:
        if mask.device.type == "cpu":
            mask.bernoulli_(1 - p)
        else:
            # The fused kernel draws several values per thread; their number depends on the dtype.
            ones = torch.ones_like(mask, dtype=dtype)
            mask.copy_(aten.native_dropout.default(ones, p, True)[1])

    return write


def dropout_choices(call: Call) -> Iterator[Choice]:
    local = LocalCall(dropout, collective=True)
    yield from _placed_alike(call, local)
    for reduce_op in ("sum", "avg"):
        yield Choice((Partial(reduce_op),), (Partial(reduce_op), REPLICATE), local)


# -- draws whose count of numbers is data-dependent -------------------------------------------


@dataclass(frozen=True, slots=True)
class OnceForAll:
    """The op on whole tensors, once: all ranks get the result."""

    op: Any

    def __call__(self, layouts: Sequence[Layout]) -> Callable[..., torch.Tensor]:
        grid = layouts[0].grid
        return lambda *args, **options: localize(grid, self.op(*map(one_part, args), **options))


def rrelu_slopes(
    x: torch.Tensor, lower: float, upper: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The slopes of `rrelu`; random only for values that are not positive."""
    slopes = torch.empty_like(x)
    if not x.is_meta:
        aten.rrelu_with_noise.default(x, slopes, lower, upper, True, generator)
    return slopes


def whole_choices(call: Call) -> Iterator[Choice]:
    yield replace(call.replicated(), local=LocalCall(OnceForAll(call.op), collective=True))


# -- normal with tensors, above autograd: torch's gradient formula makes plain zeros ----------


class Drawn(SkipsNone):
    """Normal values; the gradients of mean and deviation are zero."""

    @staticmethod
    def forward(ctx: Any, op: Any, mean: Any, std: Any, options: dict[str, Any]) -> Any:
        ctx.shapes = [x.shape if isinstance(x, torch.Tensor) else None for x in (mean, std)]
        return _draw(op, mean, std, options)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        zeros = torch.zeros_like(grad)
        for_both = (None if shape is None else zeros.sum_to_size(shape) for shape in ctx.shapes)
        return None, *for_both, None


_apply_drawn = direct_apply(Drawn)


def _draw(op: Any, mean: Any, std: Any, options: dict[str, Any]) -> Any:
    return DTensor.__torch_dispatch__(op, None, (mean, std), options)


def _kernel(op: Any) -> Any:
    def normal(mean: Any, std: Any = 1.0, **options: Any) -> Any:
        if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (mean, std)):
            return _apply_drawn(op, mean, std, options)
        return _draw(op, mean, std, options)

    return normal


# -- rrelu, above autograd: torch's op writes the slopes to a second tensor -------------------
#
# Torch also saves the input, or the result of the in-place op, so backward refuses a write to it.
# Here `leaky_relu` with slope 1, the identity, saves it for that purpose.
def rrelu(x: Any, *options: Any) -> Any:
    slopes, mean = _slopes(x, *options)
    found = F.leaky_relu(x, mean if slopes is None else 1.0).contiguous()
    return found if slopes is None else found * slopes  # strides as on one device


def rrelu_(x: Any, *options: Any) -> Any:
    slopes, mean = _slopes(x, *options)
    if slopes is None:
        return F.leaky_relu_(x, mean)
    return F.leaky_relu_(x.mul_(slopes), 1.0)


def _slopes(
    x: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> tuple[Any, float]:
    """The slope of each entry, None without training, and their mean."""
    if not lower <= upper:
        torch.rrelu(torch.empty(0), lower, upper, training)  # raises torch's error
    mean = (lower + upper) / 2
    if not training:
        return None, mean
    # One device draws in the order of entries, not of memory.
    return run(rrelu_slopes, x.detach().contiguous(), lower, upper, generator), mean


RULES: Table = table(
    (
        (aten.normal_.default, aten.bernoulli_.float, *_WRITERS),
        Rule(fill_choices, "... -> ..."),
    ),
    ((aten.bernoulli.default, aten.bernoulli.Tensor), Rule(bernoulli_choices, "..., ... -> ...")),
    (
        (aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor),
        Rule(normal_choices, "..., ... -> ..."),
    ),
    ((aten.native_dropout.default,), Rule(dropout_choices, "... -> ..., ...")),
    (
        (
            aten.poisson.default,
            aten._standard_gamma.default,
            aten._sample_dirichlet.default,
            aten.binomial.default,
            aten.multinomial.default,
            rrelu_slopes,
        ),
        Rule(whole_choices, "[...] -> [...]"),
    ),
)

#: The inputs whose values the op may refuse; see `dispatch.local_call`.
REFUSED: dict[Any, slice] = dict.fromkeys(
    (aten.bernoulli.default, aten.bernoulli.Tensor), slice(-1, None)
)

KERNELS: tuple[tuple[str, Any], ...] = (
    *tuple(
        (f"normal.{overload}", _kernel(getattr(aten.normal, overload)))
        for overload in ("Tensor_float", "float_Tensor", "Tensor_Tensor")
    ),
    ("rrelu", rrelu),
    ("rrelu_", rrelu_),
)
