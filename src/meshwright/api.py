"""The Python API: the commands as functions that take names, files or values and return dataclasses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

if TYPE_CHECKING:
    from meshwright.export import Exported
    from meshwright.replay import Validation
    from meshwright.report import Explanation
    from meshwright.run.outcome import Outcome
    from meshwright.search import Decision


def design(
    model: ModelSpec | str, cluster: ClusterSpec | str, job: JobSpec | str | None = None, *, top: int = 10
) -> Decision:
    """The fastest plan of `model` on `cluster` for `job`, with the `top` best and why.

    Strings are what the command line takes: names, shorthand or files. None is the default job. Raises ConfigError
    for what is wrong and NoPlanFits, with the closest miss, when nothing fits.
    """
    from meshwright import catalog, search
    from meshwright.run.machine import cache_root

    return search.design(
        catalog.load_model(model) if isinstance(model, str) else model,
        catalog.load_cluster(cluster, cache=cache_root()) if isinstance(cluster, str) else cluster,
        job if isinstance(job, JobSpec) else catalog.load_job(job),
        top=top,
    )


def predict(design: Design | Path | str) -> Report:
    """What a design, or the one in a file or a run directory, costs: seconds and bytes by line."""
    from meshwright import cost

    report: Report = cost.predict(_read(design))
    return report


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

    return report.explain(path)


def export(design: Design | Path | str, *, to: str) -> Exported:
    """The plan as launch flags of `to` (torchtitan, megatron-lm or deepspeed), read back and found equal.

    Raises ConfigError for a design that breaks a rule of plans, NotExpressible with everything `to` has no words for.
    """
    from meshwright import search
    from meshwright.export import export, peer_named

    peer, found = peer_named(to), _read(design)
    if problems := search.check(found, scopes=frozenset({search.Scope.PLAN})):
        raise ConfigError(problems)
    return export(found, to=peer)


def validate(path: Path | str) -> Validation:
    """Every published run in the table at `path` predicted with nothing fitted, and scored source by source."""
    from meshwright import replay

    return replay.validate(path)


def _read(design: Design | Path | str) -> Design:
    if isinstance(design, Design):
        return design
    from meshwright import catalog

    return catalog.load_design(design)
