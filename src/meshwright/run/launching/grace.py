"""Grace: how long before machines are taken away a run has to save."""

from __future__ import annotations

import math

from meshwright.run.launching.ask import Ask
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.report import Report
from meshwright.spec.units import format_seconds

# Ranks agree to stop, files are closed, processes end. Signals of SLURM's come up to a minute early, never late.
SLACK_SECONDS = 60.0
_ROUND = 30.0
_STEPS = 2.0  # the one under way, and the one after which all ranks know that one was asked
_SAVES = 2.0  # the last one that may still be written, and the one asked for
_FORWARD = 0.5  # of a step, at most: a backward takes as long as a forward and longer


def grace_seconds(ask: Ask, *, job: JobSpec, predicted: Report) -> int:
    """Seconds that are asked for, else what two steps, an evaluation and two saves are predicted to take and a minute
    of slack.

    Raises ConfigError where the whole time is no longer than that.
    """
    grace = ask.grace_seconds
    if grace is None:
        save = predicted.outlook.write_seconds if predicted.outlook is not None else 0.0
        steps = _STEPS + _FORWARD * _batches(job, predicted)
        needed = SLACK_SECONDS + steps * predicted.step_seconds + _SAVES * save
        grace = _ROUND * math.ceil(needed / _ROUND)
    if ask.time_seconds is not None and grace >= ask.time_seconds:
        told = f"{format_seconds(ask.time_seconds)} of which {format_seconds(grace)} are kept to save in"
        fix = "ask for more time, or say with --grace how long a step and a save take at most"
        raise ConfigError(Problem(what=f"no time is left to train: {told}", where="--time", fix=fix))
    return math.ceil(grace)


def _batches(job: JobSpec, predicted: Report) -> int:
    """Of an evaluation that may be under way."""
    return max(1, job.evaluation.tokens // predicted.tokens_per_step) if job.evaluation.every_steps else 0
