"""One operator on one device and in a simulated world, and where they differ.

Compiled code is compared with eager code and has two more outcomes: `torch`, where torch does not
compile the op with plain tensors on one device either, and `eager`, where eager code does not run.
`error` and `raises` then mean that compiled code lacks an op that eager code has.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise._torch.dynamo import reset
from shardwise._torch.functions import tree_map
from shardwise.errors import MixedTensorsError, UnsupportedError
from shardwise.simulation.world import simulate
from shardwise.testing.compare import (
    OpCall,
    brief,
    compare,
    copied,
    full_name,
    gradients,
    outcome_of,
    placed,
)
from shardwise.testing.layouts import OperandLayouts, laid_out
from tests.op_sweep.cases import Cases, VariantsAlone
from tests.op_sweep.report import KINDS, OpResult
from tests.op_sweep.table import error_samples, own_seed, samples
from tests.op_sweep.ways import ONE_AXIS, RANKS, further_ways, middles, ways


def play_operator(
    entry: Any,
    num_samples: int,
    num_ways: int,
    kinds: Sequence[str] = KINDS,
    num_doors: int = 1,
) -> OpResult:
    """The cases of one entry of torch's table, of the given kinds.

    `num_doors` is how many further meshes a sample is laid out on, and how many reads and writes
    each case tries.
    """
    result = OpResult(full_name(entry))
    started = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples(entry, num_samples)):
            _play_sample(entry, sample, number, num_ways, kinds, result, num_doors)
        if "refused" in kinds:
            play_errors(entry, result)
    result.seconds = round(time.monotonic() - started, 2)
    return result


def _play_sample(
    entry: Any,
    sample: OpCall,
    number: int,
    num_ways: int,
    kinds: Sequence[str],
    result: OpResult,
    num_doors: int,
) -> None:
    try:
        alone = VariantsAlone(entry, sample)
    except Exception:
        return  # one device does not run it either
    result.random = result.random or alone.random
    chosen = ways(sample.tensors, num_ways)
    chosen += further_ways(sample.tensors, num_doors, f"{full_name(entry)} {number}")
    for way_number, way, mesh in each_way(list(dict.fromkeys(chosen))):
        where = f"sample {number} {sample} on {way}"
        for kind, case in Cases(alone, way, mesh, way_number, num_doors=num_doors).each():
            if kind not in kinds:
                continue
            outcome, note = outcome_of(case)
            result.add(kind, outcome, f"{where}: {note}")
            if kind == "forward" and outcome != "ok":
                break


def each_way(chosen: Sequence[OperandLayouts]) -> Iterator[tuple[int, OperandLayouts, DeviceMesh]]:
    """The layouts, numbered, each with its mesh; between yields a simulated world is entered."""
    numbered = sorted(enumerate(chosen), key=lambda pair: math.prod(pair[1].mesh))
    for ranks, some in itertools.groupby(numbered, lambda pair: math.prod(pair[1].mesh)):
        with simulate(ranks):
            meshes: dict[tuple[int, ...], DeviceMesh] = {}
            for number, way in some:
                if way.mesh not in meshes:
                    meshes[way.mesh] = init_device_mesh("cpu", way.mesh)
                yield number, way, meshes[way.mesh]


def play_errors(entry: Any, result: OpResult) -> None:
    """Play the calls that torch's table says are refused."""
    try:
        refused = list(error_samples(entry))
    except Exception:
        return  # the table itself fails to make them
    for sample, kind in refused:
        if overlap(sample.tensors):
            continue  # DTensors of them would not overlap
        with simulate(RANKS):
            mesh = init_device_mesh("cpu", ONE_AXIS)
            for way in [w for w in ways(sample.tensors, 100) if w.mesh == ONE_AXIS][:2]:
                outcome, note = _refused(entry, sample, way, mesh, kind)
                result.add("refused", outcome, f"{sample} on {way}: {note}")


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
    entry: Any, sample: OpCall, way: OperandLayouts, mesh: DeviceMesh, kind: type[BaseException]
) -> tuple[str, str]:
    placements = iter(way.placements)
    made: dict[int, Any] = {}

    def place(tensor: torch.Tensor) -> Any:
        placement = next(placements)
        if id(tensor) not in made:
            made[id(tensor)] = laid_out(tensor, mesh, placement)
        return made[id(tensor)]

    args, kwargs, _ = placed(sample, place)
    try:
        entry(*args, **kwargs)
    except kind:
        return "ok", ""
    except (UnsupportedError, MixedTensorsError) as error:
        return "raises", brief(error)
    except Exception as error:
        return "error", f"{type(error).__name__} instead of {kind.__name__}: {brief(error)}"
    return "wrong", f"accepted, where one device raises {kind.__name__}"


