"""Incident: what went wrong while a run went on, who had it, since when, how that is known, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trouble(StrEnum):
    """What is the matter."""

    LOST = "lost rank"
    RANK = "slow rank"
    LINK = "slow link"
    DATA = "waiting for data"
    DISK = "slow disk"
    CHECKPOINT = "corrupt checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """From step `begun` to step `ended`, None while it lasts or where the run ended first.

    `ranks` and `hosts` are whose it is, `ratio` how many times as long something takes; `at` is seconds of the system
    clock. `what` says it in words, `evidence` how it is known, `fix` what may be done.
    """

    trouble: Trouble
    begun: int
    at: float
    what: str
    ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    ratio: float = 1.0
    evidence: tuple[str, ...] = ()
    fix: str = ""
    ended: int | None = None

    @property
    def line(self) -> str:
        """What a person reads."""
        return "; ".join((self.what, *self.evidence))
