"""Corrupt checkpoints that a run passed over: once others are saved in their place nothing else tells of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from meshwright.spec.incident import Incident, Trouble
from meshwright.train.events import Action, Event, Started
from meshwright.train.observe import incidents

_FIX = "see the disk and the memory of its machine; meshwright audit reads every byte of the others"


class PassedOver:
    """On rank 0: each is an incident of the step that the run goes on from."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def react(self, event: Event) -> Iterable[Action]:
        if not isinstance(event, Started):
            return ()
        for problem in event.passed_over:
            told = Incident(
                trouble=Trouble.CHECKPOINT,
                begun=event.step,
                ended=event.step,
                at=time.time(),
                what=f"{problem.what}, passed over",
                evidence=(problem.why,),
                fix=_FIX,
            )
            incidents.keep(self._run_dir, told)
        return ()
