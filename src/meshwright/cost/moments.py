"""The moments of a step that may be the peak of memory, and what lives in each of them."""

from __future__ import annotations

import numpy as np

from meshwright.cost.holding import Held, Moment
from meshwright.cost.moments_eager import EagerMoments
from meshwright.cost.software import Software
from meshwright.cost.states import StateBytes, States, state_bytes
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind


def moments(table: PlanTable, found: States, entry: Held, *, kind: DeviceKind, software: Software) -> list[Moment]:
    """Every moment of a step that may be the peak."""
    if software.eager:
        return EagerMoments(table, found, entry, kind=kind, software=software).all()
    return _fused(found, entry, sizes=state_bytes(table), software=software)


def _fused(found: States, entry: Held, *, sizes: StateBytes, software: Software) -> list[Moment]:
    """The loss, the head's backward, a layer's backward, the embedding's backward, the optimizer's step.

    Gradients have their buffer already. The head's product writes a stand-in of its weight's shape, and the table's
    gradient is whole before it is added: both in the precision that multiplies. A loss that is not fused has the
    logits beside their exponentials, and their gradient in the precision that multiplies later.
    """
    master, compute = sizes.master[:, None], sizes.compute[:, None]
    given = 0.0 * entry.one_logits if software.fused_loss else entry.one_logits * compute / np.maximum(compute, 4.0)
    nothing = np.zeros_like(master * entry.kept)

    def moment(activations: FloatArray, logits: FloatArray, buffers: FloatArray) -> Moment:
        return Moment(gradients=found.before, activations=activations, logits=logits, buffers=entry.fixed + buffers)

    return [
        moment(entry.kept, entry.logits + given, nothing),
        moment(entry.kept, entry.logits + given, entry.head_working + entry.head * compute),
        moment(entry.kept - entry.head_kept, entry.logits - entry.one_logits, entry.working),
        moment(entry.kept - entry.one_kept, entry.logits - entry.one_logits, entry.embedding * compute),
        Moment(gradients=found.after, activations=nothing, logits=nothing, buffers=entry.fixed + found.step),
    ]
