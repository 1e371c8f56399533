"""Known: what a step gave before its optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The loss, the norm of the gradients and how many targets there were, the same on every rank; what is `unusual` of
    them, in words."""

    loss: float
    norm: float
    num_targets: int
    unusual: str = ""

    @property
    def sound(self) -> bool:
        finite = math.isfinite(self.loss) and math.isfinite(self.norm)
        return self.num_targets > 0 and finite and not self.unusual
