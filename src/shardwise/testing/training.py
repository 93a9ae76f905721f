"""A training run on one device and on the ranks of the current world, and its verdict.

Note [What one device does]
It trains on the whole batch. With `by_parts` it trains on the mean of the losses of the ranks'
batches, each with its own buffers, and a rank's buffers are compared with those of its batch. That
serves batch norm, whose statistics are those of a rank's own batch, as with torch's DDP, and losses
that may not be a mean over examples.

The change of each parameter since the start is compared, so a step that is too short shows even if
the parameter is large.
"""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.checkpoint import set_checkpoint_early_stop

from shardwise import checkpoint
from shardwise.core.world import current_world
from shardwise.dtensor.tensor import DTensor
from shardwise.errors import (
    CollectiveError,
    LaunchError,
    RankMismatchError,
    ShardwiseError,
    WorldError,
)
from shardwise.launch import launch
from shardwise.simulation.ranks import on_every_rank, on_rank
from shardwise.simulation.world import simulate
from shardwise.testing.compare import Difference, Values, brief, differences
from shardwise.testing.layouts import Mesh
from shardwise.testing.loop import (
    Loss,
    StepRun,
    collections_in,
    freeze,
    per_rank,
    plain_loss,
    split_batch,
    updates_together,
)

NUM_STEPS = 3

#: Errors that say that something went wrong; other errors of shardwise are refusals.
FAULTS = (RankMismatchError, CollectiveError, LaunchError, WorldError)
#: The error allowed, relative to the change of a parameter: in double precision, and under autocast
#: on top of what bfloat16 changes on one device.
BOUND = 1e-8
AUTOCAST_BOUND = 0.05

#: The start of a refusal of what one device does not do either.
NOT_ALONE = "one device does not train like this (in double precision, but for autocast)"

Steps = list[list[Any]]


@dataclass(frozen=True)
class Training:
    """What is trained and how.

    `build` makes the module and the batches of each step, the same each time; `shard` shards the
    module. A batch is split along `data_axes`, unless `lay_out` makes one DTensor of it.
    """

    mesh: Mesh
    data_axes: tuple[str, ...]
    options: frozenset[str]
    optimizer: str
    build: Callable[[], tuple[nn.Module, Steps]]
    shard: Callable[[nn.Module, DeviceMesh], nn.Module]
    lay_out: Callable[[Any, DeviceMesh], Any] | None = None
    #: Whether backward computes all of forward again.
    recompute: bool = False
    by_parts: bool = False
    bound: float = BOUND

    @property
    def num_parts(self) -> int:
        return self.mesh.num_parts(self.data_axes)

    def part_of(self, rank: int) -> int:
        return self.mesh.part_of(rank, self.data_axes)

    def loss(self, loss: Loss = plain_loss) -> Loss:
        """The loss as it is trained."""
        return functools.partial(_recomputed, loss) if self.recompute else loss

    def begin(self) -> tuple[nn.Module, Steps, list[str]]:
        """The plain module, the batches, and which parameters are frozen for a time."""
        module, steps = self.build()
        late = late_parameters(module)
        if "late" in self.options:
            freeze(module, late, frozen=True)
        return module, steps, late


@dataclass
class TrainingOutcome:
    """The final state of a rank, or the text of a refusal or a failure."""

    parameters: Values = field(default_factory=dict)
    buffers: Values = field(default_factory=dict)
    #: Parameters of the module that was copied.
    left: Values = field(default_factory=dict)
    refused: str = ""
    failed: str = ""


def _recomputed(loss: Loss, module: nn.Module, batch: Any) -> torch.Tensor:
    # To the end, so that buffers change twice wherever forward changes them.
    with set_checkpoint_early_stop(False):
        return checkpointed(loss, module, batch, use_reentrant=False)


def late_parameters(module: nn.Module) -> list[str]:
    """Every second trained parameter; those of tables may have no gradient."""
    of_tables = {id(p) for each in collections_in(module).values() for p in each.parameters()}
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and id(parameter) not in of_tables
    ][::2]


# -- one device ------------------------------------------------------------------------------


