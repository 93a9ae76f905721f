"""A call on one device, and the same call in a simulated world, laid out as plans say."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.functions import tree_leaves, tree_map
from shardwise.core.layout import Layout, make_layout, normalize
from shardwise.core.mesh import Grid, grid_of
from shardwise.core.placements import (
    REDUCE_OPS,
    REPLICATE,
    NormPartial,
    Partial,
    Placement,
    Shard,
    short,
)
from shardwise.dispatch.catalog import Positional, find_rule, plain_op
from shardwise.dispatch.infer import infer_outputs
from shardwise.dispatch.local_call import local_call
from shardwise.dispatch.propagate import CallPlan, every_plan
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.ops.lookup.embedding_rules import SparseRows
from shardwise.testing.layouts import gather, scatter


@dataclass(frozen=True)
class Sample:
    """A call on one device. `wish` lists the placements that a caller may prefer for the output.

    `unread` has the positions, in the result, of tensors whose values nobody reads, such as the
    seed of a dropout with p=0.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wish: tuple[Placement, ...] = ()
    unread: tuple[int, ...] = ()


def rule_for(sample: Sample) -> Rule:
    """The rule of the sample's op."""
    rule = find_rule(plain_op(sample.op))
    if rule is None:
        raise KeyError(f"{sample.op} has no rule")
    return rule


class SampleAlone:
    """The sample on one device: run once, compared with many times."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.tensors = _tensors(sample.args)
        inputs = tuple(TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype) for t in self.tensors)
        outputs, self._shape = _outputs(sample)
        self.call = Call(plain_op(sample.op), sample.args, sample.kwargs, inputs, outputs)
        # The op may write to its operands.
        self.result = self.run([t.clone() for t in self.tensors], sample.op)

    def run(self, tensors: Sequence[torch.Tensor], fn: Any) -> Any:
        """`fn` with the sample's arguments, `tensors` in place of its own."""
        remaining = iter(tensors)
        with _same_seed():
            return fn(*[_replace(arg, remaining) for arg in self.sample.args], **self.sample.kwargs)

    def places(self) -> list[int]:
        """The positions in the result of the tensors that `asked` returns."""
        if isinstance(self._shape, TensorMeta):
            return [0]
        return [place for place, meta in enumerate(self._shape) if isinstance(meta, TensorMeta)]

    def ignored(self) -> set[int]:
        """The numbers of the operands whose values make no difference."""
        found = set()
        for number, tensor in enumerate(self.tensors):
            if tensor.is_floating_point() and tensor.numel():
                changed = [t.clone() for t in self.tensors]
                changed[number] += 1
                try:
                    results = self.asked(self.run(changed, self.sample.op))
                except Exception:
                    continue  # it is read, and refused
                if all(map(_same, results, self.asked(self.result))):
                    found.add(number)
        return found

    def asked(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result; kernels may return some that nobody asked for."""
        if isinstance(result, torch.Tensor):
            return [result]
        pairs = zip(result, self._shape, strict=True)
        asked = [r for r, meta in pairs if isinstance(meta, TensorMeta)]
        return [r.dense() if isinstance(r, SparseRows) else r for r in asked]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    flat = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else [a] for a in args)
    return [a for a in flat if isinstance(a, torch.Tensor)]


def _outputs(sample: Sample) -> tuple[tuple[TensorMeta, ...], Any]:
    """Inferred as dispatch does; the shapes of some ops depend on the data."""
    try:
        return infer_outputs(sample.op, sample.args, sample.kwargs, symbolic=False)
    except NotImplementedError:
        result = sample.op(*sample.args, **sample.kwargs)
        shape = tree_map(lambda t: TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype), result)
        return tuple([shape] if isinstance(shape, TensorMeta) else tree_leaves(shape)), shape


@contextlib.contextmanager
def _same_seed() -> Iterator[None]:
    """Inside, the same random numbers every time; outside, the generator is as it was."""
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: without a GPU it formats a stack for every kind of device.
        torch.default_generator.manual_seed(0)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(0)
        yield


def _replace(arg: Any, parts: Iterator[torch.Tensor]) -> Any:
    if isinstance(arg, torch.Tensor):
        return next(parts)
    if isinstance(arg, (list, tuple)):
        return [_replace(a, parts) for a in arg]
    return arg


#: The kinds of Partial that an input may have; norms only where no value is negative.
_PARTIALS: tuple[Partial, ...] = (*map(Partial, REDUCE_OPS), NormPartial())


class SimulatedSample:
    """The sample in a simulated world: its tensors are split once for each layout."""

    def __init__(self, alone: SampleAlone, grid: Grid) -> None:
        self._alone, self._grid = alone, grid
        schema = getattr(alone.call.op, "_schema", None)
        self._written = schema is not None and schema.is_mutable
        self._shards: dict[tuple[int, Layout], torch.Tensor] = {}

    def plans(self, rule: Rule) -> Iterator[CallPlan]:
        """The plans of every combination of choices, from layouts with every kind of split."""
        alone, grid = self._alone, self._grid
        preferred = list(_preferred(alone.sample.wish, alone.call, grid))
        starts = itertools.product(_starting_layouts(alone, grid), preferred)
        return every_plan(rule, alone.call, starts)

    def shards(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The sample's tensors, laid out."""
        found = []
        for number, (tensor, layout) in enumerate(zip(self._alone.tensors, layouts, strict=True)):
            if (number, layout) not in self._shards:
                self._shards[number, layout] = scatter(tensor.clone(), layout)
            part = self._shards[number, layout]
            found.append(part.clone() if self._written else part)
        return found

    def why_wrong(self, plan: CallPlan) -> str:
        """How the plan's result differs from one device's; empty where it does not."""
        alone = self._alone
        op = alone.sample.op
        positional = op if isinstance(op, Positional) else None
        found = alone.run(self.shards(plan.inputs), local_call(plain_op(op), plan, positional))
        if not plan.outputs:
            return "" if found == alone.result else f"{found} instead of {alone.result}"
        asked = zip(
            alone.places(), alone.asked(found), alone.asked(alone.result), plan.outputs, strict=True
        )
        for number, part, whole, layout in asked:
            if number in alone.sample.unread:
                continue
            if why := difference(part, whole, layout) or _memory_difference(part, layout):
                return f"output {number} {why}"
        return ""


def grid_of_shape(shape: tuple[int, ...]) -> Grid:
    return grid_of(DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape)))


