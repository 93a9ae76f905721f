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
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.ranks import localize
from shardwise.comm.simulate import simulate
from shardwise.core.grid import Grid, grid_of
from shardwise.core.layout import Layout, make_layout, normalize
from shardwise.core.placements import REPLICATE, SUM, Partial, Placement, Replicate, Shard, short
from shardwise.dtensor.planning import local_call
from shardwise.redistribute.execute import execute
from shardwise.redistribute.search import find_steps
from shardwise.rules.catalog import find_rule
from shardwise.rules.infer import infer_outputs
from shardwise.rules.positional import Positional, plain_op
from shardwise.rules.propagate import CallPlan, every_plan
from shardwise.rules.row_sparse import SparseRows
from shardwise.rules.rule import Call, Rule, TensorMeta

#: One axis, uneven and with empty shards, and two axes that may share a dim.
MESHES: tuple[tuple[int, ...], ...] = ((2,), (3,), (2, 2))


@dataclass(frozen=True)
class Sample:
    """A call on one device. `wish` lists placements that a caller may ask the output for."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    wish: tuple[Placement, ...] = ()


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
    for shape in meshes:
        with simulate(math.prod(shape)):
            grid = grid_of(init_device_mesh("cpu", shape))
            for plan in _plans(rule, sample, grid):
                report.num_played += 1
                why = _why_wrong(plan, sample, grid)
                if why:
                    report.mistakes.append(
                        Mistake(shape, _spelled(plan.inputs), _spelled(plan.outputs), why)
                    )
    return report


def _plans(rule: Rule, sample: Sample, grid: Grid) -> Iterator[CallPlan]:
    """The plans of every combination, from starting layouts that bring every kind of split in."""
    call = _call(sample)
    seen = set()
    for layouts in _starting_layouts(call, grid):
        for wish in _wishes(sample, call, grid):
            for plan in every_plan(rule, call, layouts, wish):
                key = (plan.inputs, plan.outputs, plan.local)
                if key not in seen:
                    seen.add(key)
                    yield plan


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    flat = itertools.chain.from_iterable(a if isinstance(a, (list, tuple)) else [a] for a in args)
    return [a for a in flat if isinstance(a, torch.Tensor)]


def _call(sample: Sample) -> Call:
    outputs, _ = _outputs(sample)
    inputs = tuple(
        TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype) for t in _tensors(sample.args)
    )
    return Call(plain_op(sample.op), sample.args, sample.kwargs, inputs, outputs)


def _outputs(sample: Sample) -> tuple[tuple[TensorMeta, ...], Any]:
    """As the rule's user would infer them; of some ops only the data tell the shapes."""
    try:
        return infer_outputs(sample.op, sample.args, sample.kwargs, symbolic=False)
    except NotImplementedError:
        result = sample.op(*sample.args, **sample.kwargs)
        shape = tree_map(lambda t: TensorMeta(tuple(t.shape), tuple(t.stride()), t.dtype), result)
        return tuple([shape] if isinstance(shape, TensorMeta) else tree_leaves(shape)), shape


def _starting_layouts(call: Call, grid: Grid) -> Iterator[list[Layout]]:
    whole = [_layout(meta, (REPLICATE,) * grid.num_axes, grid) for meta in call.inputs]
    yield whole
    for number, meta in enumerate(call.inputs):
        partial = list(whole)
        partial[number] = _layout(meta, (SUM,) * grid.num_axes, grid)
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


def _ones(size: int, parts: int) -> list[int]:
    """Sizes that start with ones: uneven the other way round than chunks are."""
    ones = [min(1, size)] * (parts - 1)
    return [*ones, size - sum(ones)] if size >= sum(ones) else [size] + [0] * (parts - 1)


def _layout(meta: TensorMeta, placements: tuple[Placement, ...], grid: Grid) -> Layout:
    normal = normalize(placements, meta.shape, grid)
    return make_layout(grid, normal, meta.shape, meta.stride, meta.dtype)


