"""How often a call is timed."""

import pytest

from meshwright.run import timing
from meshwright.run.timing import timed


class Clock:
    """Time that passes in calls alone: the next of `seconds` in each, and the last one in all that follow."""

    def __init__(self, *seconds: float) -> None:
        self.now, self.calls, self._seconds = 0.0, 0, list(seconds)

    def perf_counter(self) -> float:
        return self.now

    def call(self) -> None:
        self.now += self._seconds[min(self.calls, len(self._seconds) - 1)]
        self.calls += 1


@pytest.mark.parametrize(
    ("taken", "calls", "found"),
    [
        ((0.01,), 11, 0.01),  # as many as fit
        ((0.2, 0.1), 4, 0.1),  # the least
        ((5.0, 0.01), 2, 0.01),  # what only a first call costs is not counted
        ((5.0,), 2, 5.0),  # slow ones cost two calls
    ],
)
def test_slow_calls_are_timed_once(monkeypatch, taken, calls, found):
    clock = Clock(*taken)
    monkeypatch.setattr(timing, "time", clock)
    assert timed(clock.call, seconds=0.095) == pytest.approx(found)
    assert clock.calls == calls
