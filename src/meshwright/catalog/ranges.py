"""Which numbers of a job, and of a plan written by hand, are possible at all, whatever the model and the cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from meshwright.catalog.figures import brief, numbers
from meshwright.catalog.low_rank import low_rank_problems
from meshwright.catalog.migrations import NEWEST
from meshwright.catalog.model_ranges import model_problems
from meshwright.catalog.shorthand import checked
from meshwright.spec.compression import compression_problems
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import Interval, JobSpec, NonFinite, Spike, Unlike
from meshwright.spec.plan import Design
from meshwright.spec.skip import MOST_SKIPPED, ROUNDED, Swap

AT_LEAST_ONE = (
    "sequence_length",
    "batch_tokens",
    "total_tokens",
    "checkpoint.keep",
    "non_finite.most_in_a_row",
    "spike.most_in_a_row",
    "evaluation.tokens",
    "elastic.copies_every",
    "optimizer.steps",
    "synchronize.most_every",
)
ABOVE_ZERO = (
    "peer_timeout_seconds",
    "spike.deviations",
    "optimizer.learning_rate",
    "optimizer.epsilon",
    "optimizer.clip_norm",
    "optimizer.clip_update",
    "optimizer.epsilon_squared",
    "optimizer.decay_exponent",
)
AT_LEAST_ZERO = (
    "z_loss",
    "verify.every_steps",
    "seed",
    "optimizer.weight_decay",
    "checkpoint.every_steps",
    "checkpoint.keep_every_steps",
    "synchronize.every",
    "synchronize.quorum",
    "synchronize.grace_seconds",
    "evaluation.every_steps",
    "elastic.min_ranks",
    "elastic.replacements",
    "learning_rate.warmup_steps",
)
MOST_SEEDS = 2**63
MOST_SECONDS = 30 * 24 * 3600
FRACTIONS = (
    "learning_rate.warmup_fraction",
    "learning_rate.decay_fraction",
    "learning_rate.final_fraction",
)
BELOW_ONE = (
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.momentum",
    "data.validation_fraction",
    "synchronize.most_left_out",
)


def checked_job(job: JobSpec) -> JobSpec:
    """The job itself. Raises ConfigError with every number in it that no job can have."""
    problems = [*number_problems(job), *low_rank_problems(job)]
    if job.skip.share == 0 and job.skip.swap is not Swap.NONE:
        what = f"{job.skip.swap.value} changes places of stages and nothing is left out"
        problems.append(Problem(what=what, where="skip.swap", fix="set skip.share above 0, or choose none"))
    if faint := job.data.faintest:
        problems.append(Problem(what=faint, where="data.sources", fix="leave such sources out, or give them more"))
    problems += _roll_back_problems(job)
    if job.checkpoint.every_steps > 0 and job.checkpoint.interval is Interval.GOODPUT:
        what, fix = "every_steps says it already", "leave one of the two out"
        problems.append(Problem(what=what, where="checkpoint.interval", fix=fix))
    if 1 <= job.total_tokens < job.batch_tokens:
        what = f"{job.total_tokens:,} is less than the {job.batch_tokens:,} tokens of one step"
        fix = f"choose {job.batch_tokens} tokens or more, or a smaller batch_tokens"
        problems.append(Problem(what=what, where="total_tokens", fix=fix))
    if problems:
        raise ConfigError(problems)
    return job


def number_problems(job: JobSpec) -> Iterator[Problem]:
    """Every value that no job can have, whatever else the job says."""
    yield from (_problem(path, job, "is not at least 1") for path in _of(AT_LEAST_ONE, job) if not _at(job, path) >= 1)
    if not 1.0 <= job.constraints.slowdown < math.inf:
        fix = "a large number asks for the least whatever it takes"
        yield replace(_problem("constraints.slowdown", job, "is not finite and at least 1"), fix=fix)
    for path in _of(ABOVE_ZERO, job):
        if not _above_zero(_at(job, path)):
            yield _problem(path, job, "is not finite and above 0")
    for path in AT_LEAST_ZERO:
        if not _from_zero(_at(job, path)):
            yield _problem(path, job, "is not finite and from 0")
    yield from (_problem(path, job, "is not from 0 to 1") for path in FRACTIONS if not 0 <= _at(job, path) <= 1)
    for path in _of(BELOW_ONE, job):
        if not 0 <= _at(job, path) < 1:
            yield _problem(path, job, "is not from 0 to below 1")
    for path, number in numbers(job):
        if MOST_SEEDS <= number < math.inf and path not in ("seed", "peer_timeout_seconds"):
            yield Problem(what=f"{brief(number)} is more than any job has", where=path)
    yield from _group_problems(job)
    for index, compression in enumerate(job.synchronize.compressions):
        yield from compression_problems(compression, where=f"synchronize.compressions[{index}]")
    if not 0 <= job.skip.share <= MOST_SKIPPED + ROUNDED:
        why = "models that leave out more were not shown to learn as well (2502.19913)"
        what = f"{job.skip.share} is not from 0 to a third"
        yield Problem(what=what, where="skip.share", why=why, fix="choose 0.25, or 0 for none")
    if _above_zero(job.peer_timeout_seconds) and not 1 <= job.peer_timeout_seconds <= MOST_SECONDS:
        what = f"{job.peer_timeout_seconds} is not from 1 second to {MOST_SECONDS:,}, a month"
        yield Problem(what=what, where="peer_timeout_seconds")
    if job.seed >= MOST_SEEDS:
        what = f"{job.seed} is not below 2^63, from where two seeds would draw the same"
        yield Problem(what=what, where="seed")
    if job.spike.window < 4:
        what = f"{job.spike.window} steps are too few to tell a leap from"
        yield Problem(what=what, where="spike.window", fix="choose 4 or more")
    for index, source in enumerate(job.data.sources):
        if not _above_zero(source.weight):
            where = f"data.sources[{index}].weight"
            yield Problem(what=f"{source.weight} is not finite and above 0", where=where, fix="leave the source out")


def _roll_back_problems(job: JobSpec) -> Iterator[Problem]:
    """Whoever goes back to a checkpoint has one; and who verifies them the one before the newest."""
    verifies = job.verify.every_steps > 0 and job.verify.policy is Unlike.ROLL_BACK
    going_back = {
        "non_finite.policy": job.non_finite.policy is NonFinite.ROLL_BACK,
        "spike.policy": job.spike.policy is Spike.ROLL_BACK,
        "verify.policy": verifies,
    }
    for where, goes_back in going_back.items():
        if goes_back and not job.checkpoint.on_the_way:
            others = "stop" if where == "verify.policy" else "stop or skip"
            what = "there is no checkpoint on the way to roll back to"
            fix = f"set checkpoint.every_steps, or choose {others}"
            yield Problem(what=what, where=where, fix=fix)
    if verifies and job.checkpoint.keep < 2:
        what = "the newest checkpoint may be of ranks that differ, and no other is kept"
        yield Problem(what=what, where="checkpoint.keep", fix="keep 2 or more, or choose verify.policy = stop")


def checked_design(design: Design) -> Design:
    """The design itself. Raises ConfigError with every number of its job and its plan that none can have.

    What is left to the rules of legality is a plan with a stage, a block group in each, and sizes from 1.
    """
    problems = [*_schema_problems(design), *_plan_problems(design), *model_problems(design.model, "model")]
    for name, check in (("job", lambda: checked_job(design.job)), ("cluster", lambda: checked(design.cluster))):
        try:
            check()
        except ConfigError as error:
            problems += [replace(problem, where=f"{name}.{problem.where}") for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return design


def _of(paths: tuple[str, ...], job: JobSpec) -> tuple[str, ...]:
    """Those of `paths` that the job's kind of optimizer has."""
    own = {f"optimizer.{field.name}" for field in fields(job.optimizer)}
    return tuple(path for path in paths if not path.startswith("optimizer.") or path in own)


