"""One operator in compiled code: where eager code runs, the compiled code gives its numbers.

A case ends as in the sweep of eager code, or with one of two outcomes more: `torch`, where torch
does not compile the op with plain tensors on one device either, and `eager`, where eager code does
not run. `error` and `raises` then mean that compiling costs an op that eager code has.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.dynamo import reset
from shardwise._torch.pytree import tree_map
from shardwise.testing.op_sweep.alone import Alone, copied, gradients, placed
from shardwise.testing.op_sweep.cases import Cases
from shardwise.testing.op_sweep.compare import OpResult, brief, compare
from shardwise.testing.op_sweep.play import each_way, outcome_of
from shardwise.testing.op_sweep.table import full_name, own_seed, samples
from shardwise.testing.op_sweep.ways import OperandLayouts, middles, ways

#: What the compiler may have refused, the op itself or what this package made of it.
_FAILED = ("error", "raises")


@dataclass(frozen=True)
class Compiler:
    """How the sweep compiles: as one graph, with sizes that are numbers or symbols."""

    backend: str
    dynamic: bool

    def __call__(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        # Each case starts anew: no limit on recompilations, and nothing found of an earlier one.
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
                alone = Alone(entry, sample)
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
    """A sample whose cases run both ways; what torch compiles of it is found out once."""

    def __init__(self, alone: Alone, compiler: Compiler) -> None:
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
        # Where a gradient is wanted, the first call compiles backward too.
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
    """What the compiler says of an op that it does not take is in the outcome."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
