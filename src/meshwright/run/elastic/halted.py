"""Halted: workers whose processes are stopped, as by SIGSTOP, and for how long they are seen so."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import psutil

_LOOK_SECONDS = 0.25
_MOST_SECONDS = 2.0  # of one look: while this process is suspended nobody is watched


@dataclass(slots=True, kw_only=True)
class Halted:
    """Of workers by name. One that computes between two looks was not stopped all the while, and begins anew."""

    clock: Callable[[], float] = time.monotonic
    _looked: float = 0.0
    _computed: dict[str, float] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)

    @property
    def is_due(self) -> bool:
        """Whether it is time for another look."""
        return self.clock() - self._looked >= _LOOK_SECONDS

    def forget(self) -> None:
        """Nobody waits for them."""
        self._looked, self._computed, self._seconds = self.clock(), {}, {}

    def look(self, processes: Mapping[str, psutil.Process]) -> Mapping[str, float]:
        """The seconds for which those of `processes` are stopped that are."""
        passed = min(self.clock() - self._looked, _MOST_SECONDS)
        before, self._looked = self._computed, self.clock()
        self._computed = {name: _spent(process) for name, process in processes.items() if is_stopped(process)}
        self._seconds = {
            name: self._seconds[name] + passed if before.get(name) == spent else 0.0
            for name, spent in self._computed.items()
        }
        return self._seconds


def _spent(process: psutil.Process) -> float:
    """Seconds of processors that it has had: what its children go on with is not its own."""
    try:
        spent = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(spent.user + spent.system)


def is_stopped(process: psutil.Process) -> bool:
    """Whether it was told to stand still; one that has ended is not."""
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
