"""Where commands print: a terminal with colours, or a pipe that gets whole lines."""

from __future__ import annotations

import os
import sys

from rich.console import Console

#: Where nobody sees the edge of a screen, lines are as long as tables need.
PIPE_WIDTH = 200


def console() -> Console:
    """rich looks at NO_COLOR and at the width of the terminal itself."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=PIPE_WIDTH if piped else None, highlight=False)
