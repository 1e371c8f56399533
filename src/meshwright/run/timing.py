"""Times on a machine that others use too: many short repeats, and of them a low quantile."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds of one call over `repeats`: the fastest, the lower quartile, and the median."""

    best: float
    quartile: float
    median: float
    repeats: int


def timed(
    call: Callable[[], object],
    *,
    seconds: float,
    least: int = 3,
    most: int = 200,
    finish: Callable[[], object] | None = None,
) -> Timed:
    """Calls `call` for about `seconds`, at least `least` and at most `most` times after one that is not counted.

    `finish` is called before each clock is read, for devices that run behind the host.
    """
    call()
    if finish is not None:
        finish()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(found) < least or (len(found) < most and time.perf_counter() < deadline):
        start = time.perf_counter()
        call()
        if finish is not None:
            finish()
        found.append(time.perf_counter() - start)
    found.sort()
    return Timed(best=found[0], quartile=found[len(found) // 4], median=found[len(found) // 2], repeats=len(found))
