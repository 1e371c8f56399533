"""Outlook: a whole run to its token target, with the failures on the way, its price and its energy."""

from __future__ import annotations

from dataclasses import dataclass

BILLION = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a run comes to; None where a figure that it takes is not known, and `assumed` says what was assumed.

    `goodput` is the share of the time that leads to the target: the rest goes to checkpoints, to work lost in failures
    and to restarts. Where no failure rate is known it is None, and days, dollars and energy are those of a run without
    failures. A checkpoint stops training for `stall_seconds` every `checkpoint_seconds` of work and is safe
    `write_seconds` after it began. Energy is of the devices alone, times what the building adds.
    """

    tokens: int
    days: float
    goodput: float | None
    hours_between_failures: float | None
    failures: float | None
    checkpoint_bytes: float
    checkpoint_seconds: float | None
    stall_seconds: float
    write_seconds: float
    restart_seconds: float
    dollars: float | None
    kilowatt_hours: float | None
    assumed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.days * 86400.0

    @property
    def checkpoint_hurries(self) -> bool:
        """Whether checkpoints are asked for before the last is written, so that training waits for it."""
        every = self.checkpoint_seconds
        return every is not None and self.stall_seconds < self.write_seconds and every < self.write_seconds * (1 - 1e-9)

    @property
    def dollars_per_billion(self) -> float | None:
        """Dollars for a billion tokens."""
        return None if self.dollars is None or not self.tokens else self.dollars / self.tokens * BILLION

    @property
    def kilowatt_hours_per_billion(self) -> float | None:
        """Kilowatt hours for a billion tokens."""
        return None if self.kilowatt_hours is None or not self.tokens else self.kilowatt_hours / self.tokens * BILLION
