"""For every rule of rounds that a quorum of learners ends: a design that it accepts, and one that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.spec.job import CheckpointSpec, EvaluationSpec, Interval
from meshwright.spec.plan import Design
from meshwright.spec.synchronize import SynchronizeSpec, SyncKind
from tests.search.compression_cases import Case
from tests.search.rule_designs import met


def of_one(**changes: Any) -> Design:
    """Two learners of rounds of ten steps that one of them ends."""
    entry = met(quorum=1, grace_seconds=2.0)
    return replace(entry, job=replace(entry.job, **changes))


def asked(*kinds: SyncKind, quorum: int = 1, **fields: float) -> Design:
    return of_one(synchronize=SynchronizeSpec(kinds=kinds, quorum=quorum, **fields))


def evaluated(every: int) -> Design:
    return of_one(evaluation=EvaluationSpec(every_steps=every))


QUORUM_CASES = {
    "quorum-is-read": Case(
        lambda: asked(SyncKind.DILOCO),
        lambda: asked(SyncKind.DILOCO, SyncKind.EAGER),
        "learners that meet as eager do not wait for each other, and no quorum ends their rounds",
    ),
    "quorum-of-learners": Case(
        lambda: met(quorum=2), lambda: met(quorum=3), "a quorum of 3 of 2 learners never comes together"
    ),
    "quorum-has-rounds": Case(
        lambda: evaluated(11), lambda: evaluated(10), "all learners are waited for every 10 steps"
    ),
    "quorum-is-alone": Case(
        of_one,
        lambda: of_one(checkpoint=CheckpointSpec(interval=Interval.GOODPUT)),
        "saves by goodput come at steps that late learners do not know",
    ),
}

# What else of a plan a rule refuses: the rule, the design and what it says.
REFUSED = (
    ("quorum-of-learners", lambda: met(grace_seconds=1.0), "a round that waits for all learners has no grace"),
    ("quorum-of-learners", lambda: met(SyncKind.EAGER, delay=10, quorum=1), "as eager do not wait for each other"),
    ("quorum-of-learners", lambda: met(quorum=1, grace_seconds=-1.0), "-1.0 is no number of seconds"),
    ("quorum-of-learners", lambda: met(quorum=2, grace_seconds=1.0), "nobody is waited for after a quorum of all 2"),
    ("quorum-is-alone", lambda: of_one(techniques=("low_rank",)), "low_rank acts on all ranks at one step"),
    ("quorum-is-read", lambda: asked(), "a quorum of 1 learners, and the job allows none"),
    ("quorum-is-read", lambda: asked(SyncKind.LOCAL, quorum=0, grace_seconds=1.0), "waits for all learners"),
    ("quorum-is-read", lambda: asked(SyncKind.LOCAL, quorum=-1), "-1 learners"),
    ("quorum-is-read", lambda: asked(SyncKind.LOCAL, quorum=0, most_left_out=1.0), "1.0 is no share of the sequences"),
    ("quorum-is-read", lambda: asked(SyncKind.LOCAL, most_left_out=0.1), "and none is left to choose"),
    ("quorum-is-read", lambda: asked(SyncKind.EAGER, quorum=0, most_left_out=0.1), "no learners that wait"),
)
