"""Workers of one launch: which of them run, and which have ended and how, known before their agent says so."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_BUSY = (psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP)


@dataclass(slots=True)
class Asked:
    """Whether workers were asked to stop, how often by a signal that means it the second time, and were killed."""

    once: bool = False
    insisted: int = 0
    at_once: bool = False


class Worker:
    """One of them. `ended` is when that was known, `code` its exit code as the agent has it: minus a signal's number;
    None where it runs, or where the agent was asked first."""

    def __init__(self, process: psutil.Process, *, local: int, error_file: str) -> None:
        self.process, self.local, self._error_file = process, local, error_file
        self.ended: float | None = None
        self.code: int | None = None
        self._failure: ProcessFailure | None = None
        self._computed, self._busy = 0.0, 0.0
        threading.Thread(target=self._wait, name=f"worker-{local}", daemon=True).start()

    @property
    def failure(self) -> ProcessFailure | None:
        """What the agent will say of it; None where it runs or has ended well."""
        if self._failure is None and self.code:
            with suppress(Exception):  # half a file is for the agent to tell
                self._failure = ProcessFailure(
                    local_rank=self.local, pid=self.process.pid, exitcode=self.code, error_file=self._error_file
                )
        return self._failure

    @property
    def is_untold(self) -> bool:
        """Whether it has ended and the agent alone knows how."""
        return self.ended is not None and self.code is None

    @property
    def is_stopped(self) -> bool:
        try:
            return self.ended is None and bool(self.process.status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False

    def idle_seconds(self, *, since: float) -> float:
        """For how long it has waited for something and computed nothing, as far as that was asked, and since `since`
        at most, a time of the system clock."""
        with suppress(psutil.Error):
            spent = self.process.cpu_times()
            computed = spent.user + spent.system
            if computed > self._computed or self.process.status() in _BUSY:
                self._computed, self._busy = computed, time.time()
        return time.time() - max(self._busy, since)

    def _wait(self) -> None:
        # It stays to be waited for: its exit code is the agent's.
        if not hasattr(os, "waitid"):
            return
        with suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
            if found is not None:
                self.code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        self.ended = time.time()


class Workers:
    """The `count` workers of `module` that this process has started."""

    def __init__(self, count: int, *, module: str) -> None:
        self._count, self._module = count, module
        self._known: dict[int, Worker] = {}

    def look(self) -> Sequence[Worker]:
        """Those that have been there, in their order on this host; asked again and again."""
        if len(self._known) < self._count:
            for child in psutil.Process().children():
                with suppress(psutil.Error, KeyError, ValueError):
                    self._meet(child)
        return [self._known[local] for local in sorted(self._known)]

    def _meet(self, child: psutil.Process) -> None:
        if self._module not in child.cmdline() or any(child.pid == each.process.pid for each in self._known.values()):
            return
        environment = child.environ()
        local = int(environment["LOCAL_RANK"])
        self._known[local] = Worker(child, local=local, error_file=environment.get("TORCHELASTIC_ERROR_FILE", ""))
