"""The words for styles, as plans in files and Hugging Face's `tp_plan` use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.core.placements import Replicate
from shardwise.errors import ArgumentError
from shardwise.parallel.matrix import ColwiseParallel, RowwiseParallel
from shardwise.parallel.sequence import ReplicateParallel, SequenceParallel
from shardwise.parallel.style import ParallelStyle

#: What each word makes. `_rep`: whole from the outside, whatever happens within.
WORDS: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    "sequence_parallel": SequenceParallel,
    "replicate": ReplicateParallel,
}


def style_of(entry: Any, pattern: str) -> ParallelStyle:
    """A plan's entry as a style."""
    if isinstance(entry, ParallelStyle):
        return entry
    if isinstance(entry, str):
        make = WORDS.get(entry)
        if make is not None:
            return make()
        raise ArgumentError(
            f"The plan says {entry!r} for {pattern!r}, which is no word for a style here. The "
            f"words are {', '.join(WORDS)}; or give a ParallelStyle."
        )
    raise ArgumentError(
        f"The plan gives {pattern!r} a {type(entry).__name__}; it takes a ParallelStyle or one of "
        f"the words {', '.join(WORDS)}."
    )
