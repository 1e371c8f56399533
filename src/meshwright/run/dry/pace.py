"""Pace: how far work has come, said now and then while it lasts."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 3.0  # between two lines: few enough to read, and often enough to know that it goes on


class Pace:
    """Says the lines it is told through `say`, but none within SECONDS of another or of its beginning."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self._next = time.monotonic() + SECONDS

    def tell(self, line: Callable[[], str]) -> None:
        """The line is made where it is time for one."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + SECONDS
            self.say(line())
