"""Cases: encoded as text and decoded, their front doors called, and played against one device."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.core.placements import Placement, Replicate, Shard
from shardwise.dtensor.create import distribute_module, distribute_tensor
from shardwise.errors import ArgumentError
from shardwise.parallel import (
    context_parallel,
    data_parallel,
    expert_parallel,
    fully_shard,
    parallelize_module,
)
from shardwise.shard import ChunkShardingSpec, ShardingPlan, shard_module
from shardwise.testing.layouts import TENSOR_AXIS, Mesh
from shardwise.testing.loop import OPTIONS
from shardwise.testing.training import (
    AUTOCAST_BOUND,
    BOUND,
    NUM_STEPS,
    Steps,
    Training,
    judge_in_processes,
    judge_simulated,
)
from tests.training_steps.models import ANY_OPTIMIZER, KINDS, WIDTH, Kind, Trained

#: The front doors, by their names in a case.
DOORS = ("tp", "replicate", "dp", "fs", "cp", "ep", "sm", "tables", "dm")
_DOOR = re.compile(r"(\w+)(?:\(([\w*+]*)(?:,(\w+))?\))?(?:@([\w.*]+))?")


@dataclass(frozen=True)
class Door:
    """One call of a front door.

    | text | call |
    |---|---|
    | `tp` | `parallelize_module(model, mesh, plan)` |
    | `tp(tp)` | `parallelize_module(model, mesh["tp"], plan)` |
    | `replicate` | the same, with the style "replicate" for every layer |
    | `dp(rep)` | `data_parallel(model, mesh["rep"])` |
    | `dp(rep+shard)` | `data_parallel(model, mesh["rep", "shard"])` |
    | `dp(rep*shard)@body` | `data_parallel(model.body, mesh["rep", "shard"]._flatten())` |
    | `fs(shard)@*` | `fully_shard(child, mesh["shard"])` of every child |
    | `cp(cp)` | `context_parallel(model, mesh, attention)`, which splits the batch's sequences |
    | `ep(ep)` | `expert_parallel(model, mesh, experts)` |
    | `sm(0)` | `shard_module`: the model's tables sharded along dim 0 over all ranks |
    | `tables(dev,row_wise)` | `model.tables.shard(mesh["dev"], "row_wise")` |
    | `dm` | `distribute_module(model, mesh, ...)`; the batch and the loss are DTensors |

    >>> door = Door.parse("dp(rep*shard)@body")
    >>> door.axes, door.flattened, door.path, str(door)
    (('rep', 'shard'), True, 'body', 'dp(rep*shard)@body')
    """

    name: str
    axes: tuple[str, ...] = ()
    flattened: bool = False
    detail: str = ""
    path: str = ""

    @staticmethod
    def parse(text: str) -> Door:
        found = _DOOR.fullmatch(text.strip())
        if found is None or found[1] not in DOORS:
            raise ArgumentError(
                f"A door is one of {', '.join(DOORS)}, as dp(axis); found {text!r}."
            )
        name, given, detail, path = (part or "" for part in found.groups())
        if name == "sm":
            given, detail = "", given
        axes = tuple(each for each in re.split(r"[*+]", given) if each)
        return Door(name, axes, "*" in given, detail, path)

    def __str__(self) -> str:
        joined = ("*" if self.flattened else "+").join(self.axes)
        inside = ",".join(each for each in (joined, self.detail) if each)
        return f"{self.name}{f'({inside})' if inside else ''}{f'@{self.path}' if self.path else ''}"


@dataclass(frozen=True)
class StepCase:
    """A model, a mesh, front doors in an order, options and an optimizer.

    >>> text = "norms | dp=2,tp=2 | tp; dp(dp) | clip, late | sgd | 0"
    >>> case = StepCase.parse(text)
    >>> case.data_axes, case.num_parts, str(case) == text
    (('dp',), 2, True)
    """

    kind: str
    mesh: Mesh
    doors: tuple[Door, ...]
    options: frozenset[str] = frozenset()
    optimizer: str = "sgd"
    seed: int = 0

    @staticmethod
    def parse(text: str) -> StepCase:
        parts = [part.strip() for part in text.split("|")]
        if len(parts) != 6 or not parts[5].isdigit():
            raise ArgumentError(
                "A case is written model | mesh | doors | options | optimizer | seed, such as "
                f"norms | dp=2,tp=2 | tp; dp(dp) | clip, late | sgd | 0; found {text!r}."
            )
        kind, mesh, doors, options, optimizer, seed = parts
        chosen = frozenset(word.strip() for word in options.split(",") if word.strip())
        for found, known in (({kind}, KINDS), (chosen, OPTIONS), ({optimizer}, ANY_OPTIMIZER)):
            if not found <= set(known):
                raise ArgumentError(f"{sorted(found - set(known))}: known are {', '.join(known)}.")
        made, axes = tuple(map(Door.parse, doors.split(";"))), Mesh.parse(mesh)
        for door in made:
            if not set(door.axes) <= set(axes.names):
                raise ArgumentError(f"The door {door} names an axis that {axes} does not have.")
        return StepCase(kind, axes, made, chosen, optimizer, int(seed))

    def __str__(self) -> str:
        axes = ",".join(f"{n}={s}" for n, s in zip(self.mesh.names, self.mesh.sizes, strict=True))
        doors, options = "; ".join(map(str, self.doors)), ", ".join(sorted(self.options))
        return f"{self.kind} | {axes} | {doors} | {options} | {self.optimizer} | {self.seed}"

    @property
    def has_global_batch(self) -> bool:
        """Whether the batch is one DTensor, not each rank's own tensor."""
        return any(door.name == "dm" for door in self.doors)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have their own batches, by the doors of the case."""
        names = self.mesh.names
        tensor = TENSOR_AXIS if TENSOR_AXIS in names else names[-1]
        declared: set[str] = set()
        for door in self.doors:
            if door.name == "tp" and door.axes:
                continue  # a submesh without a data axis
            if door.name in ("tp", "dm"):
                declared.update(name for name in names if name != tensor)
            if door.name == "dm" and TENSOR_AXIS not in names:
                declared.add(tensor)
            if door.name == "sm":
                declared.update(names)
            declared.update(door.axes)
        # Along these, ranks have the same batch and take their positions of it.
        declared.difference_update(*(door.axes for door in self.doors if door.name == "cp"))
        return tuple(name for name in names if name in declared)

    @property
    def num_parts(self) -> int:
        return self.mesh.num_parts(self.data_axes)


# -- the front doors of a case ----------------------------------------------------------------


def open_doors(case: StepCase, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Call the front doors of the case in order; returns the module."""
    flattened: dict[tuple[str, ...], DeviceMesh] = {}
    for door in case.doors:
        part = _submesh(door, mesh, flattened) if door.axes else mesh
        module = _open(door, KINDS[case.kind], module, mesh, part)
    return module


