"""Times on a machine that others use too: many short repeats, and of them the lower quartile."""

from __future__ import annotations

import time
from collections.abc import Callable

_LONG_SECONDS = 0.25  # beside which the noise of one call is small
_LEAST, _MOST = 3, 200  # calls that are timed


def timed(
    call: Callable[[], object],
    *,
    seconds: float,
    finish: Callable[[], object] | None = None,
) -> float:
    """Lower quartile of the seconds of `call`.

    Calls it for about `seconds`, at least 3 and at most 200 times after one that is not counted. Where that
    one takes longer than all of `seconds`, and than a quarter of a second, one more has to do.

    `finish` is called before each clock is read, for devices that run behind the host.
    """

    def once() -> float:
        start = time.perf_counter()
        call()
        if finish is not None:
            finish()
        return time.perf_counter() - start

    if once() > max(seconds, _LONG_SECONDS):
        return once()
    found: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(found) < _LEAST or (len(found) < _MOST and time.perf_counter() < deadline):
        found.append(once())
    found.sort()
    return found[len(found) // 4]
