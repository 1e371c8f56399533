"""A file that a person named: written whole, or left as it was, and why it could not be written."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.spec.errors import FULL, ConfigError, EnvironmentUnfit, MeshwrightError, Problem


def write_whole(path: Path, text: str) -> None:
    """`path` holds `text` in UTF-8 and keeps its permissions; where that fails it holds what it held before.

    What is no plain file (a pipe, a device), or is in a folder that takes no other file, is written in place. Raises
    OSError.
    """
    content, target = text.encode("utf-8", errors="replace"), path.resolve()
    fresh = target.with_name(f"{target.name}.partial")
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    try:
        stream = fresh.open("wb")
    except OSError as error:
        if error.errno in FULL:
            raise
        target.write_bytes(content)
        return
    try:
        with stream:
            stream.write(content)
        if target.exists():
            shutil.copymode(target, fresh)
        fresh.replace(target)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def unwritten(error: OSError, *, where: Path | str, what: str = "cannot be written", fix: str = "") -> MeshwrightError:
    """`error` in words, of the file `where`: EnvironmentUnfit for a disk that is full, else ConfigError."""
    told = f"{what}: {error.strerror or error}"
    if error.errno in FULL:
        return EnvironmentUnfit(Problem(what=told, where=str(where), fix="free space there"))
    return ConfigError(Problem(what=told, where=str(where), fix=fix))
