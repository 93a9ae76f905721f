"""The parameters of many tables: was one replaced, and how often were they written to.

Both are answered by counting, so that a step need not look at each of them.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch.autograd import VersionSource


class Watched(dict[str, Any]):
    """A dict of a module's parameters or submodules.

    Modules, and all that replaces parameters in them, write to these dicts. While the count stays,
    every parameter is the one that was there before.

    >>> parameters, before = Watched(weight=1), Watched.num_changes
    >>> parameters["weight"] = 2
    >>> Watched.num_changes - before
    1
    """

    #: Changes of all such dicts.
    num_changes = 0


def _counted(name: str) -> Any:
    change = getattr(dict, name)

    def counted(self: Watched, *args: Any, **kwargs: Any) -> Any:
        Watched.num_changes += 1
        return change(self, *args, **kwargs)

    return counted


for _name in (
    "__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update",
):  # fmt: skip
    setattr(Watched, _name, _counted(_name))


class WriteCount:
    """Counts writes to parameters that are DTensors: those made here share a version counter."""

    def __init__(self) -> None:
        self._source = VersionSource.make()
        self._sharing: dict[int, torch.Tensor] = {}
        #: Parameters that came later, which have counters of their own.
        self._apart: list[torch.Tensor] = []

    def parameter(self, value: torch.Tensor, *, trained: bool) -> torch.nn.Parameter:
        shares = self._source.share(value)
        made = torch.nn.Parameter(value, requires_grad=trained)
        if shares:
            self._sharing[id(made)] = made
        return made

    def follow(self, parameters: list[torch.Tensor]) -> None:
        """Count writes to these."""
        self._apart = [each for each in parameters if id(each) not in self._sharing]

    def add(self) -> None:
        """Count a write to all of them."""
        torch.autograd.graph.increment_version([self._source, *self._apart])

    def __reduce__(self) -> Any:
        """Copies of parameters have their own counters."""
        return WriteCount, ()