class LossOfParts:
    """The mean of the losses of a batch's parts, each with its own buffers."""

    def __init__(self, loss: Loss, module: nn.Module, num_parts: int) -> None:
        self.loss = loss
        self.buffers = [
            {name: buffer.clone() for name, buffer in module.named_buffers()}
            for _ in range(num_parts)
        ]

    def __call__(self, module: nn.Module, batch: Any) -> torch.Tensor:
        losses = []
        parts = split_batch(batch, len(self.buffers))
        for part, buffers in zip(parts, self.buffers, strict=True):
            for name, buffer in buffers.items():
                path, _, key = name.rpartition(".")
                module.get_submodule(path)._buffers[key] = buffer
            losses.append(self.loss(module, part))
            for name in buffers:  # forward may put another tensor in its place
                buffers[name] = module.get_buffer(name)
        return torch.stack(losses).mean()


def play_alone(training: Training) -> list[TrainingOutcome]:
    """Train on one device; returns the final state that each rank should have."""
    module, steps, late = training.begin()
    first = _copies(_parameters(module))
    parts = LossOfParts(plain_loss, module, training.num_parts) if training.by_parts else None
    loss = training.loss(parts or plain_loss)
    run = StepRun(module, training.options, training.optimizer, late, loss)
    run.around_backward = updates_together
    for batches in steps:
        run.step(batches)
    (outcome,) = _outcomes(run, first, ranks=(0,))
    ranks = range(training.mesh.num_ranks)
    if parts is None:
        return [outcome for _ in ranks]
    return [
        TrainingOutcome(outcome.parameters, parts.buffers[training.part_of(rank)], outcome.left)
        for rank in ranks
    ]


# -- many ranks ------------------------------------------------------------------------------


def play(training: Training, folder: Path) -> list[TrainingOutcome]:
    """Train on ranks; returns the final state of the ranks in this process."""
    run: StepRun | None = None
    try:
        module, steps, late = training.begin()
        first = _copies(_parameters(module))
        mesh = training.mesh.make()
        if training.by_parts:
            _give_each_rank_its_own(module)
        sharded = training.shard(module, mesh)
        run = StepRun(sharded, training.options, training.optimizer, late, training.loss())
        for batches in steps:
            run.step([_laid_out(training, batch, mesh) for batch in batches])
        if "save" in training.options:
            checkpoint.save({"model": run.module}, folder / "saved")
        return _outcomes(run, first, current_world().present)
    except Exception as error:
        begun = run is not None and run.has_stepped
        refused = isinstance(error, ShardwiseError) and not isinstance(error, FAULTS) and not begun
        text = f"{type(error).__name__}: {error}"
        if refused:
            return [TrainingOutcome(refused=text)] * _num_present()
        return [TrainingOutcome(failed=f"{text}\n{_own_lines(error)}")] * _num_present()


def _laid_out(training: Training, batch: Any, mesh: DeviceMesh) -> Any:
    if training.lay_out is not None:
        return training.lay_out(batch, mesh)
    return per_rank(split_batch(batch, training.num_parts), training.part_of)


def _num_present() -> int:
    return len(current_world().present)