def _submesh(
    door: Door, mesh: DeviceMesh, flattened: dict[tuple[str, ...], DeviceMesh]
) -> DeviceMesh:
    """The axes that a door names; each flattened mesh is made once."""
    if mesh.ndim == 1:
        return mesh
    if len(door.axes) == 1:
        return mesh[door.axes[0]]
    if not door.flattened:
        return mesh[door.axes]
    if door.axes not in flattened:
        flattened[door.axes] = mesh[door.axes]._flatten()
    return flattened[door.axes]


def _open(door: Door, kind: Kind, module: Any, mesh: DeviceMesh, part: DeviceMesh) -> nn.Module:
    """Make one call; `part` has the axes that the door names."""
    match door.name:
        case "tp":
            return parallelize_module(module, part, dict(kind.plan), strict=True)
        case "replicate":
            layers = [
                name
                for name, layer in module.named_modules()
                if name and not any(layer.children()) and any(True for _ in layer.parameters())
            ]
            return parallelize_module(module, mesh, dict.fromkeys(layers, "replicate"), strict=True)
        case "cp":
            dims = {"ids": 1, "target": 1}
            return context_parallel(
                module, mesh, kind.attention, axis=door.axes[0], sequence_dims=dims
            )
        case "ep":
            return expert_parallel(module, mesh, kind.experts, axis=door.axes[0])
        case "sm":
            ranks = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
            spec = ChunkShardingSpec(dim=int(door.detail), placements=list(ranks))
            return shard_module(module, ShardingPlan(dict.fromkeys(kind.sharded, spec)))
        case "dm":
            return distribute_module(module, mesh, functools.partial(_by_plan, kind))
        case "tables":
            module.tables.shard(part, door.detail)
        case _:
            for target in _targets(door, module):
                (data_parallel if door.name == "dp" else fully_shard)(target, part)
    return module


