"""What a person is told who made a mistake, or whose model did."""

from __future__ import annotations

import traceback

from shardwise.errors import ShardwiseError


def message(error: Exception) -> str:
    """One paragraph: what is wrong, and where in the person's own files."""
    notes = " ".join(getattr(error, "__notes__", ()))
    if isinstance(error, (ShardwiseError, OSError)):
        return f"{error} {notes}".rstrip()
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({frame.filename}:{frame.lineno})" if frame is not None else ""
    text = f"{type(error).__name__}: {error}{where} {notes}".rstrip()
    return f"{text}\nshardwise --debug shows the traceback."
