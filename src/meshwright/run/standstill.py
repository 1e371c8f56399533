"""Workers that stand still while another has ended: they cannot hear that they are to end too."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress

import psutil

_LOOKS = 4  # in a row: what stands still for a moment may end by itself


class Standstill:
    """Of the `count` workers of `module` that this process starts, once all of them have been there."""

    def __init__(self, count: int, *, module: str) -> None:
        self._count, self._module = count, module
        self._known: list[psutil.Process] = []
        self._looks: Counter[psutil.Process] = Counter()

    def end(self) -> None:
        """Asked again and again: where one worker has ended, those that stay stopped (SIGSTOP) are killed. The agent
        asks them to end, which they do not hear, and would wait for half a minute."""
        if not self._known:
            found = _workers(self._module)
            self._known = found if len(found) == self._count else []
        states = {worker: _state(worker) for worker in self._known}
        alone = not all(states.values())
        for worker, state in states.items():
            self._looks[worker] = self._looks[worker] + 1 if alone and state == psutil.STATUS_STOPPED else 0
            if self._looks[worker] == _LOOKS:
                with suppress(psutil.Error):
                    worker.kill()


def _workers(module: str) -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if module in child.cmdline():
                found.append(child)
    return found


def _state(worker: psutil.Process) -> str:
    """What the system says of it; "" where it has ended."""
    try:
        state = worker.status()
    except psutil.Error:
        return ""
    return "" if state == psutil.STATUS_ZOMBIE else state
