"""No rule is trusted: every choice of a rule is played in a simulated world.

`check_rule` lays the sample's tensors out as each combination of choices wants them, runs the
local call on each rank, puts the result together as the outputs' placements say, and compares it
with the op on one device. `missing_choices` searches the other way round: placements that the rule
does not offer although the op itself is right with them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.simulate import simulate
from shardwise.core.grid import Grid, grid_of
from shardwise.core.layout import Layout, make_layout, normalize
from shardwise.core.placements import (
    REDUCE_OPS,
    REPLICATE,
    SUM,
    NormPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    short,
)
from shardwise.dtensor.local_call import local_call
from shardwise.rules.catalog import find_rule
from shardwise.rules.infer import infer_outputs
from shardwise.rules.positional import Positional, plain_op
from shardwise.rules.propagate import CallPlan, every_plan
from shardwise.rules.row_sparse import SparseRows
from shardwise.rules.rule import Call, Rule, TensorMeta
from shardwise.testing.parts import gathered, scattered

#: One axis, uneven and with empty shards, and two axes that may share a dim.
MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))

#: Terms in which an input may lie; norms are for inputs without negative values only.
_PARTIALS: tuple[Partial, ...] = (*map(Partial, REDUCE_OPS), NormPartial())


@dataclass(frozen=True)
class Sample:
    """A call on one device. `wish` lists placements that a caller may ask the output for.

    `unread` has the places, in the result, of tensors whose values nobody reads, such as the seed
    of a dropout that does not drop.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wish: tuple[Placement, ...] = ()
    unread: tuple[int, ...] = ()


@dataclass(frozen=True)
class Mistake:
    """A choice that gives another result than one device."""

    mesh: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    why: str

    def __str__(self) -> str:
        return (
            f"mesh {self.mesh}: {', '.join(self.inputs)} -> {', '.join(self.outputs)}: {self.why}"
        )


@dataclass
class Report:
    """How many choices were played, and which were wrong."""

    num_played: int = 0
    mistakes: list[Mistake] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.num_played > 0 and not self.mistakes


def check_rule(
    sample: Sample, rule: Rule | None = None, meshes: Sequence[tuple[int, ...]] = MESHES
) -> Report:
    """Play every choice of the op's rule (or of `rule`) on the sample.

    >>> x = torch.randn(4, 5)
    >>> check_rule(Sample(torch.ops.aten.neg.default, (x,))).ok
    True
    """
    rule = rule or find_rule(plain_op(sample.op))
    if rule is None:
        raise KeyError(f"{sample.op} has no rule")
    report = Report()
    alone = _Alone(sample)
    with simulate(max(map(math.prod, meshes))):
        for shape in meshes:
            world = _Played(alone, _grid(shape))
            for plan in world.plans(rule):
                report.num_played += 1
                why = world.why_wrong(plan)
                if why:
                    report.mistakes.append(
                        Mistake(shape, _spelled(plan.inputs), _spelled(plan.outputs), why)
                    )
    return report


def _grid(shape: tuple[int, ...]) -> Grid:
    return grid_of(DeviceMesh("cpu", torch.arange(math.prod(shape)).view(shape)))


class _Alone:
    """The sample on one device: found out once, compared with many times."""

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
        """The places in the result of the tensors that `asked` gives."""
        if isinstance(self._shape, TensorMeta):
            return [0]
        return [place for place, meta in enumerate(self._shape) if isinstance(meta, TensorMeta)]

    def ignored(self) -> set[int]:
        """The operands whose values make no difference, by number."""
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


