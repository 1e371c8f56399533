"""The Python API: the commands as functions that take names, files or values and return dataclasses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, Gathering, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

if TYPE_CHECKING:
    from meshwright.export import Exported
    from meshwright.replay import Validation
    from meshwright.report import Comparison, Explanation
    from meshwright.run.dry_run import DryRun
    from meshwright.run.outcome import Outcome
    from meshwright.search import Decision, Headroom, Question, Sensitivity, Sweep, WhyNot
    from meshwright.search.constraints import Value


def design(
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    job: JobSpec | str | None = None,
    *,
    top: int = 10,
    trainer: str | None = None,
    synthesize: bool = False,
) -> Decision:
    """The fastest plan of `model` on `cluster` for `job`, with the `top` best and why.

    Strings are what the command line takes: names, shorthand or files. None is the default job. With a `trainer`
    (torchtitan, megatron-lm or deepspeed) all plans are such as can be exported to it. `synthesize` has a schedule made
    for the best plan's own stages, which takes its place where that pays. Raises ConfigError for what is
    wrong and NoPlanFits, with the closest miss, when nothing fits.
    """
    from meshwright import search

    asked, held = _question(model, cluster, job), None
    if trainer is not None:
        from meshwright.export import holder
        from meshwright.search.job_rules import check_job

        held = holder(trainer, where="trainer")
        check_job(asked.model, asked.cluster, asked.job, trainer=held)
    return search.design(asked.model, asked.cluster, asked.job, top=top, trainer=held, synthesize=synthesize)


def why_not(
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    job: JobSpec | str | None = None,
    *,
    settings: str | Mapping[str, Value],
) -> WhyNot:
    """Why the best plan has not these `settings` (`tp=4,pp=2`, or a mapping): what forbids them, by how much they do
    not fit, or what the best plan with them loses and where. Raises as `design` does.
    """
    from meshwright import search
    from meshwright.search.settings import read_settings

    _check_kind(settings, (str, Mapping), where="settings")
    asked, columns = _question(model, cluster, job), read_settings(settings)
    return search.why_not(asked, search.design(asked.model, asked.cluster, asked.job, top=1), columns)


def headroom(model: ModelSpec | str, cluster: ClusterSpec | str, job: JobSpec | str | None = None) -> Headroom:
    """What holds the best plan back: each limit (memory, links, batch, constraints) lifted, the most worth first."""
    from meshwright import search

    asked = _question(model, cluster, job)
    return search.headroom(asked, search.design(asked.model, asked.cluster, asked.job, top=1))


def sensitivity(model: ModelSpec | str, cluster: ClusterSpec | str, job: JobSpec | str | None = None) -> Sensitivity:
    """Each figure of the machines a quarter better: the step of the best plan, and whether another becomes best."""
    from meshwright import search

    asked = _question(model, cluster, job)
    return search.sensitivity(asked, search.design(asked.model, asked.cluster, asked.job, top=1))


def sweep(
    model: ModelSpec | str,
    cluster: ClusterSpec | str,
    job: JobSpec | str | None = None,
    *,
    over: str | Sequence[str],
) -> Sweep:
    """The best plan at every value of a path (`cluster.nodes=1,2,4`), or of two crossed. Raises as `design` does for
    a path or a value that is wrong; where nothing fits is a point without a plan.
    """
    from meshwright import search

    return search.sweep(_question(model, cluster, job), [over] if isinstance(over, str) else over)


def compare(one: Path | str, other: Path | str) -> Comparison:
    """Two designs or run directories side by side, and which is better."""
    from meshwright import report

    return report.compare(one, other)


def predict(design: Design | Path | str) -> Report:
    """What a design, or the one in a file or a run directory, costs: seconds and bytes by line.

    Raises ConfigError for a design that breaks a rule of plans.
    """
    from meshwright import cost

    report: Report = cost.predict(_legal(design))
    return report


def dry_run(design: Design | Path | str, *, full: bool = False) -> DryRun:
    """One step of the design, at any scale, counted by running it here on tensors without memory, beside what is
    predicted of it.

    `full` traces every layer and microbatch, which otherwise few of them tell. Raises ConfigError for a design that
    breaks a rule or that this runtime cannot run yet; one that does not fit is counted, and `fits` says so.
    """
    from meshwright.run.dry_run import dry_run

    return dry_run(_read(design), whole=full)


def train(
    design: Design | Path | str, *, run_dir: Path | str, resume: bool = False, steps: int | None = None
) -> Outcome:
    """Train the design on local workers in `run_dir` and say how it ended.

    `resume` goes on from the newest complete checkpoint of `run_dir`, on the same plan or another; `steps` stops
    after so many steps. Raises before anything starts when the design, the machine or the data is not fit, and
    WorkerFailed with the first failing rank's own error when a worker fails.
    """
    from meshwright.run.train import train

    return train(_read(design), run_dir=run_dir, resume=resume, steps=steps)


def explain(path: Path | str) -> Explanation:
    """What the run directory or the design file at `path` costs, predicted against measured, the worst line first."""
    from meshwright import report

    _check_kind(path, (Path, str), where="path")

    return report.explain(path)


def export(design: Design | Path | str, *, to: str) -> Exported:
    """The plan as launch flags of `to` (torchtitan, megatron-lm or deepspeed), read back and found equal.

    Raises ConfigError for a design that breaks a rule of plans, NotExpressible with everything `to` has no words for.
    """
    from meshwright.export import export, peer_named

    _check_kind(to, str, where="to")
    return export(_legal(design), to=peer_named(to))


def validate(path: Path | str) -> Validation:
    """Every published run in the table at `path` predicted with nothing fitted, and scored source by source."""
    from meshwright import replay

    return replay.validate(path)


def _read(design: Design | Path | str) -> Design:
    _check_kind(design, (Design, Path, str), where="design")
    if isinstance(design, Design):
        return design
    from meshwright import catalog

    return catalog.load_design(design)


def _legal(design: Design | Path | str) -> Design:
    """The design, which the search could answer its job with. Raises ConfigError with every rule that it breaks."""
    from meshwright import search

    found = _read(design)
    if problems := search.check_answer(found):
        raise ConfigError(problems)
    return found


def _check_kind(value: object, kinds: type | tuple[type, ...], *, where: str) -> None:
    if not isinstance(value, kinds):
        names = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
        what = f"{type(value).__name__} is no {names}"
        raise ConfigError(Problem(what=what, where=where, fix="give a name, a file or a value of these kinds"))


def _question(model: ModelSpec | str, cluster: ClusterSpec | str, job: JobSpec | str | None) -> Question:
    from meshwright import catalog, search
    from meshwright.run.machine import cache_root

    gathered = Gathering()
    for where, value, kind in (("model", model, ModelSpec), ("cluster", cluster, ClusterSpec)):
        gathered.attempt(partial(_check_kind, value, (kind, str), where=where))
    gathered.attempt(partial(_check_kind, job, (JobSpec, str, type(None)), where="job"))
    gathered.tell()
    spec = gathered.attempt(lambda: catalog.load_model(model) if isinstance(model, str) else model)
    machines = gathered.attempt(
        lambda: catalog.load_cluster(cluster, cache=cache_root()) if isinstance(cluster, str) else cluster
    )
    asked = gathered.attempt(lambda: job if isinstance(job, JobSpec) else catalog.load_job(job))
    gathered.tell()
    assert spec is not None
    assert machines is not None
    assert asked is not None
    return search.Question(model=spec, cluster=machines, job=asked)
