"""Registers our tensors with torch, once torch is imported.

`torch.load(weights_only=True)` calls only what is on torch's list of safe globals, and
`get_model_state_dict` gathers only torch's DTensors. `import shardwise` imports neither torch nor
its own tensors, so registration waits for the import of the torch modules concerned.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Add the functions that unpickle our tensors to torch's list."""
    from torch.serialization import add_safe_globals

    from shardwise.core.placements import MaskPartial, NormPartial, Partial, Replicate, Shard

    modules = ("dtensor.tensor", "shard.tensor", "simulation.local_tensor")
    classes = (MaskPartial, NormPartial, Partial, Replicate, Shard)
    add_safe_globals([*(_unpickle_of(f"shardwise.{name}") for name in modules), *classes])


def _unpickle_of(module: str) -> tuple[Callable[..., Any], str]:
    """The module's `_unpickle`, imported when it is called, and its name."""

    def unpickle(*state: Any) -> Any:
        return importlib.import_module(module)._unpickle(*state)

    return unpickle, f"{module}._unpickle"


def register_with_torch() -> None:
    """Register with torch now, or when it is imported."""
    _after("torch", lambda _: register())
    _after("torch.distributed.checkpoint.state_dict", _know_state_dicts)


def _know_state_dicts(module: ModuleType) -> None:
    from shardwise.interop.dtensors import install

    install(module)


def _after(name: str, then: Callable[[ModuleType], None]) -> None:
    if name in sys.modules:
        then(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Import(name, then))


class _Import(MetaPathFinder):
    """Calls a function after other finders have imported a module."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._call_after(spec.loader)
        return spec

    def _call_after(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = run
            run(module)
            sys.meta_path.remove(self)
            self.then(module)

        # On this loader only: find_spec(name) alone imports nothing.
        loader.exec_module = exec_module
