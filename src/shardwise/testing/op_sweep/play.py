"""One operator in a simulated world and on one device, and where the two differ."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from shardwise.comm.local_tensor import LocalTensor
from shardwise.comm.ranks import each_rank
from shardwise.comm.simulate import simulate
from shardwise.core.layout import Layout
from shardwise.core.placements import REPLICATE, Partial, Placement
from shardwise.dtensor.autograd import gradient_layout
from shardwise.dtensor.create import distribute_tensor
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.testing.op_sweep.table import Sample, error_samples, full_name, samples, tensors_of
from shardwise.testing.op_sweep.ways import ONE_AXIS, RANKS, TWO_AXES, Way, ways

#: How a case can end, the worst first; an op has the worst of its cases.
OUTCOMES = ("wrong", "crash", "timeout", "error", "raises", "ok")
#: What is compared: the result, the gradients, the variants that write, and what must be refused.
KINDS = ("forward", "backward", "inplace", "out", "refused")
#: Closer than this is the same in float32; else float64 decides, with a tighter bound.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CLOSE_DOUBLE = {"rtol": 1e-7, "atol": 1e-8}
_NOTES_KEPT = 3

Meshes = dict[tuple[int, ...], DeviceMesh]


@dataclass
class OpResult:
    """What the sweep found out about one operator."""

    name: str
    random: bool = False
    seconds: float = 0.0
    #: kind -> outcome -> number of cases
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    #: kind -> the first cases that did not end well, in words
    notes: dict[str, list[str]] = field(default_factory=dict)

    def add(self, kind: str, outcome: str, note: str = "") -> None:
        count = self.counts.setdefault(kind, {})
        count[outcome] = count.get(outcome, 0) + 1
        if outcome != "ok" and count[outcome] <= _NOTES_KEPT:
            self.notes.setdefault(kind, []).append(f"{outcome}: {note}")

    def worst(self, kind: str) -> str:
        """The worst outcome of a kind; empty when there was no case."""
        return next((o for o in OUTCOMES if self.counts.get(kind, {}).get(o)), "")

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {kind: self.worst(kind) for kind in KINDS}


class Different(Exception):
    """A number, a shape or a type that one device does not give."""


def play_operator(
    entry: Any, num_samples: int, num_ways: int, kinds: Sequence[str] = KINDS
) -> OpResult:
    """The cases of one entry of torch's table, of the given kinds."""
    result = OpResult(full_name(entry))
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples(entry, num_samples)):
            _play_sample(entry, sample, number, num_ways, kinds, result)
        if "refused" in kinds:
            _play_errors(entry, result)
    result.seconds = round(time.monotonic() - started, 2)
    return result


def _play_sample(
    entry: Any,
    sample: Sample,
    number: int,
    num_ways: int,
    kinds: Sequence[str],
    result: OpResult,
) -> None:
    try:
        alone = Alone(entry, sample)
    except Exception:
        return  # one device does not run it either
    result.random = result.random or alone.random
    with simulate(RANKS):
        meshes: Meshes = {s: init_device_mesh("cpu", s) for s in (ONE_AXIS, TWO_AXES)}
        for way_number, way in enumerate(ways(sample.tensors, num_ways)):
            where = f"sample {number} {_spelled(sample)} on {way}"
            for kind, case in _cases(entry, sample, alone, way, meshes, way_number):
                if kind not in kinds:
                    continue
                outcome, note = _outcome(case)
                result.add(kind, outcome, f"{where}: {note}")
                if kind == "forward" and outcome != "ok":
                    break


def _outcome(case: Callable[[], None]) -> tuple[str, str]:
    try:
        case()
    except Different as error:
        return "wrong", str(error)
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", _brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {_brief(error)}"
    return "ok", ""


def _brief(error: BaseException) -> str:
    cause = error.__cause__
    text = " ".join(str(error).split())[:300]
    return f"{text} <- {_brief(cause)}" if cause is not None else text


def _spelled(sample: Sample) -> str:
    return ", ".join(f"{str(t.dtype)[6:]}{list(t.shape)}" for t in sample.tensors)


