"""Choose a design for this machine: measured if it never was, the best plan that the runtime can train."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright import catalog, search
from meshwright.run.detect import calibration_file
from meshwright.run.machine import cache_root
from meshwright.run.preflight import check_job
from meshwright.search.fields import of_cluster, set_cluster
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, NoPlanFits, Problem
from meshwright.spec.job import JobSpec, Source
from meshwright.spec.plan import Design

MEASURE_SECONDS = 50.0
LOCAL = "local"  # how this machine is called
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A design to train and how it came about; `decision` is None for a design that was given without one."""

    design: Design
    decision: search.Decision | None = None


def choose(
    model: str, *, cluster: str, job: JobSpec, measure: bool, say: Say, cluster_sets: Sequence[str] = ()
) -> Chosen:
    """The fastest design of `model` on `cluster`, with `cluster_sets` in force, for `job` that can be trained.

    This machine is measured for some seconds first when `measure` asks for it, or when it never was. Raises what
    check_job and search.design raise, and NoPlanFits when nothing that fits can be trained yet.
    """
    spec = catalog.load_model(model)
    check_job(job)
    machines = load_cluster(cluster, measure=measure, say=say)
    asked = set_cluster(search.Question(model=spec, cluster=machines, job=job), cluster_sets)
    decision = search.design(spec, asked.cluster, job, trainable=True)
    if decision.predicts_only:
        raise NoPlanFits(decision.predicts_only)
    return Chosen(design=decision.design, decision=decision)


def load_cluster(name: str, *, measure: bool, say: Say) -> ClusterSpec:
    """The cluster that `name` says; this machine with measured figures, which are kept for the next time.

    Raises ConfigError where another one is to be measured.
    """
    is_local = name.partition(":")[0] == LOCAL
    if measure and not is_local:
        what, fix = "only this machine is measured here", "meshwright cluster measure --across measures others"
        raise ConfigError(Problem(what=what, where="--measure", why=f"--cluster is {name}", fix=fix))
    if is_local and (measure or not calibration_file().is_file()):
        from meshwright.run.measure import measure as measure_machine

        say(f"measuring this machine for about {MEASURE_SECONDS:.0f} s (kept for the next time)")
        measure_machine(catalog.load_cluster(name), seconds_budget=MEASURE_SECONDS, progress=say)
    return catalog.load_cluster(name, cache=cache_root())


def with_data(job: JobSpec, files: Sequence[Path | str]) -> JobSpec:
    """The job on these files; as it is when there are none."""
    if not files:
        return job
    return replace(job, data=replace(job.data, sources=tuple(Source(path=str(file)) for file in files)))


def with_length(job: JobSpec, *, steps: int | None) -> JobSpec:
    """A job that says nothing of its length is as long as `steps`, so that its learning rate falls within them."""
    if steps is None or job.total_tokens != JobSpec().total_tokens:
        return job
    return replace(job, total_tokens=steps * job.batch_tokens)


def default_run_dir(design: Design) -> Path:
    """`runs/MODEL-PLAN` under the working directory: another plan is another directory."""
    return Path("runs") / f"{design.model.name}-{design.plan.digest()[:8]}"


def run_dir_of(design: Design, *, run: Path | None, given: Path | None, resume: bool) -> Path:
    """`run`, or where it is not named that of the design.

    Raises ConfigError where the design is that of another run, `given` in place of a plan, which is to go on.
    """
    if run is not None:
        return run
    folder = default_run_dir(design)
    if resume and given is not None and given.is_dir() and given.resolve() != folder.resolve():
        what = "is a run, given as a plan; --resume goes on with the run that --run names"
        raise ConfigError(Problem(what=what, where=str(given), fix=f"use --run {shlex.quote(str(given))}"))
    return folder


def designed(
    path: Path | None, *, model: str | None, cluster: str | None, job: Path | None, sets: Sequence[str]
) -> Design:
    """The design at `path`, or the best one of `model` on `cluster` that the runtime can train.

    Raises ConfigError where neither is named, or both are.
    """
    if path is not None:
        if model is not None or job is not None or cluster is not None:
            fix = "leave those out, or leave the plan out to design another"
            raise ConfigError(Problem(what="a plan has its model, cluster and job already", where=str(path), fix=fix))
        return catalog.load_design(path, sets=sets)
    if model is None or cluster is None:
        fix = "name a plan that `meshwright plan --out` wrote, or --model NAME --cluster NAME"
        raise ConfigError(Problem(what="nothing to count is named", fix=fix))
    machine_sets = of_cluster(sets)
    asked = catalog.load_job(str(job) if job else None, sets=[each for each in sets if each not in machine_sets])
    machines = catalog.load_cluster(cluster, cache=cache_root())
    question = search.Question(model=catalog.load_model(model), cluster=machines, job=asked)
    question = set_cluster(question, machine_sets)
    decision = search.design(question.model, question.cluster, asked, top=1, trainable=True)
    if decision.predicts_only:
        raise NoPlanFits(decision.predicts_only)
    return decision.design
