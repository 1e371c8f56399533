"""What a job says that does nothing, for something else that it says or leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from meshwright.catalog.idle_choices import ONE_OF_TWO, WHAT, learners_ruled_out, unread_choices
from meshwright.spec.errors import Problem
from meshwright.spec.job import Decay, JobSpec, NonFinite, Spike
from meshwright.spec.synchronize import SyncKind

_USUAL = JobSpec()
_LEAVE = "leave it out"


def idle(job: JobSpec) -> tuple[Problem, ...]:
    """Every field of the job that is not at its default and yet changes nothing, with why and what would let it."""
    found = (unread_choices(job), _rounds(job), _rate(job), _saves(job), _checks(job), _trouble(job), _changes(job))
    return tuple(problem for group in found for problem in group)


def _rounds(job: JobSpec) -> Iterator[Problem]:
    asked, fixed = job.synchronize, job.constraints.fix.get("sync")
    words = [kind.value for kind in asked.kinds] if fixed is None else [str(fixed)]
    if not any(kind.has_learners and kind.value in words for kind in SyncKind):
        why, fix = "learners meet so, and the job allows none", 'allow them with synchronize.kinds = ["diloco"]'
        if any(kind.has_learners for kind in asked.kinds):
            fix = "let constraints.fix.sync name one of synchronize.kinds"
        yield from _said(job, "synchronize", ("every", "most_every", "precision"), why, fix)
    elif ruled := learners_ruled_out(job):
        why = f"learners meet so, and {ruled} leaves none"
        names = ("every", "most_every", "precision", "quorum", "grace_seconds", "most_left_out")
        yield from _said(job, "synchronize", names, why, ONE_OF_TWO)
    elif asked.every > 0:
        yield from _said(job, "synchronize", ("most_every",), "synchronize.every says how many steps", _LEAVE)


def _rate(job: JobSpec) -> Iterator[Problem]:
    shape, total = job.learning_rate, job.total_steps
    if shape.decay is not Decay.WSD:
        why = f"wsd alone has it, and decay is {shape.decay.value}"
        yield from _said(job, "learning_rate", ("decay_fraction",), why, 'choose learning_rate.decay = "wsd"')
    if shape.decay is Decay.CONSTANT and shape.final_fraction < 1.0:
        why, fix = "the learning rate is constant after warm-up", 'choose learning_rate.decay = "cosine"'
        yield from _said(job, "learning_rate", ("final_fraction",), why, fix)
    if shape.warmup_steps > 0 and shape.warmup_fraction > 0.0:
        yield from _said(job, "learning_rate", ("warmup_fraction",), "warmup_steps says it already", _LEAVE)
    if shape.warmup_steps > total:
        what = f"the run of {total:,} steps ends in a warm-up of {shape.warmup_steps:,}, before the whole learning rate"
        yield Problem(what=what, where="learning_rate.warmup_steps", fix=f"choose fewer than {total:,}")
        return
    warmup = shape.warmup_steps / total if shape.warmup_steps else shape.warmup_fraction
    if shape.decay is Decay.WSD and warmup + shape.decay_fraction > 1.0:
        what = f"{shape.decay_fraction:g} is more of the run than the {1 - warmup:.3g} that warm-up leaves for decay"
        yield Problem(what=what, where="learning_rate.decay_fraction", fix="choose less, or a shorter warm-up")


def _saves(job: JobSpec) -> Iterator[Problem]:
    asked, where = job.checkpoint, "checkpoint.keep_every_steps"
    if asked.keep_every_steps == 0:
        return
    if not asked.on_the_way:
        yield Problem(what=WHAT, where=where, why="nothing is saved on the way", fix="set checkpoint.every_steps")
        return
    often = math.lcm(asked.keep_every_steps, max(asked.every_steps, 1))
    if often > job.total_steps:
        why = f"no step that is saved is a multiple of it in a run of {job.total_steps:,} steps"
        yield Problem(what=WHAT, where=where, why=why, fix=_multiple(asked.every_steps))
    elif often not in (asked.keep_every_steps, asked.every_steps):
        why = f"checkpoint.every_steps is {asked.every_steps:,}"
        what = f"of the steps that are saved every {often:,}th stays, not every {asked.keep_every_steps:,}th"
        yield Problem(what=what, where=where, why=why, fix=_multiple(asked.every_steps))


def _multiple(every: int) -> str:
    return f"choose a multiple of {every:,}" if every else "choose fewer"


def _checks(job: JobSpec) -> Iterator[Problem]:
    total = job.total_steps
    for section in ("checkpoint", "evaluation", "verify"):
        if (every := getattr(job, section).every_steps) > total:
            why = f"the run has {total:,} steps"
            yield Problem(what=WHAT, where=f"{section}.every_steps", why=why, fix=f"choose fewer than {every:,}")
    if not job.data.validation_fraction:
        why = "no text is held out"
        yield from _said(job, "evaluation", ("every_steps", "tokens"), why, "set data.validation_fraction above 0")
    if not job.verify.every_steps:
        yield from _said(job, "verify", ("policy",), "ranks are never compared", "set verify.every_steps")


def _trouble(job: JobSpec) -> Iterator[Problem]:
    other = "choose another policy"
    if job.non_finite.policy is NonFinite.STOP:
        yield from _said(job, "non_finite", ("most_in_a_row",), "the first one stops the run", other)
    if job.spike.policy is Spike.IGNORE:
        names = ("deviations", "window", "most_in_a_row")
        yield from _said(job, "spike", names, "spike.policy is ignore", other)
    elif job.spike.policy is Spike.STOP:
        yield from _said(job, "spike", ("most_in_a_row",), "the first one stops the run", other)
    if not job.elastic.on:
        why = "the loss of a rank ends the run"
        yield from _said(
            job, "elastic", ("backend", "lighthouse", "copies_every", "replacements"), why, "set elastic.min_ranks"
        )
    elif job.elastic.by_torchft:
        yield from _said(job, "elastic", ("copies_every",), "torchft copies nothing", 'choose elastic.backend = "own"')


def _changes(job: JobSpec) -> Iterator[Problem]:
    if job.factoring is not None and job.factoring.refactorise_every == 0:
        why = "factors are never balanced anew"
        if job.factoring.recovery_steps != type(job.factoring)().recovery_steps:
            fix = "set low_rank.refactorise_every"
            yield Problem(what=WHAT, where="low_rank.recovery_steps", why=why, fix=fix)
    for index, group in enumerate(job.optimizer.groups):
        if group.learning_rate_factor is None and group.weight_decay is None and group.kind is None:
            fix = "give it a learning_rate_factor, a weight_decay or a kind"
            yield Problem(what=WHAT, where=f"optimizer.groups[{index}]", why="it says nothing of its names", fix=fix)


def _said(job: JobSpec, section: str, names: tuple[str, ...], why: str, fix: str) -> Iterator[Problem]:
    """Those of the fields `names` of a table of the job that are not at their defaults."""
    table, usual = getattr(job, section), getattr(_USUAL, section)
    for name in names:
        if getattr(table, name) != getattr(usual, name):
            yield Problem(what=WHAT, where=f"{section}.{name}", why=why, fix=fix)
