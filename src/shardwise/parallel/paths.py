"""Paths of a plan: which modules a pattern means, and what was meant when it means none."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn


def matching_modules(root: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules at the paths that match, part by part; the root for "".

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


def nearest_paths(root: nn.Module, pattern: str, num_paths: int = 3) -> list[str]:
    """Existing paths that look like a pattern without a match, the most similar first."""
    return difflib.get_close_matches(pattern, list(all_paths(root)), n=num_paths, cutoff=0.4)
