"""The backends by name."""

from __future__ import annotations

from shardwise.embedding.backend import Backend
from shardwise.embedding.torch_backend import TorchBackend
from shardwise.errors import ArgumentError


def make_backend(backend: str | Backend) -> Backend:
    """A backend by name, or the one that was given."""
    if not isinstance(backend, str):
        return backend
    if backend == "torch":
        return TorchBackend()
    raise ArgumentError(
        f"backend={backend!r} is not known: use 'torch', or an object with the methods of "
        "shardwise.embedding.Backend."
    )
