"""A disk that takes no more: which error says so, and which file system it is."""

from __future__ import annotations

import shutil
from pathlib import Path

from meshwright.spec.errors import FULL, EnvironmentUnfit, Problem
from meshwright.spec.units import format_bytes


def is_full(error: BaseException) -> bool:
    """The disk is full, or a limit on files or on this person's space is reached."""
    return isinstance(error, OSError) and error.errno in FULL


def no_room(error: OSError, *, folder: Path) -> EnvironmentUnfit:
    """`error` in words, of a run in `folder`."""
    return EnvironmentUnfit(
        Problem(
            what=f"nothing more can be written: {error.strerror}",
            where=str(error.filename or folder),
            why=file_system(folder),
            fix="free space there; --resume goes on from the newest checkpoint, which is kept",
        )
    )


def file_system(path: Path) -> str:
    """Where what holds `path` is mounted, and how much of it is free."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    device, mount = place.stat().st_dev, place
    while mount.parent != mount and mount.parent.stat().st_dev == device:
        mount = mount.parent
    usage = shutil.disk_usage(place)
    return f"the file system at {mount} has {format_bytes(usage.free)} of {format_bytes(usage.total)} free"
