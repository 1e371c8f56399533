"""What learners keep to meet: where they went from, the outer optimizer's momentum, and what is on its way."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.holding import Moment
from meshwright.cost.meeting import round_figures
from meshwright.cost.states import state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray

# Copies of a fragment that an outer step needs for a moment: what is a learner's own, what sets out, the mean that came
# back, and the step that is made of it.
_COPIES = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBytes:
    """Bytes on every rank, shape (rows, ranks): `kept` for good, `travelling` beside training, and those of a `moment`
    between two steps, when a fragment lands or sets out."""

    kept: FloatArray
    travelling: FloatArray
    moment: FloatArray

    def between(self, gradients: FloatArray, fixed: FloatArray) -> Moment:
        """Between two steps the last one's `gradients` and `fixed` buffers are still there."""
        nothing = np.zeros_like(self.moment)
        return Moment(gradients=gradients, activations=nothing, logits=nothing, buffers=fixed + self.moment)


def round_bytes(table: PlanTable, owned: FloatArray) -> RoundBytes | None:
    """Of ranks that own so many trained parameters (rows, ranks); None where no row has learners.

    Copies have no less than four bytes an element. What rounding to eight bits leaves is kept of all that is sent and
    of the part whose sum a rank owns; numbers on their way lie there as they are sent and as they are received.
    """
    learners = table.learners
    apart = learners > 1
    if not table.has_learners or not apart.any():
        return None
    figures, wide = round_figures(table.syncs, table.sync, table.every), state_bytes(table).wide
    left = np.where(figures.eight, 1.0 + 1.0 / learners, 0.0)
    flat = np.where(figures.eight, 2.0, figures.sent) / figures.fragments
    copies = _COPIES * wide / figures.fragments + np.where(figures.delay > 0, 0.0, flat)
    columns = ((figures.kept + left) * wide, np.where(figures.delay > 0, flat, 0.0), copies)
    kept, travelling, moment = (owned * np.where(apart, each, 0.0)[:, None] for each in columns)
    return RoundBytes(kept=kept, travelling=travelling, moment=moment)
