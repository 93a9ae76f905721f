"""Random draws: a sharded result holds its part of what one device would draw.

Note [Drawn once for all ranks]
A draw changes the generator, so the local functions here are called once for all ranks present
(`LocalCall.together`): a process of the real world fills its own part, a simulated world fills the
parts of all ranks from one pass over the numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.comm.agreement import agree_once
from shardwise.comm.local_tensor import LocalTensor, shared_roster
from shardwise.comm.ranks import each_rank, localize, my_coordinate
from shardwise.core.grid import Coordinate
from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, NormPartial, Partial, Shard
from shardwise.errors import RankMismatchError
from shardwise.random.fill import (
    ANY_PROBABILITY,
    Block,
    Draw,
    Whole,
    fill_exactly,
    fill_quickly,
)
from shardwise.random.generators import generator_digest, generator_kind
from shardwise.random.mode import setting
from shardwise.rules.pointwise import elementwise
from shardwise.rules.rule import Call, Choice, LocalCall, Rule, Table, table

aten = torch.ops.aten

# -- the parts of a draw ---------------------------------------------------------------------


def draw_parts(
    layout: Layout, held: torch.Tensor, draw: Draw, operand: torch.Tensor | None = None
) -> None:
    """Write a draw of the whole tensor to the parts that a DTensor in `layout` holds."""
    device = held.device
    if device.type == "meta" or layout.grid.device_type == "meta":
        return  # as on one device: without memory, nothing is drawn
    agree_once(
        layout.grid,
        generator_kind(device, draw.generator),
        lambda: generator_digest(device, draw.generator),
    )
    blocks = []
    for coordinates, part, given in _parts_of(layout, held, operand):
        share = _share(layout, coordinates)
        if share is not None:
            part.fill_(share)
            part = torch.empty_like(part)  # drawn all the same: generators stay in step
        blocks.append(Block(layout.box(coordinates[0])[0], part, given))
    if setting.mode == "fast":
        fill_quickly(blocks, draw)
    else:
        fill_exactly(Whole(layout.shape, layout.stride, layout.dtype), blocks, draw)


def _parts_of(
    layout: Layout, held: torch.Tensor, operand: torch.Tensor | None
) -> Iterator[tuple[list[Coordinate], torch.Tensor, torch.Tensor | None]]:
    """Each tensor that is held here, where its ranks stand, and what of `operand` goes with it."""
    grid = layout.grid
    if not isinstance(held, LocalTensor):
        yield [my_coordinate(grid)], held, operand
        return
    for number, part in enumerate(held._parts):
        ranks = held._roster.ranks_of(number)
        given = operand.on_rank(ranks[0]) if isinstance(operand, LocalTensor) else operand
        yield [grid.coordinates[rank] for rank in ranks], part, given


def _share(layout: Layout, coordinates: Sequence[Coordinate]) -> float | None:
    """What ranks hold of a Partial draw: None for the values, else what leaves those unchanged."""
    shares = {_share_of(layout, coordinate) for coordinate in coordinates}
    if len(shares) > 1:
        raise RankMismatchError(
            f"A draw into {layout!r} gives its values to one rank and {shares - {None}} to the "
            "others, but these ranks share one tensor. Give each its own: "
            "LocalTensor.per_rank(lambda rank: x.clone())."
        )
    return shares.pop()


def _share_of(layout: Layout, coordinate: Coordinate) -> float | None:
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial) and coordinate[axis]:
            if placement.reduce_op == "sum":
                return 0.0
            if placement.reduce_op == "product":
                return 1.0
    return None


def new_parts(layout: Layout, device: torch.device) -> torch.Tensor:
    """Parts without values, as a DTensor in `layout` holds them."""
    order = layout.memory_order or tuple(range(layout.ndim))
    inverse = sorted(range(layout.ndim), key=lambda i: order[i])

    def here(coordinate: Coordinate) -> torch.Tensor:
        shape = layout.local_shape(coordinate)
        part = torch.empty([shape[d] for d in order], dtype=layout.dtype, device=device)
        return part.permute(inverse)

    return localize(layout.grid, each_rank(layout.grid, here, axes=_parted_axes(layout)))


def _parted_axes(layout: Layout) -> list[int]:
    """The axes along which ranks hold different tensors."""
    return [axis for axis, p in enumerate(layout.placements) if not p.is_replicate()]


# -- while torch.compile traces --------------------------------------------------------------


def _is_traced(x: torch.Tensor) -> bool:
    part = x._parts[0] if isinstance(x, LocalTensor) else x
    return type(part) is not torch.Tensor


def _sliced(whole: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The parts of a tensor that all ranks have.

    Compiled code draws the whole; what no rank reads of it is the compiler's to leave out.
    """

    def here(coordinate: Coordinate) -> torch.Tensor:
        return _cut(whole, layout, coordinate).clone()

    return localize(layout.grid, each_rank(layout.grid, here, axes=_parted_axes(layout)))