def _group_problems(job: JobSpec) -> Iterator[Problem]:
    for index, group in enumerate(job.optimizer.groups):
        where = f"optimizer.groups[{index}]"
        if not group.names:
            yield Problem(what="names no parameter", where=f"{where}.names", fix="give a pattern, or leave it out")
        for name in ("learning_rate_factor", "weight_decay"):
            value = getattr(group, name)
            if value is not None and not _from_zero(value):
                yield Problem(what=f"{value} is not finite and from 0", where=f"{where}.{name}")


def _schema_problems(design: Design) -> Iterator[Problem]:
    """Documents inside a design are as old as it is: none of another schema can be read."""
    yield from _schema("", design.schema, NEWEST["Design"])
    for name, document in (("model", design.model), ("cluster", design.cluster), ("job", design.job)):
        yield from _schema(name, document.schema, NEWEST[type(document).__name__])
    yield from _schema("plan", design.plan.schema, NEWEST["Plan"])


def _schema(name: str, schema: int, newest: int) -> Iterator[Problem]:
    if schema != newest:
        why = f"this meshwright reads schema {newest}"
        yield Problem(what=f"schema {schema} is not known", where=f"{name}.schema".lstrip("."), why=why)


def _plan_problems(design: Design) -> Iterator[Problem]:
    plan = design.plan
    sizes = {
        "plan.sequence_length": plan.sequence_length,
        "plan.microbatch": plan.microbatch,
        "plan.schedule.microbatches": plan.schedule.microbatches,
        "plan.schedule.chunks": plan.schedule.chunks,
        **{f"plan.axes[{index}].size": axis.size for index, axis in enumerate(plan.axes)},
    }
    for where, size in sizes.items():
        if size < 1:
            yield Problem(what=f"{size} is not at least 1", where=where, fix="choose 1 or more")
    devices, blocks = design.cluster.num_devices, len(design.model.blocks)
    for index, axis in enumerate(plan.axes):
        if axis.size > max(devices, 1):
            what = f"{axis.size:,} is more than the {devices:,} devices of the cluster"
            yield Problem(what=what, where=f"plan.axes[{index}].size")
    if plan.schedule.chunks > blocks:
        what = f"{plan.schedule.chunks:,} is more than the {blocks} blocks of the model"
        yield Problem(what=what, where="plan.schedule.chunks")
    lists = {
        "plan.stages": plan.stages,
        **{f"plan.stages[{index}].groups": stage.groups for index, stage in enumerate(plan.stages)},
    }
    for where, entries in lists.items():
        if not entries:
            yield Problem(what="is empty", where=where, fix="give at least one")


def _at(job: JobSpec, path: str) -> Any:
    value: Any = job
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _above_zero(value: float | None) -> bool:
    """None means that the limit is off."""
    return value is None or 0 < value < math.inf


def _from_zero(value: float) -> bool:
    return 0 <= value < math.inf


def _problem(path: str, job: JobSpec, what: str) -> Problem:
    return Problem(what=f"{_at(job, path)} {what}", where=path)