def _own_lines(error: Exception) -> str:
    """Where it was raised: the last frames of this package, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).parents[1]
    own = [f for f in frames if package in Path(f.filename).parents]
    shown = [*own[-3:], *frames[-1:]]
    return "\n".join(f"  {Path(f.filename).name}:{f.lineno} {f.line}" for f in shown)


def _give_each_rank_its_own(module: nn.Module) -> None:
    """Give each simulated rank its own buffers, since ranks update them differently."""
    for owner in module.modules():
        for key, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[key] = on_every_rank(_cloned(buffer))


def _cloned(tensor: torch.Tensor) -> Callable[[int], torch.Tensor]:
    return lambda _: tensor.clone()


# -- values ----------------------------------------------------------------------------------


def _outcomes(run: StepRun, first: Values, ranks: Sequence[int]) -> list[TrainingOutcome]:
    """The final state of each rank."""
    parameters = [_changes(values, first) for values in _held(_parameters(run.module), ranks)]
    buffers = _held(dict(run.module.named_buffers()), ranks)
    made = [TrainingOutcome(*each) for each in zip(parameters, buffers, strict=True)]
    if run.left is not None:
        for outcome, values in zip(made, _held(_parameters(run.left), ranks), strict=True):
            outcome.left = _changes(values, first)
    return made


def _parameters(module: nn.Module) -> Values:
    """All parameters, under each of their names, so that a lost tie shows."""
    return dict(module.named_parameters(remove_duplicate=False))


def _copies(values: Values) -> Values:
    return {name: value.detach().clone() for name, value in values.items()}


def _changes(values: Values, first: Values) -> Values:
    return {name: value - first.get(name, 0) for name, value in values.items()}


def _held(tensors: Values, ranks: Sequence[int]) -> list[Values]:
    """The whole values on each rank."""
    found = {name: on_ranks(tensor, ranks) for name, tensor in tensors.items()}
    return [{name: each[place] for name, each in found.items()} for place in range(len(ranks))]


def on_ranks(tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
    """The whole value on each rank; a plain tensor is the same on all."""
    value = tensor.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return [on_rank(value, rank).clone() for rank in ranks]


# -- verdict -------------------------------------------------------------------------------------
# Verdicts: a training run is right, refused or wrong.
#
# Runs happen in a simulated world, or in processes that talk through gloo. One world plays many.
# A run that fails in processes may leave ranks waiting for each other: the processes are ended, and
# the next runs get new ones. What is played is anything that pickles, with a function that makes a
# training run of it.


@dataclass(frozen=True)
class Judgement:
    """`kind` is "ok", "refused" or "wrong"; `text` says why, and `compared` what was compared."""

    kind: str
    text: str = ""
    compared: tuple[Difference, ...] = ()


def judge(training: Training, outcomes: list[TrainingOutcome], folder: Path) -> Judgement:
    """Compare the outcomes of all ranks, and what they saved in the folder, with one device."""
    failed = any(outcome.failed for outcome in outcomes)
    if not failed and any(outcome.refused for outcome in outcomes):
        text = _first(outcomes, "refused")
        if not _agree(outcome.refused for outcome in outcomes):
            return Judgement("wrong", f"refused on some ranks, or for other reasons: {text}")
        return Judgement("refused", text)
    try:
        alone = play_alone(training)
    except Exception as error:
        return Judgement("refused", f"{NOT_ALONE}: {type(error).__name__}: {brief(error)}")
    if failed:
        return Judgement("wrong", _first(outcomes, "failed"))
    found = [
        (f"on rank {rank}: ", each)
        for rank, (one, many) in enumerate(zip(alone, outcomes, strict=True))
        for what in ("parameters", "buffers", "left")
        for each in differences(what, getattr(one, what), getattr(many, what))
    ]
    if "save" in training.options:
        try:
            found += [("", each) for each in _loaded(training, outcomes[0].parameters, folder)]
        except Exception as error:
            return Judgement("wrong", f"loading by one device: {type(error).__name__}: {error}")
    if "autocast" in training.options:
        rounding = _rounding(training, alone[0])
        every = [each for _, each in found]
        found = [(where, _roughly(each, every, rounding)) for where, each in found]
    faults = [f"{where}{_said(each)}" for where, each in found if not each.within(training.bound)]
    compared = tuple(each for _, each in found)
    return Judgement("wrong" if faults else "ok", "; ".join(faults[:4]), compared)


def _agree(refusals: Iterable[str]) -> bool:
    """Whether all ranks refuse for one reason; each names the ranks of its own part of a mesh."""
    return len({re.sub(r"\[[\d, ]+\]", "[...]", text) for text in refusals}) == 1


def _rounding(training: Training, alone: TrainingOutcome) -> dict[str, float]:
    """By parameter: three times what bfloat16 changes on one device."""
    exact = play_alone(replace(training, options=training.options - {"autocast"}))[0]
    return {
        each.name: 3 * each.largest
        for each in differences("parameters", exact.parameters, alone.parameters)
    }


def _roughly(
    each: Difference, found: Sequence[Difference], rounding: Mapping[str, float]
) -> Difference:
    """The difference without the rounding, relative to at least a tenth of the largest: terms of a
    sum in bfloat16 may be much larger than the sum."""
    largest = max(other.scale for other in found if other.what == each.what)
    gap = max(0.0, each.largest - rounding.get(each.name, 0.0))
    return replace(each, largest=gap, scale=max(each.scale, largest / 10))


def _first(outcomes: list[TrainingOutcome], what: str) -> str:
    texts = [getattr(o, what) for o in outcomes if getattr(o, what)]
    # A rank that fails closes its connections, so others fail too; its own error is the cause.
    return next((text for text in texts if "gloo/transport" not in text), texts[0])


def _said(each: Difference) -> str:
    if each.remark:
        return f"{each.what} {each.name} {each.remark}"
    return f"{each.what} {each.name} off by {100 * each.largest / (each.scale or 1):.2g}%"


def _loaded(training: Training, expected: Values, folder: Path) -> Iterator[Difference]:
    """Load on one device what all ranks saved: compare the parameters and the loss."""
    module, steps, _ = training.begin()
    module.eval()
    parameters = _parameters(module)
    first = _copies(parameters)
    checkpoint.load({"model": module}, folder / "saved")
    yield from differences("loaded", expected, _changes(_copies(parameters), first))
    found = {"the loss": plain_loss(module, steps[0][0]).detach()}
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(first[name] + expected[name])
    yield from differences("loaded", {"the loss": plain_loss(module, steps[0][0]).detach()}, found)


#: How long a rank waits for the others, in seconds; much longer than a run takes.
WAIT_S = 30.0

Subject = TypeVar("Subject")
Make = Callable[[Subject], Training]


def judge_simulated(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """Judge each in one process that plays all ranks."""
    trainings = [make(subject) for subject in subjects]
    with TemporaryDirectory() as folder:
        homes = [Path(folder, str(number)) for number in range(len(subjects))]
        with simulate(num_ranks):
            outcomes = [play(t, home) for t, home in zip(trainings, homes, strict=True)]
        return [judge(*each) for each in zip(trainings, outcomes, homes, strict=True)]


def judge_in_processes(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """Judge each in `num_ranks` processes; `make` has to be importable."""
    judgements: list[Judgement] = []
    while len(judgements) < len(subjects):
        judgements += _judge_some(make, subjects[len(judgements) :], num_ranks)
    return judgements


def _judge_some(
    make: Make[Subject], subjects: Sequence[Subject], num_ranks: int
) -> list[Judgement]:
    """Judge all, or those up to the first that ended the processes."""
    received: dict[int, dict[int, TrainingOutcome]] = {}

    def on_note(rank: int, note: tuple[int, TrainingOutcome]) -> None:
        received.setdefault(note[0], {})[rank] = note[1]

    with TemporaryDirectory() as folder:
        ending = "the processes ended"
        try:
            launch(
                _play_all,
                num_ranks,
                make,
                list(subjects),
                folder,
                on_note=on_note,
                collective_timeout_s=WAIT_S,
            )
        except (ShardwiseError, RuntimeError) as error:
            ending = f"{type(error).__name__}: {error}"
        judgements = []
        for number, subject in enumerate(subjects):
            outcomes = received.get(number, {})
            if len(outcomes) < num_ranks:
                failed = [o.failed for o in outcomes.values() if o.failed]
                judgements.append(Judgement("wrong", failed[0] if failed else ending))
                break
            ordered = [outcomes[rank] for rank in range(num_ranks)]
            judgements.append(judge(make(subject), ordered, Path(folder, str(number))))
            if any(o.failed for o in ordered) or not _agree(o.refused for o in ordered):
                break
        return judgements


def _play_all(
    note: Callable[[Any], None], make: Make[Any], subjects: list[Any], folder: str
) -> None:
    """On each rank: play until one fails."""
    torch.set_num_threads(1)
    # A separate group keeps this exchange apart from the runs' collectives.
    meeting = dist.new_group(backend="gloo")
    for number, subject in enumerate(subjects):
        (outcome,) = play(make(subject), Path(folder, str(number)))
        note((number, outcome))
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, (outcome.refused, bool(outcome.failed)), group=meeting)
        if any(failed for _, failed in states) or not _agree(refused for refused, _ in states):
            return
