"""Parity: whether a sharded model computes what one device does, tensor by tensor.

Note [What is compared]
The batch is split into as many parts as there are data-parallel ranks. One device computes the mean
of the parts' losses; each rank of the sharded model computes its own, as in training. The
comparison covers the outputs on each rank, the gradients, the parameters after a step of SGD, and
the next random numbers. `testing.compare.SMALLEST` says what differences are relative to. Training
steps come from `testing.training`: three on the sample batch, in double precision, with each option
that applies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise._torch.functions import tree_map
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import ArgumentError
from shardwise.launch import launch
from shardwise.report.case import CONTEXT_AXIS, Case
from shardwise.simulation.ranks import agreed
from shardwise.simulation.world import simulate
from shardwise.testing.compare import Difference, Values, differences
from shardwise.testing.layouts import Mesh
from shardwise.testing.loop import (
    OPTIONS,
    agree,
    call,
    collections_in,
    loss_of,
    per_rank,
    sparse_parameters,
    split_batch,
    tensors_of,
    updates_together,
)
from shardwise.testing.training import (
    AUTOCAST_BOUND,
    NOT_ALONE,
    NUM_STEPS,
    Steps,
    Training,
    judge_in_processes,
    judge_simulated,
    on_ranks,
)

RATE = 0.1
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Parity:
    """A comparison with one device."""

    mesh: Mesh
    differences: tuple[Difference, ...]
    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        return not self.differing

    @property
    def differing(self) -> list[Difference]:
        return [d for d in self.differences if not d.within(self.tolerance)]


@dataclass(frozen=True)
class StepResult:
    """The tensors of a step by kind and name."""

    outputs: Values
    gradients: Values
    parameters: Values
    random: Values


def check_simulated(case: Case, mesh: Mesh, tolerance: float = TOLERANCE) -> Parity:
    """Compare in one process that plays all ranks."""
    with simulate(mesh.num_ranks):
        outcome, parts = play_sharded(case, mesh)
    return _compare(case, mesh, outcome, parts, tolerance)


def check_in_processes(case: Case, mesh: Mesh, tolerance: float = TOLERANCE) -> Parity:
    """Compare in processes that talk through gloo."""
    answers = launch(play_sharded, mesh.num_ranks, case, mesh)
    outcome, parts = answers[0]
    for other, _ in answers[1:]:
        outcome.outputs.update(other.outputs)
    parity = _compare(case, mesh, outcome, parts, tolerance)
    for rank, (other, _) in enumerate(answers[1:], 1):
        apart = [
            dataclasses.replace(each, name=f"{each.name} on rank {rank}")
            for what in ("gradients", "parameters")
            for each in differences(what, getattr(outcome, what), getattr(other, what))
            if not each.within(tolerance)
        ]
        parity = dataclasses.replace(parity, differences=(*parity.differences, *apart))
    return parity


def _compare(
    case: Case, mesh: Mesh, many: StepResult, parts: tuple[int, ...], tolerance: float
) -> Parity:
    one = play_alone(case, parts)
    if case.context:
        _keep_own_positions(mesh, one.outputs, many.outputs)
    found: list[Difference] = []
    for what in ("outputs", "gradients", "parameters", "random"):
        found += differences(what, getattr(one, what), getattr(many, what))
    return Parity(mesh, tuple(found), tolerance)


def _keep_own_positions(mesh: Mesh, one: Values, many: Values) -> None:
    """If ranks hold positions of a sequence, cut one device's outputs to theirs."""
    for rank in range(mesh.num_ranks):
        number = mesh.part_of(rank, (CONTEXT_AXIS,))
        for name in [n for n in one if n == _label(rank) or n.startswith(f"{_label(rank)},")]:
            full, part = one[name], many.get(name, one[name])
            dims = [d for d, size in enumerate(part.shape) if full.shape[d : d + 1] != (size,)]
            if full.dim() == part.dim() and len(dims) == 1:
                chunks = full.chunk(mesh.num_parts((CONTEXT_AXIS,)), dims[0])
                one[name] = chunks[number] if number < len(chunks) else full


# -- both sides ------------------------------------------------------------------------------


def play_alone(case: Case, parts: tuple[int, ...]) -> StepResult:
    """One step on one device; `parts` has the number of each rank's part of the batch."""
    module, batch = case.build()
    torch.manual_seed(case.seed)
    outputs: Values = {}
    losses = []
    for index, part in enumerate(split_batch(batch, 1 + max(parts))):
        output = call(module, part)
        for rank in (rank for rank, number in enumerate(parts) if number == index):
            outputs |= _named(output, rank)
        losses.append(loss_of(output))
    total = torch.stack(losses).mean()
    with updates_together(module):
        total.backward()
    return _finish(module, outputs)


def play_sharded(case: Case, mesh: Mesh) -> tuple[StepResult, tuple[int, ...]]:
    """One step in the current world, and the number of each rank's part of the batch."""
    module, batch = case.build()
    _check_values(case, module)
    sharded = case.shard(module, mesh.make())
    parts = split_batch(batch, sharded.num_parts)
    torch.manual_seed(case.seed)
    output = call(sharded.module, per_rank(parts, sharded.part_of))
    outputs: Values = {}
    world = current_world()
    each = [on_ranks(leaf, world.present) for leaf in tensors_of(output)]
    for place, rank in enumerate(world.present):
        outputs |= _named([values[place] for values in each], rank)
    loss_of(output).backward()
    numbers = tuple(sharded.part_of(rank) for rank in range(world.size))
    return _finish(sharded.module, outputs), numbers


def _check_values(case: Case, module: nn.Module) -> None:
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ArgumentError(
            f"The module of {case.target} is on the meta device, and there are no values to "
            "compare: make it on the CPU. (explain takes it as it is.)"
        )


