"""Token: a word left in a run directory, which those who see the directory know, and may read as its owner alone."""

from __future__ import annotations

import os
import secrets
from enum import Enum
from pathlib import Path

from meshwright.spec.errors import EnvironmentUnfit, Problem


class Use(Enum):
    """What a word is for, by the file that has it: drawn anew by each start, or kept as long as hosts train."""

    MEETING = "meeting"
    BOARDS = "elastic/word"


def drawn() -> str:
    return secrets.token_hex(16)


def leave(run_dir: Path, *, word: str = "", use: Use = Use.MEETING) -> str:
    """The word that is now in `run_dir`, a new one unless it is given. Raises EnvironmentUnfit where nothing can be
    written there."""
    word = word or drawn()
    kept = run_dir / use.value
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        fresh = kept.with_name(f"{kept.name}.partial")
        fresh.unlink(missing_ok=True)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(word)
        fresh.replace(kept)
    except OSError as error:
        raise EnvironmentUnfit(
            Problem(what="nothing can be written there", where=str(run_dir), why=str(error))
        ) from None
    return word


def read(run_dir: Path, *, use: Use = Use.MEETING) -> str:
    """The word in `run_dir`; "" where none can be read."""
    try:
        return (run_dir / use.value).read_text()
    except OSError:
        return ""
