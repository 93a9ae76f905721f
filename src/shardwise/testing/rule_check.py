"""Samples, and checks of a rule against the op on one device, in a simulated world.

`check_rule` lays the sample's tensors out for each combination of choices, runs the local call on
each rank, assembles the result by the outputs' placements, and compares. `missing_choices` finds
choices that a rule could offer but does not. `check_doors` calls the op on DTensors, on one to
three mesh axes in any order, reads the results through conversions with their gradients, writes to
them, and compares everything, the generator's state included.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from random import Random
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise._torch.dispatch import OpOverload
from shardwise._torch.functions import tree_leaves, tree_map
from shardwise.core.layout import Layout, make_layout, normalize, partials_commute
from shardwise.core.mesh import Grid, grid_of
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
from shardwise.dispatch.catalog import Positional, find_rule, plain_op
from shardwise.dispatch.infer import infer_outputs
from shardwise.dispatch.local_call import local_call
from shardwise.dispatch.propagate import CallPlan, every_plan
from shardwise.dispatch.rule import Call, Rule, TensorMeta
from shardwise.ops.lookup.rules import SparseRows
from shardwise.simulation.world import simulate
from shardwise.testing.cases import Cases
from shardwise.testing.compare import Alone, OpCall, outcome_of, tensors_of
from shardwise.testing.layouts import OperandLayouts, gather, random_of, scatter

#: One axis, uneven and with empty shards, and two axes that may share a dim.
MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))


@dataclass(frozen=True)
class Mistake:
    """A choice whose result differs from one device's."""

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

    def __str__(self) -> str:
        found = f"{self.num_played} choices played, {len(self.mistakes)} wrong"
        return "\n".join([found, *map(str, self.mistakes)])


def check_rule(
    sample: Sample, rule: Rule | None = None, meshes: Sequence[tuple[int, ...]] = MESHES
) -> Report:
    """Play every choice of the op's rule (or of `rule`) on the sample.

    >>> import torch
    >>> x = torch.randn(4, 5)
    >>> check_rule(Sample(torch.ops.aten.neg.default, (x,))).ok
    True
    """
    rule = rule or rule_for(sample)
    report = Report()
    alone = SampleAlone(sample)
    with simulate(max(map(math.prod, meshes))):
        for shape in meshes:
            world = SimulatedSample(alone, grid_of_shape(shape))
            for plan in world.plans(rule):
                report.num_played += 1
                why = world.why_wrong(plan)
                if why:
                    report.mistakes.append(
                        Mistake(shape, as_text(plan.inputs), as_text(plan.outputs), why)
                    )
    return report


def missing_choices(
    sample: Sample, rule: Rule | None = None, ranks: int = 2, *, sums: bool = True
) -> list[str]:
    """Placements along one axis that are right for the op itself but that the rule does not offer.

    Only choices that shard something, or pass a Partial sum on, are useful. The layout of an
    operand whose values are not read does not matter. Without `sums` no input is tried as a sum.
    """
    rule = rule or rule_for(sample)
    missing = []
    alone = SampleAlone(sample)
    call = alone.call
    if not call.outputs:
        return []  # a Python value of a shard says nothing about the whole
    ignored = alone.ignored()

    def as_read(layouts: Sequence[Layout]) -> tuple[str, ...]:
        return tuple("any" if i in ignored else each for i, each in enumerate(as_text(layouts)))

    with simulate(ranks):
        world = SimulatedSample(alone, grid := grid_of_shape((ranks,)))
        offered = {(as_read(plan.inputs), as_text(plan.outputs)) for plan in world.plans(rule)}
        ways = [
            [REPLICATE] if number in ignored else _ways(meta, sums)
            for number, meta in enumerate(call.inputs)
        ]
        for placements in itertools.product(*ways):
            if all(isinstance(p, Replicate) for p in placements) or _rounds(call, placements):
                continue
            layouts = [
                layout_of(m, (p,), grid) for m, p in zip(call.inputs, placements, strict=True)
            ]
            for outputs in _right_outputs(alone, world.shards(layouts), grid):
                if (as_read(layouts), as_text(outputs)) not in offered:
                    missing.append(
                        f"{', '.join(as_read(layouts))} -> {', '.join(as_text(outputs))}"
                    )
    return missing


def _rounds(call: Call, placements: Sequence[Placement]) -> bool:
    """Whether terms would be rounded before they are added, which changes the result."""
    narrowest = min(meta.dtype.itemsize for meta in call.outputs)
    return any(
        isinstance(p, Partial) and meta.dtype.itemsize > narrowest
        for p, meta in zip(placements, call.inputs, strict=True)
    )


def _ways(meta: TensorMeta, sums: bool = True) -> list[Placement]:
    # Terms of an integer tensor would be ids out of range, which some kernels do not survive.
    terms = [SUM] if sums and meta.dtype.is_floating_point else []
    return [REPLICATE, *terms, *(Shard(d) for d in range(meta.ndim))]


def _right_outputs(
    alone: SampleAlone, parts: list[torch.Tensor], grid: Grid
) -> Iterator[list[Layout]]:
    try:
        found = alone.run(parts, alone.sample.op)
    except Exception:
        return  # the op itself does not run on such shards
    if isinstance(found, (list, tuple)) and len(found) != len(alone.result):
        return  # shards that are split make fewer results than the whole
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
    return [layout_of(meta, (placement,), grid) for placement in ways]


