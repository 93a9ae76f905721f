"""Where in a program an op runs: for which module, at which line, forward or backward.

Note [Modules without hooks]
torch.compile would trace hooks on modules and guard on them, so entering a mode would recompile the
model. The running modules are found on the Python stack instead. In backward they are not on it:
there the autograd node that runs has a sequence number, and forward has recorded for which module,
and at which line, the nodes with that number were made.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise._torch.autograd import current_node, in_backward, next_node_number
from shardwise._torch.frames import line_outside, running_modules


@dataclass(frozen=True, slots=True)
class Place:
    """A module's path ("" outside modules and in the outermost), `file.py:12`, and the phase."""

    module: str
    line: str | None
    phase: str


class Places:
    """Tells the place of what runs now; `mark` is called with each op."""

    def __init__(self) -> None:
        #: The modules that were called from outside any module, with their paths.
        self.roots: list[tuple[str, nn.Module]] = []
        # By id; the module is kept, or another could get its id.
        self._paths: dict[int, tuple[nn.Module, str]] = {}
        self._thread = threading.get_ident()
        # Nodes below `_numbers[i]`, and not below the one before, were made for `_makers[i]`.
        self._numbers = [next_node_number()]
        self._makers: list[tuple[str | None, str | None]] = [(None, None)]
        #: Whether what `now` told of last ran in a module, or in the backward of one.
        self.inside = False

    def mark(self) -> None:
        """Called with each op: records for which module nodes were made since the last."""
        if threading.get_ident() != self._thread:
            return  # sequence numbers are per thread
        number = next_node_number()
        if number == self._numbers[-1] and torch.is_grad_enabled():
            return
        maker = self._maker()
        if maker == self._makers[-1]:
            self._numbers[-1] = number
        elif number > self._numbers[-1]:
            self._numbers.append(number)
            self._makers.append(maker)

    def now(self) -> Place:
        """The place of what runs now."""
        phase = "backward" if in_backward() else "forward"
        path, line = self._maker()
        self.inside = path is not None
        return Place(path or "", line, phase)

    def name(self, path: str) -> str:
        """Torch's name for a module: the class of the outermost one, then the path in it."""
        for prefix, root in self.roots:
            if not prefix and not any(p and _is_below(path, p) for p, _ in self.roots):
                return _join(type(getattr(root, "_orig_mod", root)).__name__, path)
        return path

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules that ran, and those inside them, with their paths."""
        for prefix, root in self.roots:
            for name, module in root.named_modules():
                yield _join(prefix, name), module

    # -- modules -----------------------------------------------------------------------------

    def _maker(self) -> tuple[str | None, str | None]:
        """The path of the running module, None outside modules, and the line.

        In backward, those for which and at which forward made the node that runs.
        """
        running = running_modules()
        if running:
            return self._path(running), self._line()
        node = current_node()
        path, line = (None, None) if node is None else self._maker_of_node(node)
        return path, line or self._line()

    def _path(self, running: list[nn.Module]) -> str:
        if id(running[0]) not in self._paths or id(running[-1]) not in self._paths:
            self._learn(running)
        return self._paths[id(running[0])][1]

    def _learn(self, running: list[nn.Module]) -> None:
        outer: str | None = None
        for module in reversed(running):
            if id(module) not in self._paths:
                self._add_root(module, outer)
            outer = self._paths[id(module)][1]

    def _add_root(self, module: nn.Module, outer: str | None) -> None:
        """A module that no known one contains; `outer` is the path of its caller."""
        inside = {id(inner) for inner in module.modules()}
        self.roots = [(path, root) for path, root in self.roots if id(root) not in inside]
        prefix = ""
        if self.roots:
            taken = {path for path, _ in self.roots}
            name = _join(outer or "", type(module).__name__)
            numbered = (f"{name}_{number}" for number in range(1, len(taken) + 1))
            prefix = name if name not in taken else next(n for n in numbered if n not in taken)
        self.roots.append((prefix, module))
        for name, inner in module.named_modules():
            self._paths[id(inner)] = inner, _join(prefix, name)

    def _maker_of_node(self, node: Any) -> tuple[str | None, str | None]:
        variable = getattr(node, "variable", None)
        if variable is None:
            place = bisect_right(self._numbers, node._sequence_nr())
            return self._makers[place] if place < len(self._makers) else (None, None)
        # AccumulateGrad has no number; it belongs to the module of its parameter.
        for path, module in self.modules():
            if any(p is variable for p in module._parameters.values()):
                return path, None
        return None, None

    # -- lines -------------------------------------------------------------------------------

    def _line(self) -> str | None:
        line = line_outside()
        if line is None and threading.get_ident() != self._thread:
            # Backward on a device's thread: the line is where the program waits for it.
            line = line_outside(self._thread)
        return line


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}.")


def _join(prefix: str, name: str) -> str:
    """A path, without torch.compile's wrapper."""
    parts = [p for p in (*prefix.split("."), *name.split(".")) if p and p != "_orig_mod"]
    return ".".join(parts)