# -- compiled code ---------------------------------------------------------------------------

#: Outcomes that may be torch's: its compiler may refuse the op with plain tensors too.
_FAILED = ("error", "raises")


@dataclass(frozen=True)
class Compiler:
    """How the sweep compiles: as one graph, with static or dynamic sizes."""

    backend: str
    dynamic: bool

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        # Each case starts anew: no recompilation limit, no cached graph of an earlier case.
        reset()

        def region(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        compiled: Callable[..., Any] = torch.compile(
            region, backend=self.backend, fullgraph=True, dynamic=self.dynamic
        )
        return compiled


def play_compiled(
    entry: Any, num_samples: int, num_ways: int, kinds: Sequence[str], compiler: Compiler
) -> OpResult:
    """The cases of one entry of torch's table, compiled."""
    result = OpResult(full_name(entry))
    started = time.monotonic()
    with _quiet(), own_seed():
        for number, sample in enumerate(samples(entry, num_samples, middles)):
            try:
                alone = VariantsAlone(entry, sample)
            except Exception:
                continue  # one device does not run it either
            result.random = result.random or alone.random
            played = _Sample(alone, compiler)
            for way_number, way, mesh in each_way(ways(sample.tensors, num_ways, middles)):
                for kind, outcome, note in played.on(way, mesh, way_number, kinds):
                    result.add(kind, outcome, f"sample {number} {sample} on {way}: {note}")
    result.seconds = round(time.monotonic() - started, 2)
    return result


class _Sample:
    """A sample whose cases run eager and compiled; whether torch compiles it is found once."""

    def __init__(self, alone: VariantsAlone, compiler: Compiler) -> None:
        self._alone, self._compiler = alone, compiler
        #: kind -> why torch does not compile it with plain tensors, empty where it does
        self._refused: dict[str, str] = {}

    def on(
        self, way: OperandLayouts, mesh: DeviceMesh, number: int, kinds: Sequence[str]
    ) -> Iterator[tuple[str, str, str]]:
        """The kind, the outcome and a note, of each case."""
        eager = Cases(self._alone, way, mesh, number)
        runs = []
        for kind, case in eager.each():
            if kind in kinds:
                outcome, note = outcome_of(case)
                if outcome == "ok":
                    runs.append(kind)
                else:
                    yield kind, "eager", note
                if "forward" not in runs:
                    return
        # With gradients, the first call compiles backward too.
        alone = self._alone if "backward" in runs else self._alone.without_gradients()
        compiled = Cases(alone, way, mesh, number, self._compiler)
        forward = _outcome("forward", compiled, eager)
        if forward[0] in _FAILED and "backward" in runs:
            runs.remove("backward")
            yield "backward", *self._judged("backward", *forward)
            alone = self._alone.without_gradients()
            compiled = Cases(alone, way, mesh, number, self._compiler)
            forward = _outcome("forward", compiled, eager)
        yield "forward", *self._judged("forward", *forward)
        if forward[0] == "ok":
            for kind in runs[1:]:
                yield kind, *self._judged(kind, *_outcome(kind, compiled, eager))

    def _judged(self, kind: str, outcome: str, note: str) -> tuple[str, str]:
        if outcome in _FAILED:
            if kind not in self._refused:
                self._refused[kind] = self._refused_by_torch(kind)
            if self._refused[kind]:
                return "torch", self._refused[kind]
        return outcome, note

    def _refused_by_torch(self, kind: str) -> str:
        """Why torch does not compile this kind of case on one device, empty where it does."""
        alone, wants_grad = self._alone, kind == "backward"
        sample = (alone if wants_grad else alone.without_gradients()).sample
        args, kwargs, leaves = placed(sample, copied)
        if kind == "out":
            kwargs |= {"out": tree_map(torch.zeros_like, alone.whole)}
        op = alone.entry.get_inplace() if kind == "inplace" else alone.entry.op
        try:
            with torch.set_grad_enabled(wants_grad):
                result = self._compiler(op)(*args, **kwargs)
                if wants_grad:
                    gradients(sample.differentiable(result), leaves, lambda grad, _: grad)
        except Exception as error:
            return f"{type(error).__name__}: {brief(error)}"
        return ""


def _outcome(kind: str, compiled: Cases, eager: Cases) -> tuple[str, str]:
    def in_double() -> tuple[list[Any], list[Any]]:
        return compiled.in_double(kind), eager.in_double(kind)

    def case() -> None:
        dict(compiled.each())[kind]()
        written = kind in ("inplace", "out")
        compare(compiled.found[kind], eager.found[kind], None if written else in_double)

    return outcome_of(case)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the compiler: the outcome has what it says."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