class _Played:
    """The sample in a simulated world: its tensors are cut once for each layout."""

    def __init__(self, alone: _Alone, grid: Grid) -> None:
        self._alone, self._grid = alone, grid
        schema = getattr(alone.call.op, "_schema", None)
        self._written = schema is not None and schema.is_mutable
        self._parts: dict[tuple[int, Layout], torch.Tensor] = {}

    def plans(self, rule: Rule) -> Iterator[CallPlan]:
        """The plans of every combination, from layouts that bring every kind of split in."""
        call, wish = self._alone.call, self._alone.sample.wish
        starts = itertools.product(
            _starting_layouts(self._alone, self._grid), list(_wishes(wish, call, self._grid))
        )
        return every_plan(rule, call, starts)

    def parts(self, layouts: Sequence[Layout]) -> list[torch.Tensor]:
        """The sample's tensors as `layouts` say."""
        found = []
        for number, (tensor, layout) in enumerate(zip(self._alone.tensors, layouts, strict=True)):
            if (number, layout) not in self._parts:
                self._parts[number, layout] = scattered(tensor.clone(), layout)
            part = self._parts[number, layout]
            found.append(part.clone() if self._written else part)
        return found

    def why_wrong(self, plan: CallPlan) -> str:
        """Empty when the plan gives one device's result."""
        alone = self._alone
        op = alone.sample.op
        spelled = op if isinstance(op, Positional) else None
        found = alone.run(self.parts(plan.inputs), local_call(plain_op(op), plan, spelled))
        if not plan.outputs:
            return "" if found == alone.result else f"{found} instead of {alone.result}"
        asked = zip(
            alone.places(), alone.asked(found), alone.asked(alone.result), plan.outputs, strict=True
        )
        for number, part, whole, layout in asked:
            if number in alone.sample.unread:
                continue
            if why := _difference(part, whole, layout) or _other_memory(part, layout):
                return f"output {number} {why}"
        return ""


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    flat = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else [a] for a in args)
    return [a for a in flat if isinstance(a, torch.Tensor)]


def _outputs(sample: Sample) -> tuple[tuple[TensorMeta, ...], Any]:
    """As the rule's user would infer them; of some ops only the data tell the shapes."""
    try:
        return infer_outputs(sample.op, sample.args, sample.kwargs, symbolic=False)
    except NotImplementedError:
        result = sample.op(*sample.args, **sample.kwargs)
        shape = tree_map(lambda t: TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype), result)
        return tuple([shape] if isinstance(shape, TensorMeta) else tree_leaves(shape)), shape


def _starting_layouts(alone: _Alone, grid: Grid) -> Iterator[list[Layout]]:
    call = alone.call
    whole = [_layout(meta, (REPLICATE,) * grid.num_axes, grid) for meta in call.inputs]
    yield whole
    for number, meta in enumerate(call.inputs):
        is_norm = _could_be_norms(alone.tensors[number])
        for term in _PARTIALS if is_norm else _PARTIALS[:-1]:
            partial = list(whole)
            partial[number] = _layout(meta, (term,) * grid.num_axes, grid)
            yield partial
        for dim, size in enumerate(meta.shape):
            for axis, parts in enumerate(grid.shape):
                placements: list[Placement] = [REPLICATE] * grid.num_axes
                # Everything on one coordinate, and all but one entry on the last.
                for sizes in ((size, *[0] * (parts - 1)), (*_ones(size, parts),)):
                    placements[axis] = Shard(dim, sizes)
                    started = list(whole)
                    started[number] = _layout(meta, tuple(placements), grid)
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
    """Sizes that start with ones: uneven the other way round than chunks are."""
    ones = [min(1, size)] * (parts - 1)
    return [*ones, size - sum(ones)] if size >= sum(ones) else [size] + [0] * (parts - 1)


def _layout(meta: TensorMeta, placements: tuple[Placement, ...], grid: Grid) -> Layout:
    normal = normalize(placements, meta.shape, grid)
    return make_layout(grid, normal, meta.shape, meta.stride, meta.dtype)


def _wishes(wish: Sequence[Placement], call: Call, grid: Grid) -> Iterator[Layout | None]:
    if not wish:
        yield None
        return
    for placements in itertools.product(wish, repeat=grid.num_axes):
        yield _layout(call.outputs[0], placements, grid)


@contextlib.contextmanager
def _same_seed() -> Iterator[None]:
    """Draws inside take the same random numbers every time, and none from outside."""
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


def _difference(part: Any, whole: torch.Tensor, layout: Layout) -> str:
    """How `part`, laid out so, is not `whole`; empty where it is."""
    for rank, coordinate in layout.grid.coordinates.items():
        here = part.on_rank(rank)
        if tuple(here.shape) != layout.local_shape(coordinate):
            return f"has shape {tuple(here.shape)} on rank {rank}"
        if here.dtype != whole.dtype:
            return f"is {here.dtype} instead of {whole.dtype} on rank {rank}"
    together = gathered(part, layout)
    rtol, atol = _tolerances(whole.dtype)
    if not torch.allclose(together, whole, rtol=rtol, atol=atol, equal_nan=True):
        return f"differs by {(together - whole).abs().max().item():.3g}"
    return ""