class Alone:
    """A sample on one device: the result, the gradients, and the same in double precision."""

    @property
    def without_values(self) -> bool:
        """Whether the op promises a shape and a type, and no values."""
        return "empty" in self.entry.name

    def __init__(self, entry: Any, sample: Sample) -> None:
        self.entry, self.sample = entry, sample
        self.result, self.grads = self._run(sample, seed=0)
        if self.without_values:
            self.result = [torch.zeros_like(x) for x in self.result]
        self.random = not _same(self.result, self._run(sample, seed=1)[0])
        #: The tensor that the form in place has written to.
        self.written: torch.Tensor | None = None
        self._double: tuple[Any, Any] | None = None

    def _run(self, sample: Sample, seed: int) -> tuple[list[Any], list[Any] | None]:
        args, kwargs, leaves = placed(sample, lambda t: t.detach().clone())
        torch.default_generator.manual_seed(seed)
        result = self.entry(*args, **kwargs)
        #: The result as the op returns it, in its tuples and lists.
        self.whole = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        grads = None
        if self.entry.supports_autograd and leaves:
            with contextlib.suppress(Exception):
                grads = gradients(sample.differentiable(result), leaves, lambda t, _: t)
        return _detached(result), grads

    def double(self) -> tuple[list[Any], list[Any] | None]:
        if self._double is None:
            self._double = self._run(doubled(self.sample), seed=0)
        return self._double