def _finish(module: nn.Module, outputs: Values) -> StepResult:
    gradients = {name: whole(p.grad) for name, p in module.named_parameters() if p.grad is not None}
    torch.optim.SGD(
        [p for p in module.parameters() if p.grad is not None] or [_NOTHING], RATE
    ).step()
    parameters = {name: whole(p) for name, p in module.named_parameters()}
    return StepResult(outputs, gradients, parameters, {"the next draws": torch.rand(4)})


_NOTHING = torch.zeros(1, requires_grad=True)


# -- plain tensors ---------------------------------------------------------------------------


def _label(rank: int) -> str:
    return f"on rank {rank}"


def _named(output: Any, rank: int) -> Values:
    leaves = tensors_of(output)
    label = _label(rank)
    return {
        f"{label}, tensor {number}" if len(leaves) > 1 else label: leaf.detach()
        for number, leaf in enumerate(leaves)
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain, dense tensor that a parameter or a gradient stands for."""
    value = agreed(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)
    return (value.to_dense() if value.is_sparse else value).detach().clone()


# -- training steps --------------------------------------------------------------------------


#: Options that need a model made for them.
OF_OWN_MODELS = ("unused", "sometimes", "penalty", "added")
#: Options for gradients that are not taken by an update in backward.
NOT_UPDATING = ("no_sync", "zeros", "scale", "losses", "pair", "sum", "inputs")
#: Options for any model.
APPLY = tuple(option for option in OPTIONS if option not in OF_OWN_MODELS)
#: The default: bfloat16 can only be compared roughly, and a model of an interactive session cannot
#: be pickled.
DEFAULT = tuple(option for option in APPLY if option not in ("autocast", "pickle"))


@dataclass(frozen=True)
class Subject:
    """A model, a mesh and the options of one run."""

    case: Case
    mesh: Mesh
    options: frozenset[str]
    optimizer: str
    tolerance: float


@dataclass(frozen=True)
class TrainingParity:
    """One run compared with one device: `kind` is "ok", "refused" or "wrong"."""

    options: tuple[str, ...]
    kind: str
    text: str
    compared: tuple[Difference, ...]

    @property
    def worst(self) -> Difference | None:
        """The largest relative difference."""
        figures = [each for each in self.compared if each.scale]
        return max(figures, key=lambda each: each.largest / each.scale, default=None)


def check_training(
    case: Case,
    mesh: Mesh,
    options: Sequence[str] = (),
    *,
    optimizer: str = "momentum",
    tolerance: float = TOLERANCE,
    processes: bool = False,
) -> list[TrainingParity]:
    """Train with all given options together; without any, plainly and with each that applies.

    `optimizer` is a key of `testing.loop.OPTIMIZERS`. Where a gradient is sparse, "sgd" stands in
    for "momentum": torch adds no weight decay to such a gradient.
    """
    chosen = frozenset(options)
    if not chosen <= set(APPLY) or not agree(chosen):
        raise ArgumentError(
            f"Options of training steps are {', '.join(APPLY)}; found {', '.join(options)}"
            f"{', which exclude each other' if chosen <= set(APPLY) else ''}."
        )
    module, batch = case.build()
    _check_values(case, module)
    if optimizer == "momentum" and sparse_parameters(module):
        optimizer = "sgd"
    runs = [chosen] if chosen else [frozenset[str](), *_applying(case, module, batch, mesh)]
    subjects = [Subject(case, mesh, run, optimizer, tolerance) for run in runs]
    judge = judge_in_processes if processes else judge_simulated
    judgements = judge(training_of, subjects, mesh.num_ranks)
    return [
        TrainingParity(tuple(sorted(run)), each.kind, each.text, each.compared)
        for run, each in zip(runs, judgements, strict=True)
        # An option that was not asked for, and that one device refuses too, says nothing about
        # ranks.
        if chosen or not run or not each.text.startswith(NOT_ALONE)
    ]


def _applying(case: Case, module: nn.Module, batch: Any, mesh: Mesh) -> list[frozenset[str]]:
    """The options that apply to this model, each by itself."""
    updating = any(each.optimizer is not None for each in collections_in(module).values())
    left_out = set(NOT_UPDATING) if updating else set()
    if sparse_parameters(module):
        left_out |= {"clip", "clamp", "zeros"}
    if _updates_buffers(module, batch):
        left_out |= {"save", "reload"}  # ranks have different ones: no common value
    if not case.data_axes(mesh):
        left_out.add("no_sync")
    return [frozenset([option]) for option in DEFAULT if option not in left_out]


def _updates_buffers(module: nn.Module, batch: Any) -> bool:
    """Whether forward changes a buffer, as batch norm does; it runs once."""
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        call(module, batch)
    return any(not torch.equal(before[name], now) for name, now in module.named_buffers())


def training_of(subject: Subject) -> Training:
    case, mesh, options = subject.case, subject.mesh, subject.options
    return Training(
        mesh,
        case.data_axes(mesh),
        options,
        subject.optimizer,
        functools.partial(_build, case, options),
        functools.partial(_shard, case),
        recompute="recompute" in options,
        by_parts=True,
        bound=max(subject.tolerance, AUTOCAST_BOUND if "autocast" in options else 0.0),
    )


def _build(case: Case, options: frozenset[str]) -> tuple[nn.Module, Steps]:
    module, batch = case.build()
    if "autocast" not in options:
        module, batch = module.double(), tree_map(_doubled, batch)
    num_batches = 2 if options & {"accumulate", "no_sync"} else 1
    return module, [[batch] * num_batches for _ in range(NUM_STEPS)]


def _doubled(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if is_number else value


def _shard(case: Case, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return case.shard(module, mesh).module
