"""How CommDebugMode sees the collectives of a simulated world.

The compiler traces through a LocalTensor into its parts, where a collective is only an addition or
a concatenation. `mark` adds an op to the graph that names the collective, and CommDebugMode sees
that op when compiled code runs. A process group calls `listeners`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

#: Called for collectives that are not ops: `(c10d op, tensor, group name)`.
listeners: list[Callable[[str, Any, str], None]] = []

_library = torch.library.Library("shardwise", "DEF")
_library.define("collective(Tensor[] sent, str kind, str group_name) -> Tensor[]")


def _copied(sent: Sequence[torch.Tensor], kind: str, group_name: str) -> list[torch.Tensor]:
    return [x.clone() for x in sent]  # the result of an op may not share memory with its input


_library.impl("collective", _copied, "CompositeExplicitAutograd")

#: The op packet; its arguments are what a rank sends, the kind, and the name of the group.
COLLECTIVE = torch.ops.shardwise.collective


def mark(sent: Sequence[torch.Tensor], kind: str, group_name: str) -> list[torch.Tensor]:
    """What one rank sends; use the returned tensors in its place."""
    return COLLECTIVE(sent, kind, group_name)
