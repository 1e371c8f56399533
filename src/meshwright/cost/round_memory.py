"""What learners keep to meet: where they went from, the outer optimizer's momentum, and what is on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from meshwright.cost.holding import Moment
from meshwright.cost.meeting import round_figures
from meshwright.cost.states import state_bytes
from meshwright.cost.table import IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import ModelSpec
from meshwright.spec.synchronize import dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundBytes:
    """Bytes on every rank, shape (rows, ranks): `kept` for good, `travelling` beside training, and those of a `moment`
    between two steps, when a fragment lands or sets out. Where ranks may change a rank keeps what it sent, `sent`, and
    a copy in memory has those `copied`."""

    kept: FloatArray
    travelling: FloatArray
    moment: FloatArray
    sent: FloatArray
    copied: FloatArray

    def between(self, gradients: FloatArray, fixed: FloatArray, *, gathered: FloatArray) -> Moment:
        """Between two steps the last one's `gradients` and `fixed` buffers are still there, and none of the parameters
        that were `gathered`."""
        nothing = np.zeros_like(self.moment)
        buffers = fixed + self.moment
        return Moment(gradients=gradients, activations=nothing, logits=nothing, buffers=buffers, freed=gathered)


def round_bytes(
    table: PlanTable, owned: FloatArray, *, model: ModelSpec, largest: Callable[[], FloatArray]
) -> RoundBytes | None:
    """Of ranks that own so many trained parameters, `largest` of them of one block, all (rows, ranks); None where no
    row has learners. A fragment is of whole blocks, and of a rank the largest has the share that it has of the model.

    Copies have no less than four bytes an element. What rounding leaves is kept of all that is sent and of the part
    whose sum a rank owns; rounded numbers on their way lie there as they are sent and as they are received, and
    when they land as the sums that a rank sent and all that came. What
    travels in as many bits as a copy has, and is waited for, is the learner's own copy.
    """
    learners = table.learners
    apart = learners > 1
    if not table.has_learners or not apart.any():
        return None
    figures, wide = round_figures(table.syncs, table.sync, table.every), state_bytes(table).wide
    left = np.where(figures.rounded, 1.0 + 1.0 / learners, 0.0)
    each = figures.block_bytes / figures.block
    travels, late = np.where(figures.rounded, 2.0 * each, figures.sent), figures.delay > 0
    waits = np.where(late | (figures.sent >= wide), 0.0, travels)
    landed = np.where(figures.rounded, (1.0 + 1.0 / learners) * each - travels, 0.0)
    moment = np.maximum(figures.moment * wide + landed, figures.stepping * wide - travels) + waits
    away = np.where(late, travels, 0.0)
    share = _largest_shares(figures.fragments, model=model)[:, None]
    fragment = np.where(share < 1.0, np.maximum(share * owned, largest()), owned)
    amounts = {
        "kept": (owned, (figures.kept + left) * wide),
        "travelling": (fragment, away),
        "moment": (fragment, moment),
        "sent": (owned, late * wide),
        "copied": (owned, (figures.kept + late) * wide),
    }
    found = {name: on * np.where(apart, each, 0.0)[:, None] for name, (on, each) in amounts.items()}
    return RoundBytes(**found)


def _largest_shares(fragments: IntArray, *, model: ModelSpec) -> FloatArray:
    """The largest fragment's share of the model's parameters, of so many fragments."""
    sizes = [block.parameters for block in model.blocks]
    counts, inverse = np.unique(fragments, return_inverse=True)
    largest = [max(sum(sizes[index] for index in part) for part in dealt(sizes, parts=count)) for count in counts]
    return (np.array(largest) / sum(sizes))[inverse]