def _tolerances(dtype: torch.dtype) -> tuple[float, float]:
    """Four units in the last place where that is more than what sums of float32 need."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return 1e-4, 1e-5
    eps = torch.finfo(dtype).eps
    return max(1e-4, 4 * eps), max(1e-5, 4 * eps)


def _other_memory(part: Any, layout: Layout) -> str:
    """How dims lie in another order in memory than `layout` promises: then a view would fail."""
    for rank in layout.grid.ranks:
        here = part.on_rank(rank)
        long = [d for d in range(here.dim()) if here.shape[d] > 1 and layout.stride[d]]
        promised = sorted(long, key=lambda d: -layout.stride[d])
        found = [here.stride(d) for d in promised]
        if here.numel() and found != sorted(found, reverse=True):
            return f"has strides {here.stride()} on rank {rank}, the whole {layout.stride}"
    return ""


def _spelled(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(short(layout.placements) for layout in layouts)


# -- the other way round ---------------------------------------------------------------------


def missing_choices(
    sample: Sample, rule: Rule | None = None, ranks: int = 2, *, sums: bool = True
) -> list[str]:
    """Placements along one axis that are right for the op itself and that the rule does not offer.

    Only choices that shard something, or let a Partial sum through, are of use. How an operand
    lies whose values are not read does not matter. Without `sums` no input is tried as a sum.
    """
    rule = rule or find_rule(plain_op(sample.op))
    if rule is None:
        raise KeyError(f"{sample.op} has no rule")
    missing = []
    alone = _Alone(sample)
    call = alone.call
    if not call.outputs:
        return []  # an answer about a part is none about the whole
    ignored = alone.ignored()

    def spelled(layouts: Sequence[Layout]) -> tuple[str, ...]:
        return tuple("any" if i in ignored else each for i, each in enumerate(_spelled(layouts)))

    with simulate(ranks):
        world = _Played(alone, grid := _grid((ranks,)))
        offered = {(spelled(plan.inputs), _spelled(plan.outputs)) for plan in world.plans(rule)}
        ways = [
            [REPLICATE] if number in ignored else _ways(meta, sums)
            for number, meta in enumerate(call.inputs)
        ]
        for placements in itertools.product(*ways):
            if all(isinstance(p, Replicate) for p in placements) or _rounds(call, placements):
                continue
            layouts = [_layout(m, (p,), grid) for m, p in zip(call.inputs, placements, strict=True)]
            for outputs in _right_outputs(alone, world.parts(layouts), grid):
                if (spelled(layouts), _spelled(outputs)) not in offered:
                    missing.append(
                        f"{', '.join(spelled(layouts))} -> {', '.join(_spelled(outputs))}"
                    )
    return missing


def _rounds(call: Call, placements: Sequence[Placement]) -> bool:
    """Whether terms would be rounded before they are added: that is another number."""
    narrowest = min(meta.dtype.itemsize for meta in call.outputs)
    return any(
        isinstance(p, Partial) and meta.dtype.itemsize > narrowest
        for p, meta in zip(placements, call.inputs, strict=True)
    )


def _ways(meta: TensorMeta, sums: bool = True) -> list[Placement]:
    # Terms of an integer tensor would be ids out of range, which some kernels do not survive.
    terms = [SUM] if sums and meta.dtype.is_floating_point else []
    return [REPLICATE, *terms, *(Shard(d) for d in range(meta.ndim))]


def _right_outputs(alone: _Alone, parts: list[torch.Tensor], grid: Grid) -> Iterator[list[Layout]]:
    try:
        found = alone.run(parts, alone.sample.op)
    except Exception:
        return  # the op itself does not run on such parts
    if isinstance(found, (list, tuple)) and len(found) != len(alone.result):
        return  # parts that are split make fewer results than the whole
    pairs = zip(alone.asked(found), alone.asked(alone.result), strict=True)
    # Outputs do not depend on one another: each has its right placements.
    right = [
        [lo for lo in _layouts_to_try(meta, grid) if _is_right(part, whole, lo)]
        for meta, (part, whole) in zip(alone.call.outputs, pairs, strict=True)
    ]
    yield from map(list, itertools.product(*right))


def _layouts_to_try(meta: TensorMeta, grid: Grid) -> list[Layout]:
    # Anything is right for a result without elements.
    ways = _ways(meta) if math.prod(meta.shape) else [REPLICATE]
    return [_layout(meta, (placement,), grid) for placement in ways]


def _is_right(part: torch.Tensor, whole: torch.Tensor, layout: Layout) -> bool:
    try:
        return not _difference(part, whole, layout)
    except Exception:
        return False  # parts of other shapes than this layout has