def _wishes(sample: Sample, call: Call, grid: Grid) -> Iterator[Layout | None]:
    if not sample.wish:
        yield None
        return
    for placements in itertools.product(sample.wish, repeat=grid.num_axes):
        yield _layout(call.outputs[0], placements, grid)


def _why_wrong(plan: CallPlan, sample: Sample, grid: Grid) -> str:
    """Empty when the plan gives one device's result."""
    tensors = _tensors(sample.args)
    parts = iter([scattered(t.clone(), lo) for t, lo in zip(tensors, plan.inputs, strict=True)])
    args = [_replace(arg, parts) for arg in sample.args]
    spelled = sample.op if isinstance(sample.op, Positional) else None
    with _same_seed():
        found = local_call(plain_op(sample.op), plan, spelled)(*args, **sample.kwargs)
    expected = _on_one_device(sample)
    if not plan.outputs:
        return "" if found == expected else f"{found} instead of {expected}"
    return _difference(_asked(found, sample), _asked(expected, sample), plan.outputs, grid)


def _asked(result: Any, sample: Sample) -> list[torch.Tensor]:
    """The tensors of a result; kernels may return some that nobody asked for."""
    if isinstance(result, torch.Tensor):
        return [result]
    _, shape = _outputs(sample)
    asked = [r for r, meta in zip(result, shape, strict=True) if isinstance(meta, TensorMeta)]
    return [r.dense() if isinstance(r, SparseRows) else r for r in asked]


def _on_one_device(sample: Sample) -> Any:
    """The op on copies: it may write to them."""
    copies = iter([t.clone() for t in _tensors(sample.args)])
    with _same_seed():
        return sample.op(*[_replace(arg, copies) for arg in sample.args], **sample.kwargs)


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


def _difference(
    found: Sequence[Any], expected: Sequence[Any], layouts: Sequence[Layout], grid: Grid
) -> str:
    for number, (part, whole, layout) in enumerate(zip(found, expected, layouts, strict=True)):
        for rank in grid.ranks:
            shape = tuple(part.on_rank(rank).shape)
            if shape != layout.local_shape(grid.coordinates[rank]):
                return f"output {number} has shape {shape} on rank {rank}"
        together = gathered(part, layout)
        if together.dtype != whole.dtype:
            return f"output {number} is {together.dtype} instead of {whole.dtype}"
        if not torch.allclose(together, whole, rtol=1e-4, atol=1e-5, equal_nan=True):
            return f"output {number} differs by {(together - whole).abs().max().item():.3g}"
    return ""


