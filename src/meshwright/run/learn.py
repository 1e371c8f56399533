"""Runs that were measured teach what predicts the next: figures of their machines move until their steps are explained.

A cluster that was never measured starts from data sheets, so that its figures may move further than those that
`cluster measure` found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright import cost
from meshwright.run.calibrate import Calibration, Observation, calibrate
from meshwright.run.files import design_of_run
from meshwright.run.outcome import read_report
from meshwright.spec.cluster import ClusterSpec, DeviceSpec
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.plan import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One run: seconds of its step as measured, as `before` foretold them and as what was learnt does."""

    run: str
    measured: float
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """The cluster with its figures moved, and every run that moved them."""

    cluster: ClusterSpec
    lessons: tuple[Lesson, ...]
    moved: tuple[tuple[str, float, float], ...]
    step_error: float


def learn(runs: Sequence[Path], *, cluster: ClusterSpec | None = None) -> Learnt:
    """What the steps of `runs`, folders that `train` wrote, say of the machines that they ran on.

    The figures are those of `cluster`, else of the largest that a run was planned for; each may move as far as in
    `calibrate`, and what the steps are off by that had no part in it is kept as the cluster's step_error. Raises
    ConfigError where a folder is no run or has no measured step, and where machines differ.
    """
    designs = [design_of_run(run) for run in runs]
    seconds = [_measured(run) for run in runs]
    base = cluster or max((design.cluster for design in designs), key=lambda known: known.num_devices)
    for run, design in zip(runs, designs, strict=True):
        _require_like(design, base, where=str(run))
    observations = [Observation(design=design, seconds=value) for design, value in zip(designs, seconds, strict=True)]
    stamp = f"learnt from {', '.join(run.resolve().name for run in runs)}"
    found = calibrate(base, observations, stamp=stamp)
    missed = _left_out(base, observations)
    source = "; ".join(filter(None, (base.source, stamp)))
    return Learnt(
        cluster=replace(found.cluster, source=source, step_error=missed),
        lessons=tuple(_lessons(runs, observations, base, found)),
        moved=found.moved,
        step_error=missed,
    )


def _left_out(base: ClusterSpec, observations: Sequence[Observation]) -> float:
    """The root mean square of log(foretold / measured) of every run, foretold by what the others teach."""
    missed = []
    for index, seen in enumerate(observations):
        others = [*observations[:index], *observations[index + 1 :]]
        on = calibrate(base, others, stamp="").cluster
        missed.append(math.log(cost.predict(replace(seen.design, cluster=on)).step_seconds / seen.seconds))
    return math.sqrt(math.fsum(error * error for error in missed) / len(missed))


def _lessons(
    runs: Sequence[Path], observations: Sequence[Observation], base: ClusterSpec, found: Calibration
) -> list[Lesson]:
    def foretold(on: ClusterSpec) -> list[float]:
        reports = cost.predict_all([replace(seen.design, cluster=on) for seen in observations])
        return [report.step_seconds for report in reports]

    return [
        Lesson(run=str(run), measured=seen.seconds, before=before, after=after)
        for run, seen, before, after in zip(runs, observations, foretold(base), foretold(found.cluster), strict=True)
    ]


def _measured(run: Path) -> float:
    report = read_report(run / "measured.json")
    if report is None or not report.step_seconds > 0.0:
        raise ConfigError(
            Problem(
                what="this run has no measured step",
                where=str(run),
                why="measured.json is written when a run ends, and holds the steps after the first few",
                fix="let it go on for some steps: meshwright train --resume",
            )
        )
    return report.step_seconds


def _require_like(design: Design, base: ClusterSpec, *, where: str) -> None:
    """Raises ConfigError where the design ran on other machines than `base` has, or on more."""
    own, theirs = (_only_device(known, where=where) for known in (design.cluster, base))
    if own.name != theirs.name:
        raise ConfigError(
            Problem(
                what=f"this run was on {own.name}, and what is learnt is of {theirs.name}",
                where=where,
                fix="learn from runs on one kind of machine at a time",
            )
        )
    if design.plan.world_size > base.num_devices:
        fix = "name the machines with --cluster, as many as the largest run had"
        what = f"this run had {design.plan.world_size} devices, and {base.name!r} has {base.num_devices}"
        raise ConfigError(Problem(what=what, where=where, fix=fix))


def _only_device(cluster: ClusterSpec, *, where: str) -> DeviceSpec:
    if len(cluster.groups) > 1:
        raise ConfigError(
            Problem(
                what=f"{cluster.name!r} has several kinds of machines",
                where=where,
                why="a step does not tell which of them took so long",
                fix="measure them: meshwright cluster measure --across",
            )
        )
    return cluster.groups[0].device
