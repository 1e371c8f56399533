"""How long rounds have to be: a search finds them so, and a run that is slower than told makes them so."""

from __future__ import annotations

from typing import TypeVar

from meshwright.cost.work import FloatArray

RESERVE = 1.2  # times the steps that what travels takes, where the steps of a round hide it
EXPOSED = 0.05  # of all time, at most, that learners wait for what nothing hides

T = TypeVar("T", float, FloatArray)


def least_steps(waited_seconds: T, *, step_seconds: T) -> T:
    """The steps, with a fraction, beside which waiting for `waited_seconds` takes EXPOSED of the time of both."""
    return (1.0 / EXPOSED - 1.0) * waited_seconds / step_seconds
