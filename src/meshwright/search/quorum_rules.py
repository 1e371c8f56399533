"""Rules of rounds that end when a quorum of learners has come: whom they wait for, and what has to wait for all."""

from __future__ import annotations

from meshwright.search.constraints import limits
from meshwright.search.rules import Rule, Scope, choices
from meshwright.spec.errors import Problem
from meshwright.spec.job import Interval, JobSpec
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SyncKind

_QUORUM, _GRACE = "plan.gradients.rounds.quorum", "plan.gradients.rounds.grace_seconds"
_GRACE = "job.synchronize.grace_seconds"
_LEFT_OUT = "job.synchronize.most_left_out"
WAITING = tuple(kind for kind in SyncKind if kind.waits)
ASKED = "quorum-is-read"


def quorum_problem(job: JobSpec) -> Problem | None:
    """What is asked of a quorum is of ways of meeting that the job allows, and that wait for each other."""
    asked, allowed = job.synchronize, [kind for kind in SyncKind if kind.value in _words(job)]
    where, usual = "job.synchronize.quorum", "--set 'job.synchronize.kinds=[\"diloco\"]'"
    if asked.quorum < 0:
        return Problem(where=where, what=f"{asked.quorum} learners", fix="choose 0 or more")
    if not 0.0 <= asked.grace_seconds < float("inf"):
        return Problem(where=_GRACE, what=f"{asked.grace_seconds} s", fix="choose 0 or more")
    if not 0.0 <= asked.most_left_out < 1.0:
        what = f"{asked.most_left_out} is no share of the sequences"
        return Problem(where=_LEFT_OUT, what=what, fix="choose from 0 to below 1")
    if asked.quorum and asked.most_left_out:
        what = f"a quorum of {asked.quorum} is asked for, and none is left to choose"
        return Problem(where=_LEFT_OUT, what=what, fix="leave it out, or the quorum")
    if asked.grace_seconds and not asked.quorum:
        what = "a round that waits for all learners has no grace"
        return Problem(where=_GRACE, what=what, fix="choose a quorum, or leave grace out")
    if asked.most_left_out and not any(kind.waits for kind in allowed):
        what = "a quorum may leave sequences out, and the job allows no learners that wait for each other"
        return Problem(where=_LEFT_OUT, what=what, fix=usual)
    if not asked.quorum:
        return None
    if not allowed:
        return Problem(where=where, what=f"a quorum of {asked.quorum} learners, and the job allows none", fix=usual)
    others = [kind.value for kind in allowed if not kind.waits]
    if not others:
        return None
    what = f"learners that meet as {others[0]} do not wait for each other, and no quorum ends their rounds"
    fix = f"allow {choices(kind.value for kind in WAITING)} alone: {usual}"
    return Problem(where="job.synchronize.kinds", what=what, fix=fix)


def quorum_of_learners(design: Design) -> Problem | None:
    """A round that ends before all learners have come is one of a kind that waits, by some of them, after a while."""
    plan, rounds, kind = design.plan, design.plan.gradients.rounds, design.plan.gradients.kind
    if not rounds.quorum:
        what = "a round that waits for all learners has no grace"
        return Problem(where=_GRACE, what=what, fix="choose 0, or a quorum") if rounds.grace_seconds else None
    if not kind.waits:
        what = f"learners that meet as {kind.value} do not wait for each other, and no quorum ends their rounds"
        return Problem(where=_QUORUM, what=what, fix=f"choose 0, or {choices(each.value for each in WAITING)}")
    if not 1 <= rounds.quorum <= plan.learners:
        what = f"a quorum of {rounds.quorum} of {plan.learners} learners never comes together"
        return Problem(where=_QUORUM, what=what, fix=f"choose from 1 to {plan.learners}, or 0 for all")
    if not 0.0 <= rounds.grace_seconds < float("inf"):
        return Problem(where=_GRACE, what=f"{rounds.grace_seconds} is no number of seconds", fix="choose 0 or more")
    if rounds.quorum == plan.learners and rounds.grace_seconds:
        what = f"nobody is waited for after a quorum of all {plan.learners} learners"
        return Problem(where=_GRACE, what=what, fix=f"choose 0, or a quorum of at most {plan.learners - 1}")
    return None


def quorum_has_rounds(design: Design) -> Problem | None:
    """Some rounds end with nothing after them that needs all learners: what does comes less often than rounds do."""
    rounds, job = design.plan.gradients.rounds, design.job
    if not rounds.quorum:
        return None
    often = {
        "evaluation": job.evaluation.every_steps,
        "checkpoint": job.checkpoint.every_steps,
        "verify": job.verify.every_steps,
    }
    for name, every in often.items():
        if 0 < every <= rounds.every:
            what = f"all learners are waited for every {every} steps, and a round of {rounds.every} has no quorum then"
            fix = f"choose more than {rounds.every}, or a quorum of 0"
            return Problem(where=f"job.{name}.every_steps", what=what, fix=fix)
    return None


def quorum_is_alone(design: Design) -> Problem | None:
    """Whoever changes what all ranks do, or when, knows of learners that are elsewhere."""
    job = design.job
    if not design.plan.gradients.rounds.quorum:
        return None
    if job.elastic.on:
        what = "an elastic run takes a learner that is late for a lost one"
        return Problem(where="job.elastic.min_ranks", what=what, fix="choose 0, or a quorum of 0")
    if job.checkpoint.interval is not Interval.STEPS:
        what = f"saves by {job.checkpoint.interval.value} come at steps that late learners do not know"
        return Problem(where="job.checkpoint.interval", what=what, fix="choose steps, with checkpoint.every_steps")
    if job.all_techniques:
        what = f"{job.all_techniques[0]} acts on all ranks at one step, and late learners are at another"
        return Problem(where="job.techniques", what=what, fix="drop it, or choose a quorum of 0")
    return None


def _words(job: JobSpec) -> tuple[str, ...]:
    """How learners may meet, as the job allows or fixes it."""
    fixed = limits(job.constraints).fixed.get("sync")
    return tuple(kind.value for kind in job.synchronize.kinds) if fixed is None else (str(fixed),)


def quorum_is_read(design: Design) -> Problem | None:
    """As `quorum_problem` of the job."""
    return quorum_problem(design.job)


QUORUM_RULES: tuple[Rule, ...] = (
    Rule(name=ASKED, scope=Scope.PLAN, check=quorum_is_read),
    Rule(name="quorum-of-learners", scope=Scope.PLAN, check=quorum_of_learners),
    Rule(name="quorum-has-rounds", scope=Scope.RUNTIME, check=quorum_has_rounds),
    Rule(name="quorum-is-alone", scope=Scope.RUNTIME, check=quorum_is_alone),
)
