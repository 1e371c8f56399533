"""Rules of rounds that end when a quorum of learners has come: whom they wait for, and what has to wait for all."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.search.constraints import limits
from meshwright.search.rules import Rule, Scope, choices
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import Problem
from meshwright.spec.job import Interval, JobSpec
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SyncKind

_QUORUM, _GRACE = "plan.gradients.rounds.quorum", "plan.gradients.rounds.grace_seconds"
_ASKED, _ASKED_GRACE = "job.synchronize.quorum", "job.synchronize.grace_seconds"
_LEFT_OUT = "job.synchronize.most_left_out"
WAITING = tuple(kind for kind in SyncKind if kind.waits)
ASKED = "quorum-is-read"


def quorum_problem(job: JobSpec) -> Problem | None:
    """What is asked of a quorum is of ways of meeting that the job allows, and that wait for each other."""
    asked, allowed = job.synchronize, [kind for kind in SyncKind if kind.value in _words(job)]
    chosen, grace = asked.most_left_out != 0.0, " and its grace" * bool(asked.grace_seconds)
    if asked.quorum < 0:
        return Problem(where=_ASKED, what=f"{asked.quorum} learners", fix=f"leave it out{grace}")
    if not _is_time(asked.grace_seconds):
        return Problem(where=_ASKED_GRACE, what=f"{asked.grace_seconds} s", fix=_grace_fix(asked.quorum))
    if not 0.0 <= asked.most_left_out < 1.0:
        what = f"{asked.most_left_out} is no share of the sequences"
        return Problem(where=_LEFT_OUT, what=what, fix="choose 0" if asked.quorum else "choose from 0 to below 1")
    if asked.quorum and chosen:
        what = f"a quorum of {asked.quorum} is asked for, and none is left to choose"
        return Problem(where=_LEFT_OUT, what=what, fix=f"leave it out, or the quorum{grace}")
    if asked.grace_seconds and not asked.quorum:
        what = "a round that waits for all learners has no grace"
        fix = "leave it out" if chosen else "choose a quorum, or leave grace out"
        return Problem(where=_ASKED_GRACE, what=what, fix=fix)
    return _meets_apart(job, allowed) if asked.quorum or chosen else None


def _grace_fix(quorum: int) -> str:
    return "choose 0 or more" if quorum else "choose 0"


def _meets_apart(job: JobSpec, allowed: Sequence[SyncKind]) -> Problem | None:
    """Learners of a round that not all are waited for meet in one of `allowed` ways, all of which wait for others."""
    asked, usual = job.synchronize, "--set 'job.synchronize.kinds=[\"diloco\"]'"
    if "sync" in limits(job.constraints).fixed:
        usual = "--set job.constraints.fix.sync=diloco"
    if not asked.quorum:
        if any(kind.waits for kind in allowed):
            return None
        what = "a quorum may leave sequences out, and the job allows no learners that wait for each other"
        return Problem(where=_LEFT_OUT, what=what, fix=usual)
    if not allowed:
        return Problem(where=_ASKED, what=f"a quorum of {asked.quorum} learners, and the job allows none", fix=usual)
    others = [kind.value for kind in allowed if not kind.waits]
    if not others:
        return None
    what = f"learners that meet as {others[0]} do not wait for each other, and no quorum ends their rounds"
    fix = f"allow {choices(kind.value for kind in WAITING)} alone: {usual}"
    return Problem(where="job.synchronize.kinds", what=what, fix=fix)


def quorum_beyond(cluster: ClusterSpec, job: JobSpec) -> Problem | None:
    """Why no plan of the job has as many learners as its quorum asks for: each has a device and a sequence."""
    asked = job.synchronize
    waited = int(asked.grace_seconds > 0.0)  # for one more learner at the least
    most = min(cluster.num_devices, job.batch_sequences)
    if not asked.quorum or max(2, asked.quorum + waited) <= most:
        return None
    what = f"a quorum of {asked.quorum:,} of {most:,} learners{' and a grace' * waited} never comes together"
    why = f"{cluster.num_devices:,} devices share {job.batch_sequences:,} sequences"
    left = most - waited
    alone = f"leave it out{' and its grace' * waited}"
    fix = f"choose from 1 to {left:,}, or {alone}" if most > 1 and left > 0 else alone
    return Problem(where=_ASKED, what=what, why=why, fix=fix)


def quorum_of_learners(design: Design) -> Problem | None:
    """A round that ends before all learners have come is one of a kind that waits, by some of them, after a while."""
    plan, rounds, kind = design.plan, design.plan.gradients.rounds, design.plan.gradients.kind
    fewer = plan.learners - 1
    if not rounds.quorum:
        what, some = "a round that waits for all learners has no grace", f", or a quorum of at most {fewer}"
        fix = f"choose 0{some * (kind.waits and fewer > 0 and _is_time(rounds.grace_seconds))}"
        return Problem(where=_GRACE, what=what, fix=fix) if rounds.grace_seconds else None
    none = "0" if not rounds.grace_seconds else "0 with a grace of 0"
    if not kind.waits:
        what = f"learners that meet as {kind.value} do not wait for each other, and no quorum ends their rounds"
        return Problem(where=_QUORUM, what=what, fix=f"choose {none}, or {choices(each.value for each in WAITING)}")
    if not _is_time(rounds.grace_seconds):
        more = "" if rounds.quorum > fewer else " or more"
        return Problem(where=_GRACE, what=f"{rounds.grace_seconds} is no number of seconds", fix=f"choose 0{more}")
    if not 1 <= rounds.quorum <= plan.learners:
        what = f"a quorum of {rounds.quorum} of {plan.learners} learners never comes together"
        most = fewer if rounds.grace_seconds else plan.learners
        return Problem(where=_QUORUM, what=what, fix=f"choose {f'from 1 to {most}, or ' * (most > 0)}{none} for all")
    if rounds.quorum == plan.learners and rounds.grace_seconds:
        what = f"nobody is waited for after a quorum of all {plan.learners} learners"
        fix = f"choose 0{f', or a quorum of at most {fewer}' * (fewer > 0)}"
        return Problem(where=_GRACE, what=what, fix=fix)
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
            fix = f"choose more than {rounds.every}, or a quorum{_and_grace(design)} of 0"
            return Problem(where=f"job.{name}.every_steps", what=what, fix=fix)
    return None


def quorum_is_alone(design: Design) -> Problem | None:
    """Whoever changes what all ranks do, or when, knows of learners that are elsewhere."""
    job = design.job
    if not design.plan.gradients.rounds.quorum:
        return None
    if job.elastic.on:
        what = "an elastic run takes a learner that is late for a lost one"
        return Problem(where="job.elastic.min_ranks", what=what, fix=f"choose 0, or a quorum{_and_grace(design)} of 0")
    if job.checkpoint.interval is not Interval.STEPS:
        what = f"saves by {job.checkpoint.interval.value} come at steps that late learners do not know"
        return Problem(where="job.checkpoint.interval", what=what, fix="choose steps, with checkpoint.every_steps")
    if job.all_techniques:
        what = f"{job.all_techniques[0]} acts on all ranks at one step, and late learners are at another"
        return Problem(where="job.techniques", what=what, fix=f"drop it, or choose a quorum{_and_grace(design)} of 0")
    return None


def _is_time(seconds: float) -> bool:
    return 0.0 <= seconds < float("inf")


def _and_grace(design: Design) -> str:
    return " and a grace" * bool(design.plan.gradients.rounds.grace_seconds)


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
