"""LossScale: what losses of fp16 are multiplied by before they go backward, so that small gradients are not lost in it
(1710.03740)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.outer import OuterSync
from meshwright.spec.report import LineName
from meshwright.train.known import Known
from meshwright.train.observe.whereabouts import Section

if TYPE_CHECKING:
    from meshwright.train.run import Run

_START = 16
_MOST = 24
_GROWS_AFTER = 2000


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Two to the power of `exponent`: one less at each overflow, one more after 2000 steps in a row without one. `held`
    are those steps."""

    exponent: int = _START
    held: int = 0

    @property
    def value(self) -> float:
        return 2.0**self.exponent

    def shrink(self) -> None:
        """Gradients overflowed."""
        self.exponent, self.held = self.exponent - 1, 0

    def hold(self) -> None:
        """A step was done in fp16."""
        self.held += 1
        if self.held == _GROWS_AFTER:
            self.exponent, self.held = min(self.exponent + 1, _MOST), 0

    def meet(self, outer: OuterSync, *, device: torch.device) -> None:
        """Learners go on with the least of theirs, so that a checkpoint holds that of all. Collective."""
        own = torch.tensor([self.exponent, self.held], device=device)
        self.exponent, self.held = outer.over_learners(own, op=dist.ReduceOp.MIN).tolist()

    def to_dict(self) -> dict[str, int]:
        return {"exponent": self.exponent, "held": self.held}

    def load(self, values: Mapping[str, Any]) -> None:
        """It is the one that `to_dict` told of; where it told of none, as when a run begins."""
        self.exponent = min(max(int(values.get("exponent", _START)), 0), _MOST)
        self.held = min(max(int(values.get("held", 0)), 0), _GROWS_AFTER - 1)


def computed(run: Run, batch: tuple[Tensor, Tensor, Tensor | None, Tensor | None], *, number: int) -> Known:
    """What the batch of step `number` gave; its gradients are in place, clipped.

    Where gradients of fp16 overflow, the same batch goes again at half the scale: no sequence is lost.
    """
    clip_norm, scales = run.design.job.optimizer.clip_norm, run.laid.dtypes.scales_losses
    while True:
        run.marker.mark(step=number, section=Section.MODEL)
        torch.manual_seed(run.state.random_seed)
        loss = run.laid.step(*batch, number=number, loss_scale=run.loss_scale.value)
        with run.profiler.section(LineName.OPTIMIZER):
            run.marker.mark(step=number, section=Section.NORM)
            known = run.known(loss, run.laid.clip(clip_norm), run.laid.num_targets)
        overflowed = math.isfinite(known.loss) and not math.isfinite(known.norm)
        if not (overflowed and scales and run.loss_scale.exponent):
            if scales and known.sound:
                run.loss_scale.hold()
            return known
        run.laid.undo()
        run.loss_scale.shrink()
        run.pending["loss_scale"] = run.loss_scale.value
        if run.observer is not None:
            again = f"its batch goes again with losses {run.loss_scale.value:,.0f} times as large"
            run.observer.say(f"gradients of step {number} overflowed fp16; {again}")