def _cut(whole: torch.Tensor, layout: Layout, coordinate: Coordinate) -> torch.Tensor:
    """The part of `whole` that lies at a coordinate, as a view."""
    offset, shape = layout.box(coordinate)
    for dim in sorted({p.dim for p in layout.placements if isinstance(p, Shard)}):
        whole = whole.narrow(dim, offset[dim], shape[dim])
    return whole


def _assembled(layout: Layout, held: torch.Tensor) -> torch.Tensor:
    """A whole tensor with the parts that are held here; between them, any probability will do."""
    whole = _model(layout, held.device, held.dtype).fill_(ANY_PROBABILITY)
    for coordinates, part, _ in _parts_of(layout, held, None):
        _cut(whole, layout, coordinates[0]).copy_(part)
    return whole


def _model(layout: Layout, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty_strided(
        layout.shape, layout.stride, dtype=dtype or layout.dtype, device=device
    )


# -- draws that look at no tensor ------------------------------------------------------------

_random_from: Any = getattr(aten.random_, "from")

#: The op that writes what these return, and what comes before their own arguments.
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


def draw_of(op: Any, args: Sequence[Any], generator: torch.Generator | None) -> Draw:
    """The draw that an op makes which writes to its first argument."""
    # Integers from a range of 2**32 and more take two numbers each.
    wide = tuple(a for a in args if a is None or (isinstance(a, int) and abs(a) >= 2**31))
    return Draw(
        lambda tensor, _: op(tensor, *args, generator=generator),
        name=(op, wide),
        generator=generator,
    )


@dataclass(frozen=True, slots=True)
class Fill:
    """Fills the result, which is the first argument itself or new."""

    op: Any

    def __call__(
        self, layouts: Sequence[Layout], x: torch.Tensor, *args: Any, **options: Any
    ) -> torch.Tensor:
        layout = layouts[-1]
        device = torch.device(options.get("device") or x.device)
        generator = options.get("generator")
        writer, before = _WRITERS.get(self.op, (None, ()))
        if _is_traced(x):
            drawing = {} if generator is None else {"generator": generator}
            parts = _sliced(self.op(_model(layout, device), *args, **drawing), layout)
            return parts if writer is not None else x.copy_(parts)
        held = x if writer is None else new_parts(layout, device)
        draw_parts(layout, held, draw_of(writer or self.op, (*before, *args), generator))
        return held


def _placed_alike(call: Call) -> Iterator[Choice]:
    """Every operand has the shape of the result, and lies like it."""
    yield call.replicated()
    for dim in range(call.outputs[0].ndim):
        for sizes in call.splits([(i, dim) for i in range(len(call.inputs))]):
            shard = Shard(dim, sizes)
            yield Choice((shard,) * len(call.inputs), (shard,) * len(call.outputs))


def fill_choices(call: Call) -> Iterator[Choice]:
    """The values of the first argument do not matter; a Partial one may be written to."""
    local = LocalCall(Fill(call.op), together=True)
    for choice in _placed_alike(call):
        yield replace(choice, local=local)
    before = call.placed[0] if call.placed else REPLICATE
    # Draws may be negative, norms are not.
    if isinstance(before, Partial) and not isinstance(before, NormPartial):
        yield Choice((before,), (REPLICATE,), local)
        yield Choice((before,), (before,), local)


# -- draws whose values depend on a tensor, element by element --------------------------------


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """Ones with the probabilities that the last tensor holds."""

    op: Any

    def __call__(
        self,
        layouts: Sequence[Layout],
        x: torch.Tensor,
        p: torch.Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        if _is_traced(x):
            chances = _assembled(layouts[-1], x if p is None else p)
            drawing = {} if generator is None else {"generator": generator}
            drawn = aten.bernoulli.Tensor(_model(layouts[-1], x.device), chances, **drawing)
            parts = _sliced(drawn, layouts[-1])
            return x.copy_(parts) if self.op._schema.is_mutable else parts
        held = x if self.op._schema.is_mutable else new_parts(layouts[-1], x.device)
        op = aten.bernoulli_.Tensor
        draw = Draw(lambda tensor, given: op(tensor, given, generator=generator), op, generator)
        draw_parts(layouts[-1], held, draw, x if p is None else p)
        return held


def bernoulli_choices(call: Call) -> Iterator[Choice]:
    for choice in _placed_alike(call):
        yield replace(choice, local=LocalCall(Bernoulli(call.op), together=True))


@dataclass(frozen=True, slots=True)
class Normal:
    """Normal values with a mean and a deviation per element."""

    def __call__(
        self,
        layouts: Sequence[Layout],
        mean: Any,
        std: Any = 1.0,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        layout = layouts[-1]
        tensor = mean if isinstance(mean, torch.Tensor) else std
        dtype = layout.dtype
        if _is_traced(tensor):
            model = _model(layout, tensor.device)
            drawn = _sliced(aten.normal_functional.default(model, generator=generator), layout)
        else:
            drawn = new_parts(layout, tensor.device)
            draw_parts(layout, drawn, draw_of(aten.normal_.default, (), generator))
        if not isinstance(mean, torch.Tensor):
            mean = torch.full((), mean, dtype=dtype, device=tensor.device)
        return drawn.mul(std).to(dtype).add(mean).to(dtype)


def normal_choices(call: Call) -> Iterator[Choice]:
    for choice in elementwise().choices(call):
        yield replace(choice, local=LocalCall(Normal(), together=True))


# -- dropout ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Dropout:
    """The result and the mask. Each device type has its own way to draw the mask."""

    def __call__(
        self, layouts: Sequence[Layout], x: torch.Tensor, p: float, train: bool | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layout, dtype = layouts[-1], layouts[0].dtype
        if train is False:
            # Not the op: on a rank that owns nothing it returns a mask of another dtype.
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if _is_traced(x):
            ones = torch.ones_like(_model(layout, x.device, dtype))
            mask = _sliced(aten.native_dropout.default(ones, p, True)[1], layout)
        else:
            mask = new_parts(layout, x.device)
            draw_parts(layout, mask, Draw(_mask_writer(p, dtype), name="dropout"))
        return x.mul(mask).mul(0.0 if p == 1 else 1 / (1 - p)), mask


def _mask_writer(p: float, dtype: torch.dtype) -> Any:
    def write(mask: torch.Tensor, _: Any) -> None:
        if mask.device.type == "cpu":
            mask.bernoulli_(1 - p)
        else:
            # The fused kernel takes several values per thread, how many depends on the dtype.
            ones = torch.ones_like(mask, dtype=dtype)
            mask.copy_(aten.native_dropout.default(ones, p, True)[1])

    return write


def dropout_choices(call: Call) -> Iterator[Choice]:
    local = LocalCall(Dropout(), together=True)
    for choice in _placed_alike(call):
        yield replace(choice, local=local)
    for reduce_op in ("sum", "avg"):
        yield Choice((Partial(reduce_op),), (Partial(reduce_op), REPLICATE), local)


# -- draws that take as many numbers as the values ask for ------------------------------------


@dataclass(frozen=True, slots=True)
class OnceForAll:
    """The op on whole tensors, once: all ranks get the result."""

    op: Any

    def __call__(self, layouts: Sequence[Layout], *args: Any, **options: Any) -> Any:
        grid = layouts[0].grid
        if not grid.world.simulated:
            return self.op(*args, **options)
        args = tuple(a._parts[0] if isinstance(a, LocalTensor) else a for a in args)
        result = self.op(*args, **options)
        return LocalTensor((result,), shared_roster(grid.world, grid.ranks))


def rrelu_slopes(
    x: torch.Tensor, lower: float, upper: float, generator: torch.Generator | None = None
) -> torch.Tensor:
    """What `rrelu` multiplies each value by; drawn only for those that are not positive."""
    slopes = torch.empty_like(x)
    if not x.is_meta:
        aten.rrelu_with_noise.default(x, slopes, lower, upper, True, generator)
    return slopes


def whole_choices(call: Call) -> Iterator[Choice]:
    yield replace(call.replicated(), local=LocalCall(OnceForAll(call.op), together=True))


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
