"""Case: somebody's model, a batch for it, and the plan that shards it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.embedding import EmbeddingBagCollection, EmbeddingCollection, Plan
from shardwise.errors import ArgumentError, LayoutError
from shardwise.parallel import data_parallel, load_plan, parallelize_module
from shardwise.planfile.files import read_content
from shardwise.testing.mesh import TENSOR_AXIS

_COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)


@dataclass(frozen=True)
class Sharded:
    """A module that a plan was applied to, and the axes along which each rank has its own batch."""

    module: nn.Module
    mesh: DeviceMesh
    data_axes: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        sizes = [self.mesh.size(axis) for axis in self.data_axes]
        return int(torch.tensor(sizes).prod()) if sizes else 1

    def part_of(self, rank: int) -> int:
        """Which part of the batch a rank brings."""
        (coordinate,) = (self.mesh.mesh == rank).nonzero().tolist()
        index = 0
        for axis in self.data_axes:
            index = index * self.mesh.size(axis) + coordinate[axis]
        return index


@dataclass(frozen=True)
class Case:
    """`target` names a callable as `pkg.module:factory`; it returns a module and a batch."""

    target: str
    plan: str | None = None
    seed: int = 0

    def build(self) -> tuple[nn.Module, Any]:
        """The module and the batch, the same each time."""
        torch.manual_seed(self.seed)
        made = load_target(self.target)()
        if not isinstance(made, tuple) or len(made) != 2 or not isinstance(made[0], nn.Module):
            raise ArgumentError(
                f"{self.target} should return a module and a sample batch, as a tuple of two; "
                f"found {type(made).__name__}."
            )
        return made

    def shard(self, module: nn.Module, mesh: DeviceMesh) -> Sharded:
        return apply_plan(module, mesh, self.plan)


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
    return factory


def apply_plan(module: nn.Module, mesh: DeviceMesh, plan: str | None) -> Sharded:
    """Shard a module as a plan file says.

    A plan of modules shards along the axis `tp`, or else the last; the others are data axes. A plan
    of tables shards the collections in the module, and every rank has its own batch, as it has
    without a plan.
    """
    names = tuple(mesh.mesh_dim_names or ())
    if plan is not None and _section(plan) == "modules":
        tensor_axis = names.index(TENSOR_AXIS) if TENSOR_AXIS in names else mesh.ndim - 1
        module = parallelize_module(module, mesh, load_plan(plan), strict=True)
        data_axes = tuple(axis for axis in range(mesh.ndim) if axis != tensor_axis)
        if len(data_axes) > 1:
            raise LayoutError(
                f"One data axis beside {names[tensor_axis]!r} is as far as this command goes; the "
                f"mesh has {', '.join(names)}."
            )
        for axis in data_axes:
            data_parallel(module, mesh[names[axis]])
        return Sharded(module, mesh, data_axes)
    if mesh.ndim > 1:
        what = "A plan of tables" if plan else "Without a plan of modules, a model"
        raise LayoutError(f"{what} is for a mesh of one axis; found {', '.join(names)}.")
    collections = [m for m in module.modules() if isinstance(m, _COLLECTIONS)]
    if plan is not None:
        if not collections:
            raise LayoutError(
                f"{plan} is a plan of tables, but {type(module).__name__} has no collection of "
                'tables. A plan of modules begins with format = "shardwise plan 1".'
            )
        for collection in collections:
            collection.shard(mesh, Plan.load(plan))
    elif collections:
        raise LayoutError("The model has a collection of tables: give a plan of tables for it.")
    for dense in _without_collections(module):
        data_parallel(dense, mesh)
    return Sharded(module, mesh, (0,))


def _section(plan: str) -> str:
    """Which kind of plan a file holds; whether it is a good one is found when it is read."""
    path = Path(plan)
    if not path.is_file():
        raise ArgumentError(f"There is no plan file {plan!r}.")
    content = read_content(path)
    return "tables" if isinstance(content, dict) and "tables" in content else "modules"


def _without_collections(module: nn.Module) -> Iterator[nn.Module]:
    """The largest modules that hold parameters and no collection."""
    if isinstance(module, _COLLECTIONS):
        return
    if not any(isinstance(inner, _COLLECTIONS) for inner in module.modules()):
        if any(True for _ in module.parameters()):
            yield module
        return
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise LayoutError(
            f"{type(module).__name__} holds both a collection of tables and parameters of its own "
            f"({', '.join(own)}); put these into a module beside the collection."
        )
    for child in module.children():
        yield from _without_collections(child)
