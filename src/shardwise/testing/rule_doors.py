"""The choices of a rule as a program meets them: DTensors in, doors out, and gradients back.

`check_rule` plays the local calls themselves. Here the op is called on DTensors that lie as choices
of the rule want them, on one to three mesh axes in any order; what comes out is read through doors
with its gradient, written to, and compared with one device, the generator's state included.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from shardwise._torch.schema import OpOverload
from shardwise.core.layout import partials_commute
from shardwise.core.placements import REPLICATE, Placement, Shard
from shardwise.dispatch.rule import Rule
from shardwise.simulation.world import simulate
from shardwise.testing.op_sweep import alone as op_sweep_alone
from shardwise.testing.op_sweep.cases import Cases
from shardwise.testing.op_sweep.play import outcome_of
from shardwise.testing.op_sweep.table import OpCall
from shardwise.testing.op_sweep.ways import OperandLayouts, lots_of
from shardwise.testing.played import Played, grid_of_shape
from shardwise.testing.sample import Sample, SampleAlone, rule_for

#: A mesh of each number of axes; axes of two, so that choices of one axis serve on any.
DOOR_MESHES: tuple[tuple[int, ...], ...] = ((2,), (2, 2), (2, 2, 2))


def check_doors(
    sample: Sample,
    rule: Rule | None = None,
    num: int = 1,
    meshes: Sequence[tuple[int, ...]] = DOOR_MESHES,
) -> list[str]:
    """What goes wrong with `num` draws of choices, readings and writes on each mesh, in words.

    An op that a program does not call on tensors (a function of a rule file, a form that writes)
    is not played.

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
            lots = lots_of(f"{sample.op} {expected.sample} {shape}")
            with simulate(math.prod(shape)):
                mesh = init_device_mesh("cpu", shape)
                for number in range(num):
                    way = _drawn(shape, placements, lots)
                    for kind, play in Cases(expected, way, mesh, number, num_doors=1).each():
                        outcome, note = outcome_of(play)
                        if outcome in ("wrong", "error"):
                            mistakes.append(f"{kind} on {way}: {note}")
                        if kind == "forward" and outcome != "ok":
                            break
    return mistakes


@dataclass(frozen=True)
class _Entry:
    """An op as the sweep knows those of torch's table."""

    op: OpOverload
    variant_test_name: str = ""
    supports_autograd: bool = True
    supports_out: bool = False

    @property
    def name(self) -> str:
        return str(self.op)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def get_inplace(self) -> None:
        return None


def _on_one_device(sample: Sample) -> op_sweep_alone.Alone:
    """The call with gradients of as many operands as the op takes."""
    tensors = SampleAlone(sample).tensors
    every = tuple(t.is_floating_point() or t.is_complex() for t in tensors)
    first = (every[0], *[False] * (len(every) - 1)) if every else ()
    for wants_grad in (every, first):
        with contextlib.suppress(RuntimeError):  # not differentiable with respect to one of them
            return _alone(sample, wants_grad)
    return _alone(sample, (False,) * len(every))


def _alone(sample: Sample, wants_grad: tuple[bool, ...]) -> op_sweep_alone.Alone:
    case = OpCall(sample.args, dict(sample.kwargs), wants_grad, lambda result: result)
    return op_sweep_alone.Alone(_Entry(sample.op), case)


def _choices(sample: Sample, rule: Rule) -> list[tuple[Placement, ...]]:
    """The placements of the operands along one axis of two, for each choice of the rule."""
    with simulate(2):
        played = Played(SampleAlone(sample), grid_of_shape((2,)))
        return list(
            dict.fromkeys(tuple(lo.placements[0] for lo in p.inputs) for p in played.plans(rule))
        )


def _drawn(
    shape: tuple[int, ...], choices: Sequence[tuple[Placement, ...]], lots: Random
) -> OperandLayouts:
    """A choice for each axis; where they do not go together, the operand is whole there."""
    num_axes = len(shape)
    along = [lots.choice(choices) for _ in shape]
    operands = tuple(_together(placements) for placements in zip(*along, strict=True))
    order = tuple(lots.sample(range(num_axes), num_axes))
    return OperandLayouts(shape, operands, None if order == tuple(range(num_axes)) else order)


def _together(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    found: list[Placement] = []
    for placement in placements:
        if isinstance(placement, Shard) and len(placements) > 1:
            placement = Shard(placement.dim)  # sizes that are named do not nest
        found.append(placement if partials_commute([*found, placement]) else REPLICATE)
    return tuple(found)
