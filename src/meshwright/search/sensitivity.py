"""How far the step and the decision move when one figure of the machines does: all priced again for each."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.search import vary
from meshwright.search.candidate import TIE, Decision
from meshwright.search.constraints import Value
from meshwright.search.decide import Best
from meshwright.search.settings import differing
from meshwright.search.vary import Alter, Progress, Question
from meshwright.spec.plan import Plan

MORE = 1.25
FIGURES: tuple[tuple[str, Alter, float], ...] = (
    ("bandwidth between nodes", vary.between_nodes, MORE),
    ("bandwidth inside a node", vary.inside_nodes, MORE),
    ("peak of the device", vary.peak, MORE),
    ("memory bandwidth", vary.memory_bandwidth, MORE),
    ("memory capacity", vary.memory_bytes, MORE),
    ("latency of links", vary.latency, 2.0 - MORE),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One figure times `factor`: the step of the chosen plan, and of the best plan there.

    Changes are of the step that the chosen plan takes today: -0.1 is a tenth less. `changed` maps the columns in
    which the best plan there differs from the chosen one to both values; empty where the decision stands, a tie
    included.
    """

    figure: str
    factor: float
    step_seconds: float
    change: float
    best: Plan
    best_seconds: float
    best_change: float
    changed: dict[str, tuple[Value, Value]]

    @property
    def flips(self) -> bool:
        return bool(self.changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """Effects on a decision, the largest first."""

    plan: Plan
    step_seconds: float
    effects: tuple[Effect, ...]


def sensitivity(asked: Question, decision: Decision, *, progress: Progress = vary.silent) -> Sensitivity:
    """Each of FIGURES a quarter better: the chosen plan priced again, and the best plan there designed."""
    effects = []
    for done, (figure, alter, factor) in enumerate(FIGURES):
        progress(done, len(FIGURES), figure)
        effects.append(_effect(asked, decision, figure, alter, factor))
    progress(len(FIGURES), len(FIGURES))
    effects.sort(key=lambda effect: (min(effect.best_change, effect.change), effect.change))
    return Sensitivity(plan=decision.design.plan, step_seconds=decision.report.step_seconds, effects=tuple(effects))


def _effect(asked: Question, decision: Decision, figure: str, alter: Alter, factor: float) -> Effect:
    cluster = alter(asked.cluster, factor)
    own = vary.repriced(decision.design, cluster).step_seconds
    found = vary.best(replace(asked, cluster=cluster), explained=False)
    today = decision.report.step_seconds
    plan, seconds = decision.design.plan, own
    if isinstance(found, Best):
        seconds = min(own, found.report.step_seconds)
        if own > seconds * (1.0 + TIE):
            plan = found.design.plan
    return Effect(
        figure=figure,
        factor=factor,
        step_seconds=own,
        change=own / today - 1.0,
        best=plan,
        best_seconds=seconds,
        best_change=seconds / today - 1.0,
        changed=differing(decision.design.plan, plan),
    )