def placed(
    sample: Sample, place: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
    """The sample's arguments with each tensor placed, and the leaves that want a gradient."""
    wants, leaves = iter(sample.wants_grad), []

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        moved = place(leaf)
        if next(wants):
            leaves.append(moved.requires_grad_())
        return moved

    args, kwargs = tree_map(move, (sample.args, sample.kwargs))
    return args, kwargs, leaves


def gradients(
    result: Any, leaves: Sequence[torch.Tensor], like: Callable[[torch.Tensor, Any], torch.Tensor]
) -> list[Any]:
    """The gradients of the leaves for fixed gradients of the results, laid out by `like`."""
    results = [t for t in tensors_of(result) if t.requires_grad]
    generator = torch.Generator().manual_seed(7)
    given = [like(torch.randn(t.shape, dtype=t.dtype, generator=generator), t) for t in results]
    return list(torch.autograd.grad(results, leaves, given, allow_unused=True))


def doubled(sample: Sample) -> Sample:
    wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}

    def widen(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in wider:
            return leaf.detach().to(wider[leaf.dtype])
        return leaf

    args, kwargs = tree_map(widen, (sample.args, sample.kwargs))
    return Sample(args, kwargs, sample.wants_grad, sample.differentiable)


# -- laid out over a mesh ----------------------------------------------------------------------


#: What each coordinate of an axis holds of a Partial tensor, in multiples of it. Any two neighbours
#: add up without rounding, and no function that is not linear gives the same sum.
_SHARES = {2: (2, -1), 4: (-1, 2, 1, -1)}


def laid_out(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The tensor in these placements, Partial ones included."""
    whole = tensor.detach().clone().resolve_conj().resolve_neg()
    reduced = [REPLICATE if isinstance(p, Partial) else p for p in placements]
    sharded = distribute_tensor(whole, mesh, reduced, src_data_rank=None)
    partial = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
    if not partial:
        return sharded

    def term(coordinate: Any, part: torch.Tensor) -> torch.Tensor:
        shares = [_SHARES[mesh.shape[axis]][coordinate[axis]] for axis in partial]
        factor = torch.tensor(shares, dtype=part.real.dtype).prod()
        first = all(coordinate[axis] == 0 for axis in partial)
        return torch.where(part.isfinite(), part * factor, part if first else 0)

    layout = sharded._layout
    local = each_rank(layout.grid, term, sharded._local)
    return DTensor.wrap(local, layout.with_placements(tuple(placements), layout.order))


def _cases(
    entry: Any, sample: Sample, alone: Alone, way: Way, meshes: Meshes, number: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    mesh = meshes[way.mesh]
    kept: dict[str, Any] = {}

    def spread(sample: Sample) -> tuple[Any, Any, list[torch.Tensor]]:
        placements = iter(way.placements)
        return placed(sample, lambda t: laid_out(t, mesh, next(placements)))

    def run(sample: Sample) -> tuple[Any, list[torch.Tensor]]:
        args, kwargs, leaves = spread(sample)
        torch.default_generator.manual_seed(0)
        return entry(*args, **kwargs), leaves

    def forward() -> None:
        kept["result"], kept["leaves"] = run(sample)
        if alone.without_values:
            kept["result"] = torch.zeros_like(kept["result"])
        compare(
            gathered(kept["result"]),
            alone.result,
            lambda: (gathered(run(doubled(sample))[0]), alone.double()[0]),
        )

    def like(grad: torch.Tensor, result: Any) -> torch.Tensor:
        # Half of the cases bring gradients that lie like the result, half whole ones.
        layout: Layout = gradient_layout(result._layout)
        where = layout.placements if number % 2 else [REPLICATE] * len(layout.placements)
        return distribute_tensor(grad, layout.grid.mesh, where, src_data_rank=None)

    def backward() -> None:
        def grads(result: Any, leaves: list[torch.Tensor]) -> list[Any]:
            return gathered(gradients(sample.differentiable(result), leaves, like))

        def in_double() -> tuple[list[Any], list[Any]]:
            return grads(*run(doubled(sample))), alone.double()[1] or []

        compare(grads(kept["result"], kept["leaves"]), alone.grads or [], in_double)

    def inplace() -> None:
        with torch.no_grad():
            args, kwargs, _ = spread(sample)
            torch.default_generator.manual_seed(0)
            result = entry.get_inplace()(*args, **kwargs)
        compare(gathered(result), [alone.written], None)
        compare(gathered(args[0]), [alone.written], None)

    def out() -> None:
        with torch.no_grad():
            args, kwargs, _ = spread(sample)
            targets = tree_map(_blank, kept["result"])
            torch.default_generator.manual_seed(0)
            entry(*args, **kwargs, out=targets)
        compare(gathered(targets), alone.result, None)

    yield "forward", forward
    if alone.grads is not None:
        yield "backward", backward
    if entry.get_inplace() is not None and _can_write(entry, sample, alone):
        yield "inplace", inplace
    if entry.supports_out and not alone.random and _takes_out(entry, sample, alone):
        yield "out", out


def _blank(leaf: Any) -> Any:
    """A tensor to write a result to; it lies like the result, and whole where that is Partial."""
    if not isinstance(leaf, DTensor):
        return leaf
    layout = gradient_layout(leaf._layout)
    blank = torch.zeros(leaf.shape, dtype=leaf.dtype)
    return distribute_tensor(blank, layout.grid.mesh, layout.placements, src_data_rank=None)


def _takes_out(entry: Any, sample: Sample, alone: Alone) -> bool:
    args, kwargs, _ = placed(sample, lambda t: t.detach().clone())
    try:
        with torch.no_grad():
            targets = tree_map(torch.zeros_like, alone.whole)
            entry(*args, **kwargs, out=targets)
    except Exception:
        return False
    return True


def _can_write(entry: Any, sample: Sample, alone: Alone) -> bool:
    if not isinstance(sample.args[0], torch.Tensor) or len(alone.result) != 1:
        return False
    args, kwargs, _ = placed(sample, lambda t: t.detach().clone())
    try:
        with torch.no_grad():
            torch.default_generator.manual_seed(0)
            entry.get_inplace()(*args, **kwargs)
    except Exception:
        return False
    alone.written = args[0]
    return True


# -- comparing -----------------------------------------------------------------------------------


def _detached(result: Any) -> list[Any]:
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in tree_leaves(result)]


def gathered(result: Any) -> list[Any]:
    """The leaves of a result as one device would hold them."""
    return [_gathered(leaf) for leaf in tree_leaves(result, is_leaf=lambda x: x is None)]


def _gathered(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        _check_parts(leaf)
        leaf = cast(DTensor, leaf.detach()).full_tensor()
    if not isinstance(leaf, LocalTensor):
        return leaf
    first, *others = [leaf.on_rank(rank) for rank in leaf.ranks]
    for number, other in enumerate(others, start=1):
        if _difference(other, first, CLOSE):
            raise Different(f"rank {number} and rank 0 hold different values after a gather")
    return first


def _check_parts(x: DTensor) -> None:
    layout, local = x._layout, x._local
    assert isinstance(local, LocalTensor), "the sweep runs in a simulated world"
    if tuple(x.shape) != tuple(layout.shape):
        raise Different(f"a tensor of shape {tuple(x.shape)} has {layout!r}")
    for rank in layout.grid.ranks:
        part = local.on_rank(rank)
        wanted = layout.local_shape(layout.grid.coordinates[rank])
        if tuple(part.shape) != wanted or part.dtype != layout.dtype:
            raise Different(f"rank {rank} holds {part.dtype}{list(part.shape)} of {layout!r}")


def compare(
    found: list[Any],
    expected: list[Any],
    in_double: Callable[[], tuple[list[Any], list[Any]]] | None,
) -> None:
    """Raise `Different` where the two differ by more than rounding."""
    if len(found) != len(expected):
        raise Different(f"{len(found)} results instead of {len(expected)}")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        why = _difference(ours, theirs, CLOSE)
        if not why:
            continue
        # Rounding in another order may be all that it is: in double precision it would vanish.
        if in_double is not None and "differs by" in why:
            wide_found, wide_expected = in_double()
            if not _difference(wide_found[number], wide_expected[number], CLOSE_DOUBLE):
                continue
        raise Different(f"result {number} {why}")


def _difference(ours: Any, theirs: Any, close: dict[str, float]) -> str:
    if isinstance(ours, torch.Tensor) and theirs is None:
        theirs = torch.zeros_like(ours)
    if isinstance(theirs, torch.Tensor) and ours is None:
        ours = torch.zeros_like(theirs)
    if not isinstance(theirs, torch.Tensor) or not isinstance(ours, torch.Tensor):
        return "" if _equal(ours, theirs) else f"is {ours!r} instead of {theirs!r}"
    if ours.dtype != theirs.dtype:
        return f"is {ours.dtype} instead of {theirs.dtype}"
    if ours.shape != theirs.shape:
        return f"has shape {list(ours.shape)} instead of {list(theirs.shape)}"
    if ours.dtype is torch.complex32:  # which torch does not compare
        ours, theirs = ours.to(torch.complex64), theirs.to(torch.complex64)
    if torch.allclose(ours, theirs, equal_nan=True, **close):
        return ""
    return f"differs by {(ours - theirs).abs().max().item():.3g}"


def _equal(ours: Any, theirs: Any) -> bool:
    return ours == theirs or (ours != ours and theirs != theirs)


def _same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and not any(
        _difference(a, b, CLOSE) for a, b in zip(one, other, strict=True)
    )


# -- what must be refused ------------------------------------------------------------------------


def _play_errors(entry: Any, result: OpResult) -> None:
    """What one device refuses is refused with an error of the same type."""
    try:
        refused = list(error_samples(entry))
    except Exception:
        return  # the table itself fails to make them
    for sample, kind in refused:
        if overlap(sample.tensors):
            continue  # laid out, they do not overlap any more
        with simulate(RANKS):
            meshes: Meshes = {ONE_AXIS: init_device_mesh("cpu", ONE_AXIS)}
            for way in [w for w in ways(sample.tensors, 100) if w.mesh == ONE_AXIS][:2]:
                outcome, note = _refused(entry, sample, way, meshes, kind)
                result.add("refused", outcome, f"{_spelled(sample)} on {way}: {note}")


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them repeats memory, or two that are not the same share some."""
    if any(0 in t.stride() and t.numel() > 1 for t in tensors):
        return True
    held: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if held.setdefault(tensor.untyped_storage().data_ptr(), tensor) is not tensor:
            return True
    return False


def _refused(
    entry: Any, sample: Sample, way: Way, meshes: Meshes, kind: type[BaseException]
) -> tuple[str, str]:
    placements = iter(way.placements)
    made: dict[int, Any] = {}

    def place(tensor: torch.Tensor) -> Any:
        placement = next(placements)
        if id(tensor) not in made:
            made[id(tensor)] = laid_out(tensor, meshes[way.mesh], placement)
        return made[id(tensor)]

    args, kwargs, _ = placed(sample, place)
    try:
        entry(*args, **kwargs)
    except kind:
        return "ok", ""
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", _brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__} instead of {kind.__name__}: {_brief(error)}"
    return "wrong", f"accepted, where one device raises {kind.__name__}"


def tally(results: Sequence[OpResult], kind: str) -> Counter[str]:
    """How many operators have each outcome, those without a case left out."""
    return Counter(filter(None, (r.worst(kind) for r in results)))
