"""What workers do in the tests of low rank training: runs that switch, are killed, and go back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist

from meshwright.cost.low_rank import Candidate, Price, Verdict
from meshwright.spec.low_rank import Ranks, matrices_with_ranks
from meshwright.spec.plan import Design
from meshwright.spec.report import Line, Report
from meshwright.techniques.low_rank import runtime
from meshwright.techniques.low_rank.runtime import LowRankTraining
from meshwright.train import replan
from meshwright.train.build import Place, build
from meshwright.train.events import Action, Event, Log, StepDone
from meshwright.train.loop import fit
from meshwright.train.run import Run
from tests.parallel.parity_cases import by_name

UNPRICED = Report(
    plan="",
    step=Line(name="step", seconds=1.0),
    memory=(),
    tokens_per_step=1,
    devices=1,
    model_flops=1.0,
    peak_flops=None,
)


class Killed(Exception):
    """The run was killed here."""


@dataclass
class Diary:
    """The losses of a run by step, what was said, and the parameters that its model had; kills it where it is asked to.

    `kill` is the step after which nothing is done any more, or of the checkpoint after which nothing is.
    """

    run: Run
    kill: tuple[type[Event], int] | None = None
    spoil: Callable[[int, float], float] = lambda _step, loss: loss
    losses: dict[int, float] = field(default_factory=dict)
    parameters: dict[int, int] = field(default_factory=dict)

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, StepDone):
            self.losses[event.step] = event.loss
            self.parameters[event.step] = self.run.design.model.parameters
        if self.kill is not None and isinstance(event, self.kill[0]) and event.step == self.kill[1]:
            raise Killed
        return ()


@dataclass
class Spoilt:
    """A technique that is shown other losses than the run has."""

    inner: LowRankTraining
    losses: Callable[[int, float], float]
    said: list[str]
    name: str = "low_rank"

    def attach(self, run: Run) -> None:
        self.inner.attach(run)

    def react(self, event: Event) -> Iterable[Action]:
        if isinstance(event, StepDone):
            event = replace(event, loss=self.losses(event.step, event.loss))
        actions = list(self.inner.react(event))
        self.said.extend(action.text for action in actions if isinstance(action, Log))
        return actions

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def as_it_is(_step: int, loss: float) -> float:
    return loss


def higher_after(step: int, loss: float) -> float:
    """Losses of a factored model that learned nothing."""
    return loss + 9.0 if step > 8 else loss


def accepted(design: Design, _found: Iterable[Candidate], ranks: Ranks, *, gain: float) -> Verdict:
    """Low rank pays, whatever it costs."""
    factored = replace(design, model=design.model.with_ranks(ranks))
    dense, paid = (Price(seconds=seconds, collective_bytes=seconds) for seconds in (2.0, 1.0))
    return Verdict(design=factored, dense=dense, factored=paid, whole=(), gain=gain)


def ran(
    design: Design,
    folder: str,
    kills: tuple[tuple[type[Event], int], ...] = (),
    losses: Callable[[int, float], float] = as_it_is,
) -> dict[str, Any]:
    """A run to its end that is killed and goes on as often as `kills` says; its losses and what it is in the end."""
    known: dict[int, float] = {}
    sizes: dict[int, int] = {}
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "verdict", accepted)
        patch.setattr(replan.cost, "predict", lambda _design: UNPRICED)
        for kill in (*kills, None):
            technique = Spoilt(inner=LowRankTraining(design), losses=losses, said=said)
            place = Place(
                rank=dist.get_rank() if dist.is_initialized() else 0,
                device=torch.device("cpu"),
                run_dir=Path(folder),
                cache=Path(folder) / "cache",
                screen=sys.stderr,
            )
            run = build(
                design, place=place, predicted=UNPRICED, max_steps=None, stop_asked=bool, techniques=(technique,)
            )
            diary = Diary(run=run, kill=kill, losses=known, parameters=sizes)
            run.reactors = (diary, *run.reactors)
            try:
                fit(run)
            except Killed:
                run.store.wait()
                run.loader.close()
    held = by_name([(name, p.detach()) for name, p in run.laid.named_parameters()])
    found = {
        "losses": known,
        "parameters": sizes,
        "said": said,
        "held": held,
        "ranks": matrices_with_ranks(run.design.model),
        "decays": sorted(group["weight_decay"] for group in run.optimizer.param_groups),
        "kept": sorted(path.name for path in (Path(folder) / "checkpoints").iterdir()),
    }
    run.close()
    return found


def same_bits(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Losses and parameters of two runs."""
    held, other = first["held"], second["held"]
    alike = held.keys() == other.keys() and all(numpy.array_equal(held[name], other[name]) for name in held)
    return alike and first["losses"] == second["losses"]