def scattered(tensor: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A plain tensor laid out; Partial axes get random terms that reduce to it."""
    grid = layout.grid
    whole = layout.with_placements((REPLICATE,) * grid.num_axes)
    sharded = tuple(REPLICATE if isinstance(p, Partial) else p for p in layout.placements)
    target = layout.with_placements(sharded)
    local = execute(localize(grid, tensor), find_steps(whole, target))
    for axis, placement in enumerate(layout.placements):
        if isinstance(placement, Partial):
            local = _split_terms(local, placement.reduce_op, axis, grid)
    return local


def _split_terms(local: torch.Tensor, reduce_op: str, axis: int, grid: Grid) -> torch.Tensor:
    """Random terms along `axis`, the same in each group of ranks that shares the rest."""
    assert isinstance(local, LocalTensor), "rules are checked in a simulated world"
    made: dict[int, torch.Tensor] = {}
    for line in grid.lines(axis):
        for rank, term in zip(
            line, _terms(local.on_rank(line[0]), reduce_op, len(line)), strict=True
        ):
            made[rank] = term
    return LocalTensor.per_rank(lambda rank: made[rank], grid.ranks)


def _terms(value: torch.Tensor, reduce_op: str, num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(value.numel())
    noise = [
        torch.randint(-3, 4, value.shape, generator=generator).to(value.dtype)
        for _ in range(num - 1)
    ]
    if reduce_op in ("max", "min"):
        sign = -1 if reduce_op == "max" else 1
        return [value, *(value + sign * n.abs() for n in noise)]
    if reduce_op == "product":
        return [value, *(torch.ones_like(value) for _ in noise)]
    total = value * num if reduce_op == "avg" else value
    return [*noise, total - sum(noise)] if noise else [total]


def gathered(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The plain tensor that parts in `layout` stand for."""
    whole = layout.with_placements((REPLICATE,) * layout.grid.num_axes)
    result = execute(local, find_steps(layout, whole))
    assert isinstance(result, LocalTensor), "rules are checked in a simulated world"
    return result.agreed()


def _spelled(layouts: Sequence[Layout]) -> tuple[str, ...]:
    return tuple(short(layout.placements) for layout in layouts)


# -- the other way round ---------------------------------------------------------------------


def missing_choices(sample: Sample, rule: Rule | None = None, ranks: int = 2) -> list[str]:
    """Placements along one axis that are right for the op itself and that the rule does not offer.

    Only choices that shard something, or let a Partial sum through, are of use.
    """
    rule = rule or find_rule(plain_op(sample.op))
    if rule is None:
        raise KeyError(f"{sample.op} has no rule")
    tensors = _tensors(sample.args)
    missing = []
    with simulate(ranks):
        grid = grid_of(init_device_mesh("cpu", (ranks,)))
        call = _call(sample)
        if not call.outputs:
            return []  # an answer about a part is none about the whole
        offered = {
            (_spelled(plan.inputs), _spelled(plan.outputs)) for plan in _plans(rule, sample, grid)
        }
        for placements in itertools.product(*map(_ways, call.inputs)):
            if all(isinstance(p, Replicate) for p in placements):
                continue
            layouts = [_layout(m, (p,), grid) for m, p in zip(call.inputs, placements, strict=True)]
            parts = [scattered(t.clone(), lo) for t, lo in zip(tensors, layouts, strict=True)]
            for outputs in _right_outputs(sample, call, parts, grid):
                if (_spelled(layouts), _spelled(outputs)) not in offered:
                    missing.append(
                        f"{', '.join(_spelled(layouts))} -> {', '.join(_spelled(outputs))}"
                    )
    return missing


def _ways(meta: TensorMeta) -> list[Placement]:
    # Terms of an integer tensor would be ids out of range, which some kernels do not survive.
    sums = [SUM] if meta.dtype.is_floating_point else []
    return [REPLICATE, *sums, *(Shard(d) for d in range(meta.ndim))]


def _right_outputs(
    sample: Sample, call: Call, parts: list[torch.Tensor], grid: Grid
) -> Iterator[list[Layout]]:
    remaining = iter(parts)
    args = [_replace(arg, remaining) for arg in sample.args]
    try:
        with _same_seed():
            found = sample.op(*args, **sample.kwargs)
    except Exception:
        return  # the op itself does not run on such parts
    expected = _on_one_device(sample)
    if isinstance(found, (list, tuple)) and len(found) != len(expected):
        return  # parts that are split make fewer results than the whole
    pairs = zip(_asked(found, sample), _asked(expected, sample), strict=True)
    # Outputs do not depend on one another: each has its right placements.
    right = [
        [lo for lo in _layouts_to_try(meta, grid) if _is_right(part, whole, lo, grid)]
        for meta, (part, whole) in zip(call.outputs, pairs, strict=True)
    ]
    yield from map(list, itertools.product(*right))


def _layouts_to_try(meta: TensorMeta, grid: Grid) -> list[Layout]:
    return [_layout(meta, (placement,), grid) for placement in _ways(meta)]


def _is_right(part: torch.Tensor, whole: torch.Tensor, layout: Layout, grid: Grid) -> bool:
    try:
        return not _difference([part], [whole], [layout], grid)
    except Exception:
        return False  # parts of other shapes than this layout has
