"""Case: a user's model, a batch for it, and the plan that shards it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from shardwise.embedding import Plan
from shardwise.errors import ArgumentError, LayoutError
from shardwise.parallel import (
    context_parallel,
    data_parallel,
    fully_shard,
    load_plan,
    parallelize_module,
)
from shardwise.plans import matching_modules, no_match, read_content
from shardwise.testing.layouts import TENSOR_AXIS, Mesh
from shardwise.testing.loop import collections_in

#: The front doors for ranks with their own batches.
DATA = ("data_parallel", "fully_shard")
#: The axes that parameters and sequences are sharded along, where a mesh has them.
SHARD_AXIS, CONTEXT_AXIS = "fsdp", "cp"


@dataclass(frozen=True)
class ShardedCase:
    """A sharded module, and the axes along which each rank has its own batch."""

    module: nn.Module
    mesh: Mesh
    data_axes: tuple[str, ...]

    @property
    def num_parts(self) -> int:
        return self.mesh.num_parts(self.data_axes)

    def part_of(self, rank: int) -> int:
        """The number of a rank's part of the batch."""
        return self.mesh.part_of(rank, self.data_axes)


@dataclass(frozen=True)
class Case:
    """`target` names a callable as `pkg.module:factory`; it returns a module and a batch.

    `data` is the front door of the data axes, one of `DATA`. The others are patterns of modules:
    those that are fully sharded one by one before the whole model, those whose attention is split
    along the axis `cp`, and those that backward recomputes.
    """

    target: str
    plan: str | None = None
    seed: int = 0
    data: str = DATA[0]
    groups: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()

    def build(self) -> tuple[nn.Module, Any]:
        """The module and the batch, the same each time."""
        torch.manual_seed(self.seed)
        made = load_target(self.target)()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
            raise ArgumentError(
                f"{self.target} should return a module and a sample batch, as a tuple of two; "
                f"found {type(made).__name__}."
            )
        if not any(parameter.requires_grad for parameter in made[0].parameters()):
            raise ArgumentError(
                f"The module of {self.target} has no parameter that requires a gradient, and a "
                "step has a backward: return one that trains."
            )
        return made

    def data_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes along which each rank has its own examples."""
        split = (CONTEXT_AXIS,) if self.context else ()
        if split and CONTEXT_AXIS not in mesh.names:
            raise ArgumentError(
                f"Sequences are split along the axis {CONTEXT_AXIS!r}; found {mesh}."
            )
        return tuple(name for name in data_axes(mesh, self.plan) if name not in split)

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> ShardedCase:
        """Shard the module by the plan, and call the front doors of the data axes.

        A plan of tables shards the collections in the module, on a mesh of one axis.
        """
        named_axes = Mesh(tuple(mesh.mesh_dim_names or ()), tuple(mesh.mesh.shape))
        axes = self.data_axes(named_axes)
        collections = list(collections_in(module).values())
        if self.plan is not None and section_of(self.plan) == "modules":
            module = parallelize_module(module, mesh, load_plan(self.plan), strict=True)
        elif self.plan is not None:
            _shard_tables(self.plan, module, collections, mesh)
        elif collections:
            raise LayoutError("The model has a collection of tables: give a plan of tables for it.")
        if self.context:
            context_parallel(module, mesh, self.context, axis=CONTEXT_AXIS)
        self._train_along(module, mesh, axes)
        for inner in matched(module, self.recompute):
            recompute: Any = functools.partial(checkpoint, inner.forward, use_reentrant=False)
            inner.forward = recompute
        return ShardedCase(module, named_axes, axes)

    def _train_along(self, module: nn.Module, mesh: DeviceMesh, axes: tuple[str, ...]) -> None:
        """Call the front doors of the data axes: one that shards, and one that replicates."""
        whole = mesh.ndim == 1
        if (self.groups or self.data == "fully_shard") and axes:
            last = SHARD_AXIS if SHARD_AXIS in axes else axes[-1]
            for inner in (*matched(module, self.groups), module):
                fully_shard(inner, mesh if whole else mesh[last])
            axes = tuple(axis for axis in axes if axis != last)
        elif self.groups:
            raise ArgumentError(
                "Modules are fully sharded along a data axis, and the mesh has none beside 'tp': "
                "for example --mesh fsdp=4,tp=2."
            )
        if axes:
            data_parallel(module, mesh if whole else mesh[axes if len(axes) > 1 else axes[0]])


def load_target(target: str) -> Callable[[], Any]:
    """The callable that `pkg.module:factory` names; modules of the current folder are found."""
    where, _, name = target.partition(":")
    if not where or not name:
        raise ArgumentError(f"A target is written pkg.module:factory; found {target!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name and (where == error.name or where.startswith(f"{error.name}.")):
            raise ArgumentError(
                f"There is no module {where!r} here ({os.getcwd()}) or among what is installed."
            ) from error
        raise
    factory = getattr(module, name, None)
    if not callable(factory):
        known = [n for n, value in vars(module).items() if callable(value) and n[0] != "_"]
        raise ArgumentError(
            f"{where} has no callable {name!r}; it has {', '.join(known[:8]) or 'none'}."
        )
    with contextlib.suppress(ValueError):  # some builtins do not tell what they take
        required = [
            each.name
            for each in inspect.signature(factory).parameters.values()
            if each.default is each.empty
            and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        ]
        if required:
            raise ArgumentError(
                f"{target} takes {', '.join(required)}, and a target is called without arguments."
            )
    return factory


def data_axes(mesh: Mesh, plan: str | None) -> tuple[str, ...]:
    """The axes along which each rank has its own batch.

    A plan of modules shards along the axis `tp`, or else the last; the others are data axes.
    Without such a plan nothing is split along `tp`, and a single axis is a data axis.

    >>> data_axes(Mesh.parse("dp=2,tp=4"), None), data_axes(Mesh.parse("4"), None)
    (('dp',), ('tp',))
    """
    names = mesh.names
    if plan is None or section_of(plan) != "modules":
        return tuple(n for n in names if n != TENSOR_AXIS) if len(names) > 1 else names
    tensor_axis = TENSOR_AXIS if TENSOR_AXIS in names else names[-1]
    return tuple(name for name in names if name != tensor_axis)


def matched(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules that match any of the patterns; each pattern has to match one."""
    found: dict[int, nn.Module] = {}
    for pattern in patterns:
        matches = matching_modules(module, pattern)
        if not matches:
            raise ArgumentError(f"N{no_match(module, pattern)[1:]}")
        found |= {id(match): match for _, match in matches}
    return list(found.values())


def _shard_tables(plan: str, module: nn.Module, collections: list[Any], mesh: DeviceMesh) -> None:
    if mesh.ndim > 1:
        names = ", ".join(mesh.mesh_dim_names or ())
        raise LayoutError(f"A plan of tables is for a mesh of one axis; found {names}.")
    if not collections:
        raise LayoutError(
            f"{plan} is a plan of tables, but {type(module).__name__} has no collection of "
            'tables. A plan of modules begins with format = "shardwise plan 1".'
        )
    for collection in collections:
        collection.shard(mesh, Plan.load(plan))


def section_of(plan: str) -> str:
    """The kind of plan in a file; loading it checks the content."""
    path = Path(plan)
    if not path.is_file():
        raise ArgumentError(f"There is no plan file {plan!r}.")
    content = read_content(path)
    return "tables" if isinstance(content, dict) and "tables" in content else "modules"
