"""Lets files with DTensors and sharded tensors load with `weights_only=True`.

`torch.load` calls only what is on torch's list of safe globals. `import shardwise` imports neither
torch nor its own tensors, so it registers functions that import them when a file needs them: at
once if torch is imported, otherwise as soon as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def register() -> None:
    """Add what unpickles our tensors to torch's list."""
    from torch.serialization import add_safe_globals

    from shardwise.core.placements import MaskPartial, NormPartial, Partial, Replicate, Shard

    add_safe_globals(
        [
            (_dtensor, "shardwise.dtensor.tensor._unpickle"),
            (_sharded_tensor, "shardwise.shard.tensor._unpickle"),
            *(MaskPartial, NormPartial, Partial, Replicate, Shard),
        ]
    )


def register_with_torch() -> None:
    """`register`, now or when torch is imported."""
    if "torch" in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _TorchImport())


def _dtensor(*state: Any) -> Any:
    from shardwise.dtensor.tensor import _unpickle

    return _unpickle(*state)


def _sharded_tensor(*state: Any) -> Any:
    from shardwise.shard.tensor import _unpickle

    return _unpickle(*state)


class _TorchImport(MetaPathFinder):
    """Calls `register` after other finders have imported torch."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            self._register_after(spec.loader)
        return spec

    def _register_after(self, loader: Any) -> None:
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = run
            run(module)
            sys.meta_path.remove(self)
            register()

        # On this loader only: find_spec("torch") alone imports nothing.
        loader.exec_module = exec_module
