"""Unequal devices on one machine: each host's processes get a share of its cores, by control groups."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_MICROSECONDS = 10_000  # short, so that a worker that has used its share waits for no more than this
_LEAST_MICROSECONDS = 1_000


class Quotas:
    """Control groups of hosts, each with its cores; up from making to `down`. `available` says whether they can be."""

    def __init__(self, cores: Sequence[float]) -> None:
        base = _writable()
        self.available = base is not None
        self.folders: list[Path] = []
        if base is None:
            return
        _sweep(base)
        for index, each in enumerate(cores):
            folder = base / f"meshwright-lab-{os.getpid()}-{index}"
            folder.mkdir()
            self.folders.append(folder)
            micros = max(_LEAST_MICROSECONDS, int(each * _PERIOD_MICROSECONDS))
            if (folder / "cpu.max").exists():
                (folder / "cpu.max").write_text(f"{micros} {_PERIOD_MICROSECONDS}")
            else:
                (folder / "cpu.cfs_period_us").write_text(str(_PERIOD_MICROSECONDS))
                (folder / "cpu.cfs_quota_us").write_text(str(micros))

    def enter(self, index: int) -> tuple[str, ...]:
        """The words before a command that put it, and all it starts, under host `index`'s share."""
        if not self.available:
            return ()
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folders[index] / "cgroup.procs"))

    def down(self) -> None:
        """The groups are gone, unless a process still runs in one."""
        for folder in self.folders:
            with suppress(OSError):
                folder.rmdir()
        self.folders = []


def _sweep(base: Path) -> None:
    """Groups of labs that were killed are gone."""
    for folder in base.glob("meshwright-lab-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            with suppress(OSError):
                folder.rmdir()


def _writable() -> Path | None:
    """Where control groups with a share of processors can be made: version 1's tree, or version 2's."""
    first = _ROOT / "cpu"
    if (first / "cpu.cfs_quota_us").exists() or (first / "cgroup.procs").exists():
        return first if os.access(first, os.W_OK) else None
    controllers = _ROOT / "cgroup.subtree_control"
    if not controllers.exists() or not os.access(_ROOT, os.W_OK):
        return None
    with suppress(OSError):
        controllers.write_text("+cpu")
        return _ROOT
    return None
