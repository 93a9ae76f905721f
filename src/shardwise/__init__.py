"""Shard tensors, embedding tables and layers over many devices, and get one device's results.

import shardwise

with shardwise.simulate(4):                     # or torchrun, and nothing else changes
    mesh = shardwise.init_device_mesh("cpu", (4,))
    table = shardwise.distribute_tensor(torch.randn(1000, 64), mesh, [shardwise.Shard(0)])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shardwise.safe_globals import register_with_torch

if TYPE_CHECKING:
    from shardwise.front import *  # noqa: F403
    from shardwise.front import __all__  # noqa: F401

__version__ = "0.1.0"

#: The packages that belong to `import shardwise`, without a line of their own for each.
_PACKAGES = (
    "checkpoint",
    "debug",
    "embedding",
    "interop",
    "launch",
    "parallel",
    "planner",
    "report",
    "shard",
    "testing",
)

register_with_torch()


def __getattr__(name: str) -> Any:
    """Look up a public name at its first use.

    They need torch, which takes seconds to import; `shardwise --help` and `--version` do not.
    """
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _PACKAGES:
        return importlib.import_module(f"shardwise.{name}")
    front = importlib.import_module("shardwise.front")
    if name == "__all__" or name in front.__all__:
        return globals().setdefault(name, getattr(front, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    front = importlib.import_module("shardwise.front")
    return [*front.__all__, *_PACKAGES, "__version__"]
