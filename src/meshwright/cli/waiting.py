"""What long work is at, told every few seconds while it goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import copy_context

SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def told_while(work: str) -> Iterator[None]:
    """While inside, a line every few seconds on standard error says that `work` goes on and for how long it has; none
    when quiet was asked for, and none of work that is soon done."""
    from meshwright.cli.output import note

    started, done = time.monotonic(), threading.Event()

    def tell() -> None:
        while not done.wait(SECONDS_BETWEEN_LINES):
            note(f"{work}: {time.monotonic() - started:.0f} s so far")

    teller = threading.Thread(target=copy_context().run, args=(tell,), daemon=True, name="progress")
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()
