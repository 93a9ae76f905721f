"""Loading: match a state with the index, check what it needs on all ranks, then copy it.

Note [Nothing is half loaded]
Names, shapes, groups of optimizers and the checksums of all needed bytes are checked on every rank
before the first value is written. Then objects with a `load_state_dict` of their own are loaded: if
one fails on any rank, all ranks put the objects back as they were. Tensors of modules, plain
tensors and the state of optimizers come last, when nothing is left that could refuse them. What one
rank finds wrong, all raise.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.checkpoint.crew import Crew, current_crew
from shardwise.checkpoint.index import read_index
from shardwise.checkpoint.matching import Matching
from shardwise.checkpoint.read import Reader, ReadRequest
from shardwise.checkpoint.saving import wait_for_saves
from shardwise.errors import CheckpointError, CheckpointWarning


def load(state: Any, path: str | os.PathLike[str], *, strict: bool = True) -> Any:
    """Read a checkpoint into a state, and return the state with the plain values that were saved.

    Tensors are written in place, in whatever layout, mesh and world they have now; objects get
    their `load_state_dict`. Every rank calls it and reads what its own shards need. A dict may have
    fewer keys than were saved; within a module and an optimizer, names must match unless `strict`
    is False. The state of an optimizer goes by the names of its parameters in the modules of
    `state`. Hugging Face's folders and single safetensors files are read too.
    """
    crew = current_crew()
    matching = Matching(strict)

    def look_up() -> list[_Found]:
        wait_for_saves()
        matching.index = read_index(Path(path).absolute())
        matching.match_all(state)
        matching.raise_faults()
        found = _Found(os.fspath(path), matching.index.digest, matching.unused)
        return [found] * len(crew.present)

    found = crew.together(look_up)
    for rank, each in enumerate(found):
        if (each.path, each.digest) != (found[0].path, found[0].digest):
            raise CheckpointError(
                f"Ranks 0 and {rank} see different checkpoints: {found[0].path} and {each.path}."
            )
    if strict:
        _check_all_used(found)
    with Reader(matching.index) as reader:
        _fill(matching, reader, crew)
    for text in matching.warnings if crew.leads else ():
        warnings.warn(text, CheckpointWarning, stacklevel=2)
    return matching.finish()


def _fill(matching: Matching, reader: Reader, crew: Crew) -> None:
    """See Note [Nothing is half loaded]."""
    first: list[ReadRequest] = []
    last: list[ReadRequest] = []

    def step(run: Callable[[], None]) -> Callable[[], list[None]]:
        @functools.wraps(run)
        def on_this_rank() -> list[None]:
            with torch.no_grad():
                run()
            return [None] * len(crew.present)

        return on_this_rank

    def check() -> None:
        first.extend(matching.requests(crew, matching.object_targets))
        last.extend(matching.requests(crew, matching.targets))
        reader.check([*first, *last])

    crew.together(step(check))
    before = [torch.clone(request.target) for request in first]

    def load_objects() -> None:
        reader.fill(first)
        matching.load_objects()

    def load_rest() -> None:
        reader.fill(last)
        matching.load_rest()

    try:
        crew.together(step(load_objects))
    except BaseException:
        with torch.no_grad():
            for request, value in zip(first, before, strict=True):
                request.target.copy_(value)
            matching.unload_objects()
        raise
    crew.together(step(load_rest))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a rank sees: the checkpoint, and per optimizer the saved keys that it does not use."""

    path: str
    digest: int
    unused: dict[str, frozenset[Any]]


def _check_all_used(found: Sequence[_Found]) -> None:
    """Raise where an optimizer has state of parameters that no rank has."""
    names = dict.fromkeys(name for each in found for name in each.unused)
    for name in names:
        left = frozenset.intersection(*(e.unused[name] for e in found if name in e.unused))
        if left:
            shown = ", ".join(map(str, sorted(left, key=str)[:6]))
            raise CheckpointError(
                f"{name or 'The optimizer'} was saved with {len(left)} parameters that it does not "
                f"have here, such as {shown}. Load with strict=False to leave them out."
            )