def _is_right(part: torch.Tensor, whole: torch.Tensor, layout: Layout) -> bool:
    try:
        return not difference(part, whole, layout)
    except Exception:
        return False  # shards have other shapes in this layout


#: A mesh of each number of axes; axes of two, so that choices of one axis serve on any.
DOOR_MESHES: tuple[tuple[int, ...], ...] = ((2,), (2, 2), (2, 2, 2))


def check_doors(
    sample: Sample,
    rule: Rule | None = None,
    num: int = 1,
    meshes: Sequence[tuple[int, ...]] = DOOR_MESHES,
) -> list[str]:
    """The mistakes of `num` draws of choices, reads and writes on each mesh, as text.

    A function of a rule file and an op that writes are not checked.

    >>> import torch
    >>> check_doors(Sample(torch.ops.aten.t.default, (torch.randn(4, 5),)))
    []
    """
    if not isinstance(sample.op, OpOverload) or sample.op._schema.is_mutable:
        return []
    mistakes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = _on_one_device(sample)
        placements = _choices(sample, rule or rule_for(sample))
        for shape in meshes:
            random = random_of(f"{sample.op} {expected.sample} {shape}")
            with simulate(math.prod(shape)):
                mesh = init_device_mesh("cpu", shape)
                for number in range(num):
                    way = _drawn(shape, placements, random)
                    for kind, play in Cases(expected, way, mesh, number, num_doors=1).each():
                        outcome, note = outcome_of(play)
                        if outcome in ("wrong", "error"):
                            mistakes.append(f"{kind} on {way}: {note}")
                        if kind == "forward" and outcome != "ok":
                            break
    return mistakes


@dataclass(frozen=True)
class _Entry:
    """An op with the interface of an entry of torch's table."""

    op: OpOverload
    variant_test_name: str = ""
    supports_autograd: bool = True

    @property
    def name(self) -> str:
        return str(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)


def _on_one_device(sample: Sample) -> Alone:
    """The call, with gradients of as many operands as possible."""
    every = tuple(t.is_floating_point() or t.is_complex() for t in tensors_of(sample.args))
    first = (every[0], *[False] * (len(every) - 1)) if every else ()
    for wants_grad in (every, first):
        with contextlib.suppress(RuntimeError):  # not differentiable with respect to one of them
            return _call_alone(sample, wants_grad)
    return _call_alone(sample, (False,) * len(every))


def _call_alone(sample: Sample, wants_grad: tuple[bool, ...]) -> Alone:
    case = OpCall(sample.args, dict(sample.kwargs), wants_grad, lambda result: result)
    return Alone(_Entry(sample.op), case)


def _choices(sample: Sample, rule: Rule) -> list[tuple[Placement, ...]]:
    """The placements of the operands along one axis of two, for each choice of the rule."""
    with simulate(2):
        played = SimulatedSample(SampleAlone(sample), grid_of_shape((2,)))
        return list(
            dict.fromkeys(tuple(lo.placements[0] for lo in p.inputs) for p in played.plans(rule))
        )


def _drawn(
    shape: tuple[int, ...], choices: Sequence[tuple[Placement, ...]], random: Random
) -> OperandLayouts:
    """A choice for each axis; an operand is replicated where they cannot be combined."""
    num_axes = len(shape)
    along = [random.choice(choices) for _ in shape]
    operands = tuple(_combined(placements) for placements in zip(*along, strict=True))
    order = tuple(random.sample(range(num_axes), num_axes))
    return OperandLayouts(shape, operands, None if order == tuple(range(num_axes)) else order)


def _combined(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard) and len(placements) > 1:
            placement = Shard(placement.dim)  # explicit sizes do not nest
        found.append(placement if partials_commute([*found, placement]) else REPLICATE)
    return tuple(found)


@dataclass(frozen=True)
class Sample:
    """A call on one device. `preferred` lists the placements that a caller may want for the output.

    `unread` has the positions, in the result, of tensors whose values nobody reads, such as the
    seed of a dropout with p=0.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    preferred: tuple[Placement, ...] = ()
    unread: tuple[int, ...] = ()
    #: Deprecated: the former name of `preferred`.
    wish: InitVar[tuple[Placement, ...] | None] = None

    def __post_init__(self, wish: tuple[Placement, ...] | None) -> None:
        if wish is not None:
            warnings.warn(
                "Sample(wish=...) is deprecated: use preferred=...",
                DeprecationWarning,
                stacklevel=3,
            )
            object.__setattr__(self, "preferred", wish)


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
        self.tensors = tensors_of(sample.args)
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
        """The numbers of the operands whose values do not affect the result."""
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
        preferred = list(_preferred(alone.sample.preferred, alone.call, grid))
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
        """How the plan's result differs from one device's; empty if it does not."""
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
        tensor = alone.tensors[number]
        could_be_norms = tensor.is_floating_point() and bool((tensor >= 0).all())
        for term in _PARTIALS if could_be_norms else _PARTIALS[:-1]:
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
    """How the shards in `layout` differ from `whole`; empty if they do not."""
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
