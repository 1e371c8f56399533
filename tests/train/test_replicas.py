"""The end of a run of replicas: who missed its last step takes it from the others before any of them leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.train import replicas
from meshwright.train.events import Ending, StepDone
from meshwright.train.replicas import Handed, ReplicaRun, Seat

LAST = StepDone(step=7, tokens=70, loss=1.5, grad_norm=0.5, learning_rate=0.1, seconds=0.2, memory_bytes=3.0)


class Others:
    """They meet this one as often as `commits` says whether what was summed is whole; at `heals`, first their state
    comes."""

    def __init__(self, commits: list[bool], *, heals: Callable[[], None] | None = None) -> None:
        self._commits, self._heals = commits, heals
        self.summed: list[Tensor] = []

    def meet(self) -> Seat:
        if self._heals is not None:
            self._heals()
            self._heals = None
        return Seat(index=1, count=2, formed=1)

    def sum(self, x: Tensor) -> None:
        self.summed.append(x)

    def commit(self) -> bool:
        return self._commits.pop(0)


def run_of(monkeypatch: pytest.MonkeyPatch, others: Others, *, last: StepDone | None) -> ReplicaRun:
    """A run of which nothing is there but what ends it."""
    nothing = SimpleNamespace(tensors={"x": torch.ones(2)}, settle=lambda: None)
    monkeypatch.setattr(replicas, "portable", lambda *_: nothing)
    monkeypatch.setattr(ReplicaRun, "_try", lambda *_: pytest.fail("the run has ended"))
    monkeypatch.setattr(ReplicaRun, "progress", lambda self: {"step": self.state.step})
    monkeypatch.setattr(ReplicaRun, "stand", lambda self, progress: setattr(self.state, "step", progress["step"]))
    run: Any = object.__new__(ReplicaRun)
    run.laid = run.optimizer = run.present = run.observer = run.ending = run.missed = None
    run.replicas, run.last, run.closed, run.tells = others, last, False, False
    run.marker = SimpleNamespace(mark=lambda **_: None)
    run.learners = SimpleNamespace(mesh=SimpleNamespace(rank=0))
    run.ledger = SimpleNamespace(own_read=3)
    run.state = SimpleNamespace(step=0 if last is None else last.step)
    made: ReplicaRun = run
    return made


def test_nobody_leaves_before_all_have_met_for_the_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Others([False, False, True])
    run = run_of(monkeypatch, others, last=LAST)
    assert run._give().progress["replica"]["last"] is None
    stopping = run.stop(Ending.FINISHED)
    assert (stopping.step, stopping.ending, len(others.summed)) == (7, Ending.FINISHED, 3)
    assert run._give().progress["replica"]["last"]["step"] == 7


@pytest.mark.parametrize("ending", [Ending.FINISHED, Ending.SIGNALLED])
def test_who_missed_the_last_step_has_it_and_ends_with_the_others(
    ending: Ending, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = run_of(monkeypatch, Others([True]), last=LAST)
    gone.stop(ending)
    given = gone._give()
    others = Others([False, True], heals=lambda: behind._take(Handed(tensors=given.tensors, progress=given.progress)))
    behind = run_of(monkeypatch, others, last=None)
    assert behind.step() == replace(LAST, stop_asked=ending is Ending.SIGNALLED)
    assert (behind.state.step, len(others.summed)) == (7, 2)
    behind.stop(ending)
    assert len(others.summed) == 2, "it has met them for the last time"
