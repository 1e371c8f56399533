"""Token: a word left in a run directory, which those who see the directory know, and may read as its owner alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from meshwright.spec.errors import EnvironmentUnfit, Problem

_NAME = "meeting"


def leave(run_dir: Path) -> str:
    """The word that is now in `run_dir`. Raises EnvironmentUnfit where nothing can be written there."""
    word = secrets.token_hex(16)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fresh = run_dir / f"{_NAME}.partial"
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(word)
        fresh.replace(run_dir / _NAME)
    except OSError as error:
        raise EnvironmentUnfit(
            Problem(what="nothing can be written there", where=str(run_dir), why=str(error))
        ) from None
    return word


def read(run_dir: Path) -> str:
    """The word in `run_dir`; "" where none can be read."""
    try:
        return (run_dir / _NAME).read_text()
    except OSError:
        return ""
