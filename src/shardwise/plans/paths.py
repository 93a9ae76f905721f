"""Paths in plans: the modules and tensors that they name, and suggestions where there are none."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.errors import PathError, PlanError


def matching_modules(root: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules whose path matches, name by name; the root for "".

    >>> stack = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.ReLU())
    >>> [path for path, _ in matching_modules(stack, "*.[01]")]
    ['0.0', '0.1']
    """
    found = [("", root)]
    for part in pattern.split(".") if pattern else ():
        found = [
            (f"{path}.{name}" if path else name, child)
            for path, module in found
            for name, child in module._modules.items()
            if child is not None and fnmatchcase(name, part)
        ]
    return found


def all_paths(root: nn.Module, path: str = "") -> Iterator[str]:
    """The path of every module below the root, in the order of definition."""
    for name, child in root._modules.items():
        if child is not None:
            below = f"{path}.{name}" if path else name
            yield below
            yield from all_paths(child, below)


def no_match(root: nn.Module, pattern: str) -> str:
    """A sentence for an error: nothing matches, and what is similar."""
    hint = did_you_mean(pattern, list(all_paths(root)))
    return f"no module of {type(root).__name__} matches {pattern!r}{hint}"


def did_you_mean(path: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(path, known, n=3, cutoff=0.4)
    return f"; did you mean {', '.join(map(repr, near))}?" if near else "."


def find_tensor(root: nn.Module, path: str) -> tuple[nn.Module, str, torch.Tensor]:
    """The module, the name in it, and the parameter or buffer at a path."""
    module_path, _, name = path.rpartition(".")
    owner = find_module(root, module_path, asked=path)
    tensor: torch.Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers.get(name)
    if tensor is None:
        raise PathError(_no_such("parameter", root, path, _tensor_paths(root)))
    return owner, name, tensor


def find_module(root: nn.Module, path: str, asked: str | None = None) -> nn.Module:
    """The module at a path; the root for ""."""
    module: nn.Module | None = root
    for part in path.split(".") if path else ():
        module = module._modules.get(part) if module is not None else None
        if module is None:
            known = list(all_paths(root))
            known += _tensor_paths(root) if asked is not None else []
            what = "module" if asked is None else "parameter"
            raise PathError(_no_such(what, root, asked or path, known))
    assert module is not None, "a path without a module has raised"
    return module


def _tensor_paths(root: nn.Module) -> list[str]:
    return [name for name, _ in (*root.named_parameters(), *root.named_buffers())]


def _no_such(what: str, root: nn.Module, path: str, known: Sequence[str]) -> str:
    hint = did_you_mean(path, known)
    return f"The plan names {path!r}, but {type(root).__name__} has no such {what}{hint}"


def check_conflicts(plan: Mapping[str, Any], replaced: Sequence[str]) -> None:
    """Raise where an entry is inside a module that another entry replaces (`replaced`)."""
    for outer in replaced:
        inside = [p for p in plan if p != outer and (not outer or p.startswith(f"{outer}."))]
        if inside:
            raise PlanError(
                f"The sharder for {outer!r} replaces that module, but the plan also names "
                f"{', '.join(map(repr, inside))} inside it: a sharder's path should not conflict "
                "with the submodule tree of other entries. Let the sharder do both."
            )


def owners_of(root: nn.Module, tensor: torch.Tensor) -> list[tuple[dict[str, Any], str]]:
    """Every dict and name in the module that holds the tensor: several where it is tied."""
    found: list[tuple[dict[str, Any], str]] = []
    for module in root.modules():
        for held in (module._parameters, module._buffers):
            found += [(held, name) for name, each in held.items() if each is tensor]
    return found
