"""Which numbers of a job are possible at all, whatever the model and the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import JobSpec

AT_LEAST_ONE = ("sequence_length", "batch_tokens", "total_tokens", "checkpoint.keep", "evaluation.tokens")
ABOVE_ZERO = ("optimizer.learning_rate", "optimizer.epsilon", "optimizer.clip_norm")
AT_LEAST_ZERO = (
    "z_loss",
    "seed",
    "optimizer.weight_decay",
    "checkpoint.every_steps",
    "evaluation.every_steps",
    "learning_rate.warmup_steps",
)
FRACTIONS = (
    "data.validation_fraction",
    "learning_rate.warmup_fraction",
    "learning_rate.decay_fraction",
    "learning_rate.final_fraction",
)
BELOW_ONE = ("optimizer.beta1", "optimizer.beta2")
CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType({"constraints.devices": ("all", "any")})


def checked_job(job: JobSpec) -> JobSpec:
    """The job itself. Raises ConfigError with every number in it that no job can have."""
    problems = [
        *(_problem(path, job, "is not at least 1") for path in AT_LEAST_ONE if not _at(job, path) >= 1),
        *(_problem(path, job, "is not above 0") for path in ABOVE_ZERO if not _above_zero(_at(job, path))),
        *(_problem(path, job, "is below 0") for path in AT_LEAST_ZERO if not _at(job, path) >= 0),
        *(_problem(path, job, "is not from 0 to 1") for path in FRACTIONS if not 0 <= _at(job, path) <= 1),
        *(_problem(path, job, "is not from 0 to below 1") for path in BELOW_ONE if not 0 <= _at(job, path) < 1),
    ]
    for path, known in CHOICES.items():
        if _at(job, path) not in known:
            problems.append(Problem(what=f"{_at(job, path)!r} is not a choice", where=path, fix=nearest("", known)))
    for index, source in enumerate(job.data.sources):
        if not source.weight > 0:
            where = f"data.sources[{index}].weight"
            problems.append(Problem(what=f"{source.weight} is not above 0", where=where, fix="leave the source out"))
    if problems:
        raise ConfigError(problems)
    return job


def _at(job: JobSpec, path: str) -> Any:
    value: Any = job
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _above_zero(value: float | None) -> bool:
    """None means that the limit is off."""
    return value is None or value > 0


def _problem(path: str, job: JobSpec, what: str) -> Problem:
    return Problem(what=f"{_at(job, path)} {what}", where=path)
