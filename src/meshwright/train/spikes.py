"""What losses and gradient norms of late were, and whether a step leaps above them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.spec.job import Spike, SpikeSpec

_NAMES = ("loss", "gradient norm")


@dataclass(slots=True, kw_only=True)
class Usual:
    """Losses and gradient norms of the last steps that were done, at most `spec.window`, the same on every rank.

    What is judged is that of OLMo 2 (2501.00656): a step leaps above mean and deviations of those before it.
    """

    spec: SpikeSpec
    seen: deque[tuple[float, float]] = field(default_factory=deque)

    def unusual(self, *, loss: float, norm: float) -> str:
        """`its loss of 9.31 is above 5.2, 6 deviations from the last 128` where a finite step leaps; else nothing."""
        if self.spec.policy is Spike.IGNORE or 2 * len(self.seen) < self.spec.window:
            return ""
        for name, value, before in zip(_NAMES, (loss, norm), zip(*self.seen, strict=True), strict=True):
            bound = statistics.fmean(before) + self.spec.deviations * statistics.stdev(before)
            if value > bound:
                of = f"{self.spec.deviations:g} deviations from the last {len(self.seen)}"
                return f"its {name} of {value:.4g} is above {bound:.4g}, {of}"
        return ""

    def note(self, *, loss: float, norm: float) -> None:
        """A step was done."""
        if self.spec.policy is Spike.IGNORE:
            return
        self.seen.append((loss, norm))
        while len(self.seen) > self.spec.window:
            self.seen.popleft()

    def to_dict(self) -> dict[str, Any]:
        return {"seen": [list(each) for each in self.seen]}

    def load(self, values: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """These are the steps that `to_dict` told of; none where it told of none."""
        self.seen = deque((loss, norm) for loss, norm in values.get("seen", ()))
