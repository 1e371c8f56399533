"""Shares: how much each learner counts in a mean, by what it has read for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Shares:
    """What each learner has read since each fragment set out the last time, and of one that is on its way what it had
    read for that, in sequences: [fragment][learner], the same on every learner. In a step each reads `rows`.
    """

    rows: int
    since: list[list[int]]
    away: list[list[int]]

    @classmethod
    def even(cls, *, fragments: int, learners: int, rows: int) -> Shares:
        """Nobody has read anything."""
        return cls(
            rows=rows,
            since=[[0] * learners for _ in range(fragments)],
            away=[[0] * learners for _ in range(fragments)],
        )

    def step(self) -> None:
        """Every learner has done a step."""
        self.since = [[read + self.rows for read in each] for each in self.since]

    def set_out(self, fragment: int) -> None:
        self.away[fragment] = self.since[fragment]
        self.since[fragment] = [0] * len(self.since[fragment])

    def arrive(self, fragment: int) -> None:
        """Nothing of it is on its way."""
        self.away[fragment] = [0] * len(self.away[fragment])

    def scale(self, fragment: int, learner: int) -> float:
        """What `learner` multiplies its own by, so that the plain mean over all is that by sequences (2604.21428)."""
        sent = self.away[fragment]
        return sent[learner] * len(sent) / sum(sent)

    def unmet(self, learner: int) -> int:
        """Sequences that `learner` has read and that some part of what all learners go from does not have."""
        return max(since[learner] + away[learner] for since, away in zip(self.since, self.away, strict=True))

    def inherit(self, told: Mapping[str, Any], origins: Sequence[int | None]) -> None:
        """Learner i has read what learner `origins[i]` had when `told` so; nothing where that is None."""

        def of(read: Sequence[int]) -> list[int]:
            return [0 if origin is None else int(read[origin]) for origin in origins]

        self.since, self.away = [of(read) for read in told["since"]], [of(read) for read in told["away"]]

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"since": [list(read) for read in self.since], "away": [list(read) for read in self.away]}