def _starting_layouts(alone: SampleAlone, grid: Grid) -> Iterator[list[Layout]]:
    call = alone.call
    whole = [layout_of(meta, (REPLICATE,) * grid.num_axes, grid) for meta in call.inputs]
    yield whole
    for number, meta in enumerate(call.inputs):
        is_norm = _could_be_norms(alone.tensors[number])
        for term in _PARTIALS if is_norm else _PARTIALS[:-1]:
            partial = list(whole)
            partial[number] = layout_of(meta, (term,) * grid.num_axes, grid)
            yield partial
        for dim, size in enumerate(meta.shape):
            for axis, parts in enumerate(grid.shape):
                placements: list[Placement] = [REPLICATE] * grid.num_axes
                # Everything on one coordinate, and all but one entry on the last.
                for sizes in ((size, *[0] * (parts - 1)), (*_ones(size, parts),)):
                    placements[axis] = Shard(dim, sizes)
                    started = list(whole)
                    started[number] = layout_of(meta, tuple(placements), grid)
                    yield started
        if grid.num_axes > 1 and meta.ndim:
            inner_first = list(whole)
            inner_first[number] = make_layout(
                grid,
                (Shard(0),) * grid.num_axes,
                meta.shape,
                meta.stride,
                meta.dtype,
                tuple(reversed(range(grid.num_axes))),
            )
            yield inner_first


def _could_be_norms(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and bool((tensor >= 0).all())


def _ones(size: int, parts: int) -> list[int]:
    """Sizes that start with ones: the last shard is the largest, unlike those of `chunk`."""
    ones = [min(1, size)] * (parts - 1)
    return [*ones, size - sum(ones)] if size >= sum(ones) else [size] + [0] * (parts - 1)


def layout_of(meta: TensorMeta, placements: tuple[Placement, ...], grid: Grid) -> Layout:
    normal = normalize(placements, meta.shape, grid)
    return make_layout(grid, normal, meta.shape, meta.stride, meta.dtype)


def _preferred(preferred: Sequence[Placement], call: Call, grid: Grid) -> Iterator[Layout | None]:
    if not preferred:
        yield None
        return
    for placements in itertools.product(preferred, repeat=grid.num_axes):
        yield layout_of(call.outputs[0], placements, grid)


def difference(part: Any, whole: torch.Tensor, layout: Layout) -> str:
    """How the shards in `layout` differ from `whole`; empty where they do not."""
    for rank, coordinate in layout.grid.coordinates.items():
        here = part.on_rank(rank)
        if tuple(here.shape) != layout.local_shape(coordinate):
            return f"has shape {tuple(here.shape)} on rank {rank}"
        if here.dtype != whole.dtype:
            return f"is {here.dtype} instead of {whole.dtype} on rank {rank}"
    together = gather(part, layout)
    rtol, atol = _tolerances(whole.dtype)
    if not torch.allclose(together, whole, rtol=rtol, atol=atol, equal_nan=True):
        return f"differs by {(together - whole).abs().max().item():.3g}"
    return ""


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Four times the dtype's epsilon, and at least what sums of float32 need."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1e-4, 1e-5
    eps = torch.finfo(dtype).eps
    return max(1e-4, 4 * eps), max(1e-5, 4 * eps)


def _memory_difference(part: Any, layout: Layout) -> str:
    """How the order of dims in memory differs from the layout's: a view would then fail."""
    for rank in layout.grid.ranks:
        here = part.on_rank(rank)
        long = [d for d in range(here.dim()) if here.shape[d] > 1 and layout.stride[d]]
        promised = sorted(long, key=lambda d: -layout.stride[d])
        found = [here.stride(d) for d in promised]
        if here.numel() and found != sorted(found, reverse=True):
            return f"has strides {here.stride()} on rank {rank}, the whole {layout.stride}"
    return ""


def as_text(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(short(layout.placements) for layout in layouts)
