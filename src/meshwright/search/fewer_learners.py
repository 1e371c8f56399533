"""Fewer learners: the plan of those that are left when a learner is lost, each the same as before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.search.check import check
from meshwright.search.decide import RUNTIME
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints, ElasticSpec
from meshwright.spec.plan import AxisName, Design, Plan
from meshwright.spec.synchronize import GradientSync, Rounds, SyncKind, as_usual


def fewer_learners(entry: Design, learners: int) -> Design | None:
    """The design of so many of the learners of `entry`, which share its batch, or the nearest that they can; None where
    no such plan is legal.

    Inside a learner all is as it was but the number and the size of its microbatches; rounds stay, and the outer
    learning rate where it was chosen. One learner that is left goes on in rounds of its own, so that others can come
    back to it.
    """
    for plan in _plans(entry.plan, learners):
        found = replace(entry, plan=plan)
        try:
            if not check(_alone(found), scopes=RUNTIME):
                return found
        except ConfigError:
            continue
    return None


def _plans(plan: Plan, learners: int) -> Iterator[Plan]:
    """The largest microbatches first, and none larger than they were."""
    readers = learners * plan.shard
    rounds, kind = plan.gradients.rounds, plan.gradients.kind
    rounds = as_usual(rounds, rounds, kind=kind, learners=learners, were=plan.learners)
    plan = replace(plan, gradients=replace(plan.gradients, rounds=rounds))
    axes = tuple(replace(axis, size=learners) if axis.name is AxisName.REPLICATE else axis for axis in plan.axes)
    for each in _shares(plan.batch, readers=readers):
        for size in range(min(plan.microbatch, each), 0, -1):
            if each % size == 0:
                schedule = replace(plan.schedule, microbatches=each // size)
                yield replace(plan, axes=axes, placement=None, microbatch=size, schedule=schedule)


def _shares(batch: int, *, readers: int) -> list[int]:
    """Sequences of each of so many that read, the nearest to their share of `batch` first."""
    shares = {batch // readers, -(-batch // readers)} - {0}
    return sorted(shares, key=lambda share: abs(share * readers - batch))


def _alone(design: Design) -> Design:
    """As it is checked: the rules of elastic runs are about the ranks that a run begins with, those of learners about
    several, and what the job fixes about the plan that this one is made from."""
    job = replace(design.job, elastic=ElasticSpec(), constraints=Constraints())
    if design.plan.learners > 1:
        return replace(design, job=job)
    inside = GradientSync(kind=SyncKind.EVERY_STEP, precision=design.plan.gradients.precision, rounds=Rounds())
    return replace(design, job=job, plan=replace(design.plan, gradients=inside))
