"""Rules of learners: replicas that train apart are there, and their rounds are ones that their kind of meeting has."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope, choices
from meshwright.spec.errors import Problem
from meshwright.spec.job import Spike
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import ROUND_PRECISIONS, Rounds, SyncKind

_ROUNDS = "plan.gradients.rounds"


def learners_are_replicas(design: Design) -> Problem | None:
    """Whoever meets in rounds is a replica, and there are several."""
    plan, kind = design.plan, design.plan.gradients.kind
    if not kind.has_learners or plan.replicate > 1:
        return None
    what = f"learners meet as {kind.value} and the replicate axis has one"
    return Problem(where="plan.gradients.kind", what=what, fix="choose every_step, or give the plan a replicate axis")


def learners_hold_experts(design: Design) -> Problem | None:
    """A learner has all ranks that a grid of experts needs, side by side."""
    plan = design.plan
    if plan.learners == 1 or plan.experts is None:
        return None
    holders, ranks = plan.experts.expert * plan.experts.tensor, plan.tensor * plan.context * plan.shard
    if ranks % holders == 0:
        return None
    what = f"a grid of {holders} experts' ranks is not inside a learner, whose stages have {ranks} ranks each"
    return Problem(where="plan.experts", what=what, fix="choose every_step, a smaller grid or a wider shard axis")


def spikes_are_of_all(design: Design) -> Problem | None:
    """Of learners each has a loss of its own, and only all ranks together may leave a step out."""
    if design.plan.learners == 1 or design.job.spike.policy is Spike.IGNORE:
        return None
    what = f"steps that leap are to {design.job.spike.policy.value.replace('_', ' ')}, and learners see unlike losses"
    return Problem(where="job.spike.policy", what=what, fix="choose ignore, or plan.gradients.kind every_step")


def rounds_are_whole(design: Design) -> Problem | None:
    """Numbers of a round are in their ranges."""
    rounds = design.plan.gradients.rounds
    wrong = {
        "every": "a step or more" if rounds.every < 1 else "",
        "fragments": "from 1 to the steps of a round" if not 1 <= rounds.fragments <= max(rounds.every, 1) else "",
        "delay": "from 0 to the steps of a round" if not 0 <= rounds.delay <= rounds.every else "",
        "learning_rate": "above 0" if not 0.0 < rounds.learning_rate < float("inf") else "",
        "momentum": "from 0 to below 1" if not 0.0 <= rounds.momentum < 1.0 else "",
        "own_share": "from 0 to below 1" if not 0.0 <= rounds.own_share < 1.0 else "",
        "penalty": "0 or more" if not 0.0 <= rounds.penalty < float("inf") else "",
        "clip": "above 0" if not rounds.clip > 0.0 else "",
    }
    for field, range_ in wrong.items():
        if range_:
            what = f"{getattr(rounds, field)} is no {field.replace('_', ' ')}"
            return Problem(where=f"{_ROUNDS}.{field}", what=what, fix=f"choose {range_}")
    return None


def rounds_fit_kind(design: Design) -> Problem | None:
    """Nothing is said of a round that its kind of meeting does not read, and one collective travels at a time."""
    kind, rounds = design.plan.gradients.kind, design.plan.gradients.rounds
    usual = Rounds(every=rounds.every)
    if kind is SyncKind.EVERY_STEP:
        return None if rounds == Rounds() else _unread("every", f"{kind.value} has no rounds", "leave rounds out")
    if kind is SyncKind.CO2 and rounds.delay != rounds.every:
        return _unread("delay", f"{kind.value} is one round late", f"choose {rounds.every}")
    if kind.waits and rounds.delay:
        return _unread("delay", f"{kind.value} waits for what meets", "choose 0, or eager or streaming")
    if kind is SyncKind.EAGER and not rounds.delay:
        return _unread("delay", f"{kind.value} waits for nothing", f"choose {rounds.every // rounds.fragments}")
    if kind.in_parts and rounds.delay * rounds.fragments > rounds.every:
        what = f"{rounds.fragments} fragments of {rounds.delay} steps travel at once in rounds of {rounds.every} steps"
        return _unread("delay", what, f"choose at most {rounds.every // rounds.fragments}")
    if not kind.in_parts and rounds.fragments > 1:
        return _unread("fragments", f"{kind.value} meets as a whole", "choose 1, or eager or streaming")
    if kind is not SyncKind.STREAMING and rounds.own_share:
        return _unread("own_share", f"{kind.value} mixes nothing of a learner's own", "choose 0")
    if kind is SyncKind.LOCAL and (rounds.learning_rate, rounds.momentum) != (1.0, 0.0):
        return _unread("learning_rate", "local averages and has no outer optimizer", "choose 1 and momentum 0")
    if kind is not SyncKind.CO2 and (rounds.penalty, rounds.clip) != (usual.penalty, usual.clip):
        return _unread("penalty", f"{kind.value} has neither penalty nor clip", "leave both out")
    return None


def rounds_precision(design: Design) -> Problem | None:
    """Learners send in a precision that the runtime sends in."""
    precision = design.plan.gradients.rounds.precision
    if precision in ROUND_PRECISIONS:
        return None
    what = f"learners that meet in {precision.value} can be predicted and not trained yet"
    fix = choices(kind.value for kind in ROUND_PRECISIONS)
    return Problem(where=f"{_ROUNDS}.precision", what=what, fix=fix)


def _unread(field: str, what: str, fix: str) -> Problem:
    return Problem(where=f"{_ROUNDS}.{field}", what=what, fix=fix)


LEARNER_RULES: tuple[Rule, ...] = (
    Rule(name="learners-are-replicas", scope=Scope.PLAN, check=learners_are_replicas),
    Rule(name="learners-hold-experts", scope=Scope.PLAN, check=learners_hold_experts),
    Rule(name="spikes-are-of-all", scope=Scope.PLAN, check=spikes_are_of_all),
    Rule(name="rounds-are-whole", scope=Scope.PLAN, check=rounds_are_whole),
    Rule(name="rounds-fit-kind", scope=Scope.PLAN, check=rounds_fit_kind),
    Rule(name="rounds-precision", scope=Scope.RUNTIME, check=rounds_precision),
)
