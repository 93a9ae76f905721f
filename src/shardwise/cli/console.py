"""The output of commands: the console, error messages, and reports as tables."""

from __future__ import annotations

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from shardwise.errors import (
    CheckpointError,
    CollectiveError,
    LaunchError,
    ShardwiseError,
    printable,
)

#: In a pipe, lines may be as long as tables need.
PIPE_WIDTH = 200


class _Escaping(Console):
    """Escapes terminal control sequences, which names from files may contain."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            ours = segment.control is not None or segment.text.isprintable()
            yield segment if ours else segment._replace(text=printable(segment.text))


def console() -> Console:
    """rich looks at NO_COLOR and at the width of the terminal itself."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _Escaping(width=PIPE_WIDTH if piped else None, highlight=False)


#: Files that are not the user's.
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    str(Path(__file__).parents[1]),
)

#: Exit statuses: the request is wrong; something broke while it ran.
MISTAKE, BROKE = 2, 3


def exit_status(error: Exception) -> int:
    """The exit status of a command that raised."""
    broke = isinstance(error, (LaunchError, CollectiveError, CheckpointError, OSError))
    return BROKE if broke else MISTAKE


def message(error: Exception) -> str:
    """One paragraph: what is wrong, and in which line of the user's files."""
    return printable(_message(error))


def _message(error: Exception) -> str:
    notes = " ".join(getattr(error, "__notes__", ()))
    if isinstance(error, (ShardwiseError, OSError)):
        return f"{error} {notes}".rstrip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith(_LIBRARIES)]
    where = "".join(f" ({each.filename}:{each.lineno})" for each in (own or frames)[-1:])
    text = f"{type(error).__name__}: {error}{where} {notes}".rstrip()
    return f"{text}\nshardwise --debug shows the traceback."
