"""Moments of one backward, told by what is kept and made in each beside what the backward begins with."""

from __future__ import annotations

import numpy as np

from meshwright.cost.holding import Moment
from meshwright.cost.peak_parts import Beside
from meshwright.cost.work import FloatArray


class Told:
    """Moments of one backward: units that are `done` have their gradients, those `dropped` no whole parameters."""

    def __init__(
        self,
        at: Beside,
        buffers: FloatArray,
        *,
        grown: FloatArray,
        freed: FloatArray,
        beyond: FloatArray | float = 0.0,
    ) -> None:
        self.at, self.buffers, self.left = at, buffers, at.logits - at.stage.one_logits
        self.adds_experts = np.any(at.apart) and at.stage.experts.any()
        self.grown, self.freed = grown if grown.any() else None, freed if freed.any() else None
        self.beyond = beyond

    def moment(
        self,
        activations: FloatArray,
        buffers: FloatArray,
        *,
        logits: FloatArray | None = None,
        done: FloatArray | float = 0.0,
        dropped: FloatArray | None = None,
        unit: FloatArray | float = 0.0,
    ) -> Moment:
        """`dropped` are those `done` unless it is told; beside those a `unit` of experts has its gradients."""
        return Moment(
            gradients=self._gradients(done, unit),
            activations=activations,
            logits=self.left if logits is None else logits,
            buffers=self.buffers + buffers,
            freed=self.at.freed
            if self.freed is None
            else self.at.freed + self.freed * (done if dropped is None else dropped),
            here=self.at.here,
        )

    def _gradients(self, done: FloatArray | float, unit: FloatArray | float) -> FloatArray:
        found = self.at.gradients
        found = found if self.grown is None else found + self.grown * (done + unit)
        if np.any(self.beyond):
            found = found + self.beyond * (self.at.stage.units * layers_done(self.at, done) + unit)
        return found + experts_grown(self.at, done) if self.adds_experts else found


def experts_grown(at: Beside, done: FloatArray | float) -> FloatArray:
    """Bytes of gradients of experts apart when units that are `done` have theirs: those of the layers among them."""
    return np.asarray(at.apart * at.stage.experts * layers_done(at, done))


def layers_done(at: Beside, done: FloatArray | float) -> FloatArray:
    """The part of a stage's layers that are among what is `done`."""
    stage = at.stage
    layers = np.maximum(stage.made - stage.head_made - stage.embedding, 1.0)
    return np.asarray(np.clip((done - stage.head_made) / layers, 0.0, 1.0))