def _by_plan(kind: Kind, name: str, layer: nn.Module, mesh: DeviceMesh) -> None:
    """Shard what the plan splits along the tensor axis; `distribute_module` replicates the rest."""
    names = mesh.mesh_dim_names or ()
    dim = {"colwise": 0, "rowwise": 1}.get(kind.plan.get(name, ""))
    if TENSOR_AXIS not in names or dim is None or not isinstance(layer, nn.Linear):
        return
    for key, parameter in list(layer.named_parameters(recurse=False)):
        if parameter.dim() > dim:
            placements: list[Placement] = [Replicate()] * mesh.ndim
            placements[names.index(TENSOR_AXIS)] = Shard(dim)
            made = distribute_tensor(parameter.detach(), mesh, placements)
            layer._parameters[key] = nn.Parameter(made, parameter.requires_grad)


def _targets(door: Door, module: nn.Module) -> Iterator[nn.Module]:
    if door.path == "*":
        yield from (child for child in module.children() if any(True for _ in child.parameters()))
    else:
        yield module.get_submodule(door.path)


def global_batch(case: StepCase, batch: Any, mesh: DeviceMesh) -> Any:
    """A batch as DTensors, sharded along dim 0 over the data axes."""
    placements = [Shard(0) if name in case.data_axes else Replicate() for name in case.mesh.names]

    return tuple(
        distribute_tensor(value, mesh, placements) if isinstance(value, torch.Tensor) else value
        for value in batch
    )


EXAMPLES_PER_PART = 4


def training_of(case: StepCase) -> Training:
    whole = case.has_global_batch
    return Training(
        case.mesh,
        case.data_axes,
        case.options,
        case.optimizer,
        functools.partial(build, case),
        functools.partial(open_doors, case),
        functools.partial(global_batch, case) if whole else None,
        by_parts=KINDS[case.kind].own_statistics and not whole,
        bound=AUTOCAST_BOUND if "autocast" in case.options else BOUND,
    )


def build(case: StepCase) -> tuple[Trained, Steps]:
    """The module and, for each step, its batches: the same each time."""
    kind = KINDS[case.kind]
    with _default_dtype(torch.float32 if "autocast" in case.options else torch.float64):
        torch.manual_seed(case.seed)
        module = kind.make()
        module.recompute = "recompute" in case.options
        size = EXAMPLES_PER_PART * case.num_parts
        num_batches = 2 if case.options & {"accumulate", "no_sync"} else 1
        steps: Steps = [
            [kind.batch(module, size) for _ in range(num_batches)] for _ in range(NUM_STEPS)
        ]
        if case.options & {"unused", "sometimes"}:
            module.spare = nn.Linear(WIDTH, WIDTH, bias=False)
    return module, steps


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: Cases that share a world; a simulated one plans each call once.
CASES_PER_WORLD = 60


@dataclass(frozen=True)
class StepVerdict:
    """`kind` is "ok", "refused" or "wrong"."""

    case: StepCase
    kind: str
    text: str = ""

    def __str__(self) -> str:
        note = f"\n    {self.text}" if self.text else ""
        return f'{self.kind}: --replay "{self.case}"{note}'


def prove(
    cases: Iterable[StepCase],
    report: Callable[[StepVerdict], None] = lambda _: None,
    *,
    in_processes: bool = False,
) -> list[StepVerdict]:
    """Play cases in simulated worlds, or in processes."""
    verdicts = []
    judge = judge_in_processes if in_processes else judge_simulated
    for group in _worlds(cases):
        judgements = judge(training_of, group, group[0].mesh.num_ranks)
        for case, judgement in zip(group, judgements, strict=True):
            verdicts.append(StepVerdict(case, judgement.kind, judgement.text))
            report(verdicts[-1])
    return verdicts


def _worlds(cases: Iterable[StepCase]) -> Iterator[list[StepCase]]:
    """Groups of cases with the same number of ranks, of limited size."""
    by_size: dict[int, list[StepCase]] = {}
    for case in cases:
        by_size.setdefault(case.mesh.num_ranks, []).append(case)
    for size in sorted(by_size):
        alike = by_size[size]
        for start in range(0, len(alike), CASES_PER_WORLD):
            yield alike[start : start + CASES_PER_WORLD]
