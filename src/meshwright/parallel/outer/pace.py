"""Pace: at which steps fragments set out and land, and rounds of another length where the network is not as told."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from meshwright.cost.round_length import RESERVE, least_steps
from meshwright.spec.synchronize import Rounds, SyncKind, as_usual


@dataclass(kw_only=True)
class Pace:
    """Rounds of so many `learners` as they are since step `origin`; `most_every` None keeps them so. After step `begun`
    all learners were one and nothing was on its way."""

    kind: SyncKind
    rounds: Rounds
    learners: int = 2
    most_every: int | None = None
    origin: int = 0
    begun: int = 0

    def departs(self, fragment: int, step: int) -> bool:
        """Fragment `fragment` sets out after step `step`."""
        every = self.rounds.every
        return step > self.origin and (step - self.origin) % every == self.rounds.starts(fragment) % every

    def away_since(self, fragment: int, step: int) -> int | None:
        """After which step it set out that is on its way after step `step` of a run that has kept these rounds; None
        where nothing is."""
        rounds, first = self.rounds, self.origin + self.rounds.starts(fragment)
        left = step - (step - first) % rounds.every
        if left < first:
            # The last fragment of the rounds before these set out where these begin.
            follows = self.origin > 0 and fragment == rounds.fragments - 1
            left = self.origin if follows else step - rounds.delay
        return left if left > self.begun and step - left < rounds.delay else None

    def at_edge(self, step: int) -> bool:
        """A round ends at `step`, or these rounds begin there."""
        return (step - self.origin) % self.rounds.every == 0

    def ends_round(self, step: int) -> bool:
        return step > self.origin and self.at_edge(step)

    def needed(self, *, travelled: int, waited: float, step_seconds: float) -> int:
        """Steps that a round should have, in which something travelled for so many or was waited for so long."""
        step_seconds = max(step_seconds, 1e-9)
        least = least_steps(waited, step_seconds=step_seconds)
        if self.rounds.delay == 0:
            return max(1, math.ceil(least - 1e-9))
        more = 0 if least <= self.rounds.delay else math.ceil(waited / step_seconds)
        return max(1, math.ceil(RESERVE * (travelled + more))) * self.rounds.fragments

    def changed(self, needed: int, *, step: int) -> Rounds | None:
        """The rounds that begin after `step`, which ends one, where they need another length: longer than these are,
        or less than half; None where they stay. None is shorter than is sound for its kind, and the outer learning rate
        follows where it was the usual one."""
        rounds = self.rounds
        if self.most_every is None or not needed:
            return None
        every = max(rounds.fragments, min(max(needed, self.kind.least_every), self.most_every))
        if rounds.every // 2 <= every <= rounds.every:
            return None
        delay = every // rounds.fragments if rounds.delay else 0
        longer = replace(rounds, every=every, delay=delay)
        self.rounds = as_usual(longer, rounds, kind=self.kind, learners=self.learners, were=self.learners)
        self.origin = step
        return self.rounds
