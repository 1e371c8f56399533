"""Rounds that end when a quorum of unlike learners has come: how long they are, and how much they leave out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from meshwright.cost.costs import Costs
from meshwright.cost.evaluate import evaluate
from meshwright.cost.table import PlanTable
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Plan
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import Rounds
from meshwright.spec.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Paces:
    """A round of learners whose steps take `seconds` each: it is called after `called_seconds`, and those that came
    wait `waited_seconds` more. Learner i does `steps[i]` steps in that time; those in `late` miss some rounds."""

    seconds: tuple[float, ...]
    steps: tuple[float, ...]
    late: tuple[int, ...]
    called_seconds: float
    waited_seconds: float
    every: int

    @property
    def trained(self) -> float:
        """The share of the sequences that some learner reads."""
        return sum(self.steps) / (len(self.steps) * self.every)


@dataclass(frozen=True, slots=True, kw_only=True)
class Uneven:
    """The costs of a plan whose learners have such `paces`, and what that makes of its rounds in `words`."""

    costs: Costs
    paces: Paces
    words: str


def paces(seconds: Sequence[float], rounds: Rounds) -> Paces:
    """Rounds of learners whose steps take so many seconds. A round is called when a quorum has done its steps; the
    others end the step that they are in, and are waited for no longer than the grace; who takes longer goes on."""
    every = rounds.every
    called = every * sorted(seconds)[rounds.quorum - 1]
    done = [min(every, math.ceil(called / each - 1e-9)) for each in seconds]
    after = [max(steps * each - called, 0.0) for steps, each in zip(done, seconds, strict=True)]
    late = [index for index, wait in enumerate(after) if wait > rounds.grace_seconds]
    waited = rounds.grace_seconds if late else max(after)
    steps = [
        (called + waited) / each if index in late else float(count)
        for index, (count, each) in enumerate(zip(done, seconds, strict=True))
    ]
    return Paces(
        seconds=tuple(seconds),
        steps=tuple(steps),
        late=tuple(late),
        called_seconds=called,
        waited_seconds=waited,
        every=every,
    )


def paced(
    costs: Costs, table: PlanTable, *, plan: Plan, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> Uneven | None:
    """`costs`, of the one row in `table` on the slowest of unlike devices, as a quorum of learners goes: its steps are
    those of the slowest that is waited for, and in the line of meeting is the wait for others. None where all learners
    are alike or waited for.
    """
    rounds = plan.gradients.rounds
    if not rounds.quorum:
        return None
    held = _groups_of(plan, cluster)
    kinds = _kinds(cluster)
    unlike = sorted({kinds[index] for touched in held for index in touched})
    if len(unlike) == 1:
        return None
    alone = {
        kind: evaluate(table, model=model, cluster=_all_as(kind, cluster), job=job, every_rank=True) for kind in unlike
    }
    each = {kind: float(found.step_seconds[0] - found.parts[LineName.OUTER][0]) for kind, found in alone.items()}
    slowest = [max((kinds[index] for index in touched), key=lambda kind: each[kind]) for touched in held]
    found = paces([each[kind] for kind in slowest], rounds)
    pace = sorted(slowest, key=lambda kind: each[kind])[rounds.quorum - 1]
    usual = alone[pace]
    meets = costs.parts[LineName.OUTER] + found.waited_seconds / rounds.every
    parts = {**usual.parts, LineName.OUTER: meets}
    total = {**usual.total, LineName.OUTER: np.maximum(costs.total[LineName.OUTER], meets)}
    seconds = np.sum(list(parts.values()), axis=0)
    paced = np.full_like(costs.paced, pace)
    went = replace(costs, step_seconds=seconds, parts=parts, total=total, detail=usual.detail, paced=paced)
    meeting = rounds.every * float(costs.parts[LineName.OUTER][0])
    return Uneven(costs=went, paces=found, words=_words(found, plan, meeting_seconds=meeting))


def _words(found: Paces, plan: Plan, *, meeting_seconds: float) -> str:
    """What a quorum makes of rounds, and what they would be without one."""
    whole = found.called_seconds + found.waited_seconds + meeting_seconds
    usual = found.every * max(found.seconds) + meeting_seconds
    slow = [f"learner {index} does {steps:.3g}" for index, steps in enumerate(found.steps) if steps < found.every]
    late = f"learners that miss rounds at times, for want of grace: {', '.join(map(str, found.late))}"
    told = [
        plan.gradients.words,
        f"a round takes {format_seconds(whole)}, not the {format_seconds(usual)} of the slowest",
        f"{format_seconds(found.waited_seconds)} of it for others to end a step",
        *slow,
        *([late] if found.late else []),
        f"{format_percent(1.0 - found.trained)} of the sequences are left out",
    ]
    return "; ".join(told)


def _groups_of(plan: Plan, cluster: ClusterSpec) -> list[set[int]]:
    """By learner, the node groups that its devices are of; rank r lies on device r."""
    ends = list(accumulate(group.num_devices for group in cluster.groups))
    ranks = (plan.ranks_of_learner(learner) for learner in range(plan.learners))
    return [{int(np.searchsorted(ends, rank, side="right")) for rank in each} for each in ranks]


def _kinds(cluster: ClusterSpec) -> list[int]:
    """By node group, the first group whose nodes are like its own."""
    nodes = [replace(group, name="", site="", num_nodes=1) for group in cluster.groups]
    return [nodes.index(node) for node in nodes]


def _all_as(kind: int, cluster: ClusterSpec) -> ClusterSpec:
    """`cluster` with as many devices in each of its groups, all of them like those of group `kind`."""
    group = cluster.groups[kind]
    groups = tuple(
        replace(group, name=each.name, site=each.site, num_nodes=-(-each.num_devices // group.devices_per_node))
        for each in cluster.groups
    )
    return replace(cluster, groups=groups)
