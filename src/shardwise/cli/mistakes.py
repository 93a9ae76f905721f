"""What a person is told who made a mistake, or whose model did."""

from __future__ import annotations

import traceback

from shardwise.errors import CheckpointError, CollectiveError, LaunchError, ShardwiseError

#: What was asked for or given is wrong; something broke while it was done.
MISTAKE, BROKE = 2, 3


def exit_status(error: Exception) -> int:
    """How a command that raised ends."""
    broke = isinstance(error, (LaunchError, CollectiveError, CheckpointError, OSError))
    return BROKE if broke else MISTAKE


def message(error: Exception) -> str:
    """One paragraph: what is wrong, and where in the person's own files."""
    notes = " ".join(getattr(error, "__notes__", ()))
    if isinstance(error, (ShardwiseError, OSError)):
        return f"{error} {notes}".rstrip()
    frame = traceback.extract_tb(error.__traceback__)[-1] if error.__traceback__ else None
    where = f" ({frame.filename}:{frame.lineno})" if frame is not None else ""
    text = f"{type(error).__name__}: {error}{where} {notes}".rstrip()
    return f"{text}\nshardwise --debug shows the traceback."
