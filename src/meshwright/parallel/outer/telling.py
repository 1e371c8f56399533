"""Telling: what learners tell each other every few steps, and that all of them go from the same bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from meshwright.spec.errors import Problem, WorkerFailed
from meshwright.spec.synchronize import TOLD_BYTES

_CHANGED = "a byte changed on its way or in memory"
_MISSED = "they met unlike numbers of times"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """The most that any learner told: what it is asked for, whether it had a spoilt step; the fewest steps that one
    needs a round to have, 0 where one cannot tell; and of what it goes from a fingerprint, and how often parts of it
    have landed."""

    asked: int
    spoilt: bool
    needed: int
    fingerprint: int
    landings: int


class Telling:
    """What learner `learner` tells the others over `group`, and hears of them one telling later."""

    def __init__(self, group: dist.ProcessGroup, *, learner: int, device: torch.device) -> None:
        self._group, self._learner, self._device = group, learner, device
        self._told: torch.Tensor | None = None
        self._work: dist.Work | None = None

    def forget(self) -> None:
        """What was told before counts for nothing."""
        self._told = self._work = None

    def wait(self) -> None:
        """Nothing of it is on the network. Collective."""
        if self._work is not None:
            self._work.wait()

    def tell(self, said: Said) -> None:
        """`said` is on its way. Collective."""
        prints, landings = said.fingerprint, said.landings
        told = [said.asked, int(said.spoilt), prints, -prints, landings, -landings, -said.needed]
        self._told = torch.tensor(told, dtype=torch.int64, device=self._device)
        assert self._told.nbytes == TOLD_BYTES
        self._work = dist.all_reduce(self._told, op=dist.ReduceOp.MAX, group=self._group, async_op=True)

    def hear(self, *, step: int) -> Said | None:
        """What was told the last time; None where nothing was. Collective. Raises WorkerFailed where learners went from
        unlike bits then."""
        if self._told is None:
            return None
        self.wait()
        asked, spoilt, largest, smallest, most, fewest, fewest_needed = self._told.tolist()
        if (largest, most) != (-smallest, -fewest):
            raise self._unlike(step, why=_MISSED if most != -fewest else _CHANGED)
        return Said(asked=asked, spoilt=spoilt > 0, needed=-fewest_needed, fingerprint=largest, landings=most)

    def compare(self, fingerprint: int, *, step: int, why: str = _CHANGED) -> None:
        """Collective. Raises WorkerFailed where that of another learner is not the same, for which `why` may be why."""
        both = torch.tensor([fingerprint, -fingerprint], device=self._device)
        self.wait()
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        largest, smallest = both.tolist()
        if largest != -smallest:
            raise self._unlike(step, why=why)

    def _unlike(self, step: int, *, why: str) -> WorkerFailed:
        what = f"learners went from unlike parameters when step {step} was done"
        fix = "--resume goes on from the last checkpoint"
        return WorkerFailed(Problem(what=what, where=f"learner {self._learner}", why=why, fix=fix))
