"""Case: a model, a mesh, doors in an order, options and an optimizer; as text and back."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shardwise.errors import ArgumentError
from shardwise.testing.mesh import TENSOR_AXIS, Mesh
from shardwise.testing.steps.models import ANY_OPTIMIZER, KINDS

# What a training loop may do besides forward, backward and step.

#: By word: what it means.
OPTIONS: dict[str, str] = {
    "accumulate": "two batches a step, each reduced",
    "no_sync": "two batches a step, the first inside no_sync()",
    "clip": "gradients are clipped by their common norm",
    "recompute": "activations are computed again in backward",
    "autocast": "forward in bfloat16",
    "copy": "after a step, training goes on with a deep copy",
    "pickle": "after a step, training goes on with what was pickled and read",
    "unused": "a layer that no step reaches",
    "sometimes": "a layer that one step reaches",
    "late": "parameters that are frozen at first",
    "freeze": "parameters that are frozen after a step",
    "two": "two optimizers share the parameters",
    "save": "saved by all ranks, loaded by one device",
    "penalty": "a gradient penalty, by double backward",
    "zeros": "gradients are set to zero, not to None",
}

#: Options that say two things about one matter.
EXCLUSIVE = (
    {"accumulate", "no_sync"},
    {"copy", "pickle"},
    {"unused", "sometimes"},
    {"late", "freeze"},
    {"autocast", "penalty"},
    # The second optimizer would divide by what rounding left.
    {"autocast", "two"},
    # A gradient of zeros is not none: frozen and unreached parameters would still be decayed.
    {"zeros", "freeze"},
)


def agree(options: frozenset[str]) -> bool:
    return not any(pair <= options for pair in EXCLUSIVE)


# MERGED

#: Front doors, by the words of a case.
DOORS = ("tp", "replicate", "dp", "fs", "sm", "tables", "dm")
_DOOR = re.compile(r"(\w+)(?:\(([\w*+]*)(?:,(\w+))?\))?(?:@([\w.*]+))?")


@dataclass(frozen=True)
class Door:
    """One call of a front door.

    | text | call |
    |---|---|
    | `tp` | `parallelize_module(model, mesh, plan)` |
    | `tp(tp)` | `parallelize_module(model, mesh["tp"], plan)`, in processes |
    | `replicate` | the same, with the style "replicate" for every layer |
    | `dp(rep)` | `data_parallel(model, mesh["rep"])` |
    | `dp(rep+shard)` | `data_parallel(model, mesh["rep", "shard"])` |
    | `dp(rep*shard)@body` | `data_parallel(model.body, mesh["rep", "shard"]._flatten("data"))` |
    | `fs(shard)@*` | `shard_parameters(child, mesh["shard"])` of every child |
    | `sm(0)` | `shard_module`: the model's tables cut along dim 0 over all ranks |
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
    """
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
        made = tuple(Door.parse(door) for door in doors.split(";"))
        return StepCase(kind, Mesh.parse(mesh), made, chosen, optimizer, int(seed))

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
        """The axes along which ranks bring their own parts, since a door was told so."""
        names = self.mesh.names
        tensor = TENSOR_AXIS if TENSOR_AXIS in names else names[-1]
        declared: set[str] = set()
        for door in self.doors:
            if door.name == "tp" and door.axes:
                continue  # a part of the mesh that has no data axis
            if door.name in ("tp", "dm"):
                declared.update(name for name in names if name != tensor)
            if door.name == "dm" and TENSOR_AXIS not in names:
                declared.add(tensor)
            if door.name == "sm":
                declared.update(names)
            declared.update(door.axes)
        return tuple(name for name in names if name in declared)

    @property
    def num_parts(self) -> int:
        return self.mesh.num_parts(self.data_axes)
