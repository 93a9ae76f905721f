"""Paths of a plan: the tensor or module that one names, and whether two of them conflict."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import PathError, PlanError


def find_tensor(root: nn.Module, path: str) -> tuple[nn.Module, str, torch.Tensor]:
    """The module, the name in it, and the parameter or buffer that a path leads to."""
    module_path, _, name = path.rpartition(".")
    owner = find_module(root, module_path, asked=path)
    tensor: torch.Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    if tensor is None:
        raise PathError(_no_such("parameter", root, path, _tensor_paths(root)))
    return owner, name, tensor


def find_module(root: nn.Module, path: str, asked: str | None = None) -> nn.Module:
    """The module that a path leads to; the root for ""."""
    module: nn.Module | None = root
    for part in path.split(".") if path else ():
        module = module._modules.get(part) if module is not None else None
        if module is None:
            known = [name for name, _ in root.named_modules() if name]
            known += _tensor_paths(root) if asked is not None else []
            what = "module" if asked is None else "parameter"
            raise PathError(_no_such(what, root, asked or path, known))
    assert module is not None, "a path that breaks off has raised"
    return module


def _tensor_paths(root: nn.Module) -> list[str]:
    return [name for name, _ in (*root.named_parameters(), *root.named_buffers())]


def _no_such(what: str, root: nn.Module, path: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.4)
    hint = f"; did you mean {', '.join(map(repr, near))}?" if near else "."
    return f"The plan names {path!r}, but {type(root).__name__} has no such {what}{hint}"


def check_conflicts(plan: Mapping[str, Any], replaced: Sequence[str]) -> None:
    """No entry lies inside a module that another entry replaces (`replaced`)."""
    for outer in replaced:
        inside = [p for p in plan if p != outer and (not outer or p.startswith(f"{outer}."))]
        if inside:
            raise PlanError(
                f"The sharder for {outer!r} replaces that module, but the plan also names "
                f"{', '.join(map(repr, inside))} inside it: a sharder's path should not conflict "
                "with the submodule tree of other entries. Let the sharder do both."
            )


def owners_of(root: nn.Module, tensor: torch.Tensor) -> list[tuple[dict[str, Any], str]]:
    """Every place in the module that holds the tensor: several where it is shared."""
    found: list[tuple[dict[str, Any], str]] = []
    for module in root.modules():
        for held in (module._parameters, module._buffers):
            found += [(held, name) for name, each in held.items() if each is tensor]
    return found
