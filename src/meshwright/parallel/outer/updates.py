"""What an outer step makes of a mean that came back: each way of meeting is one rule on flat tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.spec.synchronize import Rounds, SyncKind

Total = Callable[[Tensor], Tensor]  # a number summed over all that the ranks of one learner hold
# The sum of squares, (), of what this rank counts of a flat tensor, in a learner once.
Square = Callable[[Tensor], Tensor]


@dataclass(slots=True, kw_only=True)
class Held:
    """A fragment between meetings, flat: `anchor` is where all learners went from, the same on each of them.

    `momentum` is the outer optimizer's, `sent` the learner's own when what travels set out; None where not kept.
    """

    anchor: Tensor
    momentum: Tensor | None = None
    sent: Tensor | None = None


class Update(Protocol):
    """What sets out next is anchor less own after the last one has landed, or before where it `sets_out_first`; where
    `mixes`, a learner goes on from something of its own."""

    keeps_momentum: bool
    keeps_sent: bool
    sets_out_first: bool
    mixes: bool

    def land(self, held: Held, own: Tensor, change: Tensor, *, learning_rate: float) -> Tensor:
        """The anchor has made its outer step of `learning_rate` by `change`, the mean of anchor less own of all
        learners; what the learner that has `own` goes on from. Both may be written over; `own` is not read where
        nothing is mixed."""


class Nesterov:
    """SGD with Nesterov momentum on the change (2311.08105); what a learner goes on from is the anchor, or where it
    went on meanwhile, the anchor mixed with its own (2501.18512) or with its own newest progress (after 2502.12996)."""

    def __init__(self, rounds: Rounds, *, own_progress: bool) -> None:
        self._rounds = rounds
        self.keeps_momentum = rounds.momentum > 0.0
        self.keeps_sent = own_progress
        self.sets_out_first = False
        self.mixes = own_progress or rounds.own_share > 0.0

    def land(self, held: Held, own: Tensor, change: Tensor, *, learning_rate: float) -> Tensor:
        if held.momentum is not None:
            held.momentum.mul_(self._rounds.momentum).add_(change)
            change.add_(held.momentum, alpha=self._rounds.momentum)
        held.anchor.sub_(change, alpha=learning_rate)
        if held.sent is not None:
            return own.sub_(held.sent).add_(held.anchor)
        share = self._rounds.own_share
        return own.mul_(share).add_(held.anchor, alpha=1.0 - share) if self.mixes else held.anchor


class StaleGap:
    """CO2 (2401.16265): a change of the round before is divided by how stale it is, and an outer step is clipped.

    The gap is one and `penalty` times how far the anchor has moved since that change was measured, over how far the
    last outer step moved it; the norms are of the whole model, in which what several ranks hold counts once.
    """

    keeps_momentum, keeps_sent, sets_out_first, mixes = True, False, True, False

    def __init__(self, rounds: Rounds, *, total: Total, square: Square) -> None:
        self._rounds, self._total, self._square = rounds, total, square

    def land(self, held: Held, own: Tensor, change: Tensor, *, learning_rate: float) -> Tensor:
        rounds, momentum = self._rounds, held.momentum
        assert momentum is not None
        last = momentum.clamp(-rounds.clip, rounds.clip).mul_(learning_rate)
        step = self._square(last)
        moved = self._square(last.sub_(change))
        moved, step = self._total(torch.stack([moved, step])).sqrt()
        gap = 1.0 + torch.where(step > 0.0, rounds.penalty * moved / step, 0.0)
        momentum.mul_(rounds.momentum).add_(change.div_(gap))
        held.anchor.sub_(torch.clamp(momentum, -rounds.clip, rounds.clip, out=last), alpha=learning_rate)
        return held.anchor


def build_update(kind: SyncKind, rounds: Rounds, *, total: Total, square: Square) -> Update:
    """The rule of `kind`; `total` sums over the ranks of one learner what each counts."""
    if kind is SyncKind.CO2:
        return StaleGap(rounds, total=total, square=square)
    return Nesterov(rounds, own_progress=kind is SyncKind.EAGER)
