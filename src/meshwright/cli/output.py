"""What commands print: one JSON document, or rich renderables in the width of the terminal."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 140


def print_json(document: Any) -> None:
    """The one JSON document of a command on standard output."""
    from meshwright.spec.codec import encode

    print(json.dumps(encode(document), indent=1))


def console() -> Console:
    """A console on standard output: colours on a terminal alone, and never when NO_COLOR is set.

    Where there is no terminal, lines are as wide as COLUMNS says, else 140.
    """
    from rich.console import Console

    if sys.stdout.isatty():
        return Console(highlight=False)
    width = shutil.get_terminal_size(fallback=(PIPE_COLUMNS, 24)).columns
    return Console(highlight=False, width=width, color_system=None)


def note(text: str) -> None:
    """A line for a person, out of the way of what a program reads."""
    print(text, file=sys.stderr)
