"""Torch's generators: which one a draw uses, digests of its state, and restoring it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


def generator_for(device: torch.device, given: torch.Generator | None) -> torch.Generator:
    """The generator that an op on `device` draws from."""
    if given is not None:
        return given
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


def digest(generator: torch.Generator, *more: object) -> int:
    """A hash of the generator's state and `more`."""
    state = generator.get_state().numpy().tobytes()
    mixed = hashlib.blake2b(state + repr(more).encode(), digest_size=8)
    return int.from_bytes(mixed.digest(), "little", signed=True)


def generator_kind(device: torch.device, given: torch.Generator | None) -> str:
    """The generators of all ranks, for messages."""
    return f"default {device.type} generators" if given is None else "given generators"


def generator_digest(device: torch.device, given: torch.Generator | None) -> int:
    """Equal on two ranks exactly when they would draw the same values on `device`."""
    generator = generator_for(device, given)
    if device.type != "cuda":
        return digest(generator)
    # A GPU's values depend on how many threads it spreads a draw over.
    made = torch.cuda.get_device_properties(device)
    return digest(generator, made.multi_processor_count, made.max_threads_per_multi_processor)


@contextlib.contextmanager
def kept(generator: torch.Generator) -> Iterator[None]:
    """Restore the generator's state afterwards."""
    state = generator.get_state()
    try:
        yield
    finally:
        generator.set_state(state)
