"""Token: a word left in a run directory, by which others find out whether they see the same directory."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

from meshwright.spec.errors import EnvironmentUnfit, Problem

_NAME = "meeting"
_LOOK_SECONDS = 0.2


def leave(run_dir: Path) -> str:
    """The word that is now in `run_dir`. Raises EnvironmentUnfit where nothing can be written there."""
    word = secrets.token_hex(16)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / _NAME).write_text(word)
    except OSError as error:
        raise EnvironmentUnfit(
            Problem(what="nothing can be written there", where=str(run_dir), why=str(error))
        ) from None
    return word


def finds(run_dir: Path, word: str, *, seconds: float) -> bool:
    """Whether the word comes to be seen in `run_dir` within `seconds`: network file systems show files late."""
    end = time.monotonic() + seconds
    while read(run_dir) != word:
        if time.monotonic() >= end:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def read(run_dir: Path) -> str:
    """The word in `run_dir`; "" where none can be read."""
    try:
        return (run_dir / _NAME).read_text()
    except OSError:
        return ""
