"""What a pass of a block waits for beside its own work, line by line: exposed seconds and whole ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.exchanges import Exchanged
from meshwright.cost.offload import Copies
from meshwright.cost.overlap import Contention, Pass, Slack, Traffic, passed
from meshwright.cost.work import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Seconds that a device works in a pass, and for which it stalls until its host has started all; shape (rows,)."""

    work: FloatArray
    stall: FloatArray

    @property
    def whole(self) -> FloatArray:
        return self.work + self.stall

    def __add__(self, other: Timed) -> Timed:
        return Timed(work=self.work + other.work, stall=self.stall + other.stall)

    def times(self, factor: FloatArray) -> Timed:
        return Timed(work=self.work * factor, stall=self.stall * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """Seconds of one pass of a block beside its work; arrays of shape (rows,).

    `tensor`, `context`, `experts` and `copies` (to the host's memory and back) are exposed; `whole_tensor`,
    `whole_context`, `whole_experts` and `whole_copies` hold hidden seconds too. `slack` is what the pass leaves free
    for parameters and gradients.
    """

    tensor: FloatArray
    context: FloatArray
    experts: FloatArray
    copies: FloatArray
    whole_tensor: FloatArray
    whole_context: FloatArray
    whole_experts: FloatArray
    whole_copies: FloatArray
    slack: Slack

    @property
    def seconds(self) -> FloatArray:
        """All that is exposed."""
        return self.tensor + self.context + self.experts + self.copies


def waited(
    timed: Timed,
    exchanged: Exchanged,
    *,
    copies: Copies,
    contention: Contention,
    hides_experts: bool,
) -> Waited:
    """What a pass that is `timed` waits for, with copies to the host's memory."""
    nothing = Traffic.none(copies.seconds)
    served, hidden = (nothing, exchanged.experts) if hides_experts else (exchanged.experts, nothing)
    late = passed(
        Pass(
            work=timed.work,
            stall=timed.stall,
            waits=exchanged.tensor + exchanged.context + served,
            ring=exchanged.ring + exchanged.beside,
            late=exchanged.late + exchanged.held_up,
            tokens=hidden,
            copies=copies.seconds,
            lanes=copies.lanes,
            memory=copies.memory,
        ),
        contention,
    )
    delays = exchanged.late + exchanged.held_up
    features = late.ring * exchanged.held_up / np.where(delays > 0.0, delays, 1.0)
    return Waited(
        tensor=exchanged.tensor.whole + features,
        context=exchanged.context.whole + (late.ring - features),
        experts=served.whole + late.tokens,
        copies=late.copies,
        whole_tensor=exchanged.tensor.whole + exchanged.beside.whole,
        whole_context=exchanged.context.whole + exchanged.ring.whole,
        whole_experts=exchanged.experts.whole,
        whole_copies=copies.seconds,
        slack=late.slack,
    )
