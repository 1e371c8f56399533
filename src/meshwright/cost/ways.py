"""What each way of meeting would cost the data parallel ranks of one plan, and over which links they meet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.costs import Costs
from meshwright.cost.evaluate import evaluate
from meshwright.cost.meeting import Meeting, meetings_of
from meshwright.cost.network import collective
from meshwright.cost.placed import as_placed
from meshwright.cost.placement import Ring, ring
from meshwright.cost.quorum import paced
from meshwright.cost.table import SHARDINGS, PlanTable
from meshwright.cost.traffic import traffic
from meshwright.spec.cluster import ClusterSpec, Collective
from meshwright.spec.compression import Compression
from meshwright.spec.job import JobSpec
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import AxisName, Design, Plan, Sharding, TensorGrid
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import MEETINGS, SyncKind

_NONE = SHARDINGS.index(Sharding.NONE)
_TURNS = {"all_reduce": 2.0}  # of the others a device sends what it has once
_LINES = (LineName.PARAMETERS, LineName.GRADIENTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class WayOfMeeting:
    """One plan's ranks as `learners` that meet as `kind`: of every_step gradients whole or as `compression` says, else
    rounds of `every` steps. `is_plan` is the plan as it is.
    """

    kind: SyncKind
    compression: Compression | None = None
    learners: int
    every: int
    step_seconds: float
    peak_bytes: float
    fits: bool
    is_plan: bool = False

    @property
    def words(self) -> str:
        """`eager every 12 steps`, `powersgd of rank 4`."""
        if self.compression is not None:
            return self.compression.words
        return f"{self.kind.value} every {self.every} step{'s' * (self.every > 1)}" if self.every else self.kind.value

    @property
    def word(self) -> str:
        """One of MEETINGS."""
        return self.kind.value if self.compression is None else self.compression.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Met:
    """Bytes that a device sends in a step to others that are as far apart as `tier`, over every link, on one line of
    the step, of whose seconds those of this tier are the share `share`. On average `crossing_bytes` of them cross the
    links of the tier itself: of a ring those that leave the last rank of a node, a rack or a site for the next."""

    line: LineName
    tier: str
    bytes: float
    crossing_bytes: float
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reach:
    """The farthest links of a ring, and the share of what its ranks send that crosses them."""

    tier: str
    crossing: float = 1.0


def ways_of_meeting(design: Design) -> tuple[WayOfMeeting, ...]:
    """Every way of meeting for the layout of `design.plan`, the plan as it is first.

    Rounds are the usual ones of as many steps as the job asks for, or as few as hide the network. Where the plan has no
    replicas, the ranks that it shards over are taken as so many learners as suit each way best: of those that fit the
    fastest. Gradients are compressed among the replicas of the plan's shards, or else among as many replicas as it has
    data parallel ranks, where its layout lets them. Without data parallel ranks there is nothing to meet.
    """
    plan, job = design.plan, design.job
    table = PlanTable.from_plan(plan)
    if plan.data == 1:
        return ()
    sizes = [plan.replicate] if plan.replicate > 1 else [n for n in range(2, plan.shard + 1) if plan.shard % n == 0]
    kinds = [kind for kind in SyncKind if kind.has_learners]
    held = plan.experts.expert * plan.experts.tensor if plan.experts else 1
    pairs = [
        (size, kind) for size in sizes for kind in kinds if plan.data // size * plan.context * plan.tensor % held == 0
    ]
    meetings = meetings_of(job)
    learners = _as_learners(table, pairs, meetings=meetings, every=job.synchronize.every, plan=plan)
    compressed = [meeting for meeting in meetings if meeting.compression is not None and _compresses(design)]
    rows = PlanTable.stacked([table, *learners, *_as_replicas(table, compressed, meetings=meetings, plan=plan)])
    asked = replace(job, sequence_length=plan.sequence_length, batch_tokens=plan.batch_tokens)
    cluster = as_placed(plan, design.cluster)
    costs = evaluate(rows, model=design.model, cluster=cluster, job=asked, every_rank=True)
    seconds = [_step_seconds(design, costs.row(row), rows.take([row]), job=asked) for row in range(len(rows))]
    own = (plan.learners, Meeting(kind=plan.gradients.kind, compression=plan.gradients.compression))
    named = [(size, Meeting(kind=kind)) for size, kind in _named(plan, pairs)]
    found = [
        WayOfMeeting(
            kind=meeting.kind,
            compression=meeting.compression,
            learners=size,
            every=int(costs.every[row]),
            step_seconds=seconds[row],
            peak_bytes=float(costs.memory_bytes[row]),
            fits=bool(costs.fits[row]),
            is_plan=row == 0,
        )
        for row, (size, meeting) in enumerate([own, *named, *((1, each) for each in compressed)])
    ]
    return (found[0], *_best(found[1:]))


def _step_seconds(design: Design, costs: Costs, table: PlanTable, *, job: JobSpec) -> float:
    """Of the one row in `table`: where the plan's rounds end with a quorum, those of every way that waits do."""
    plan, rounds = design.plan, design.plan.gradients.rounds
    kind = table.syncs[int(table.sync[0])].kind
    cluster = as_placed(plan, design.cluster)
    uneven = None
    if rounds.quorum and kind.has_learners and kind.waits:
        ended = replace(rounds, every=int(costs.every[0]))
        called = replace(plan, gradients=replace(plan.gradients, kind=kind, rounds=ended))
        uneven = paced(costs, table, plan=called, model=design.model, cluster=cluster, job=job)
    return float((uneven.costs if uneven else costs).step_seconds[0])


def _named(plan: Plan, pairs: list[tuple[int, SyncKind]]) -> list[tuple[int, SyncKind]]:
    """What stands in the rows behind the plan: where it does not meet whole in every step, its layout that does too."""
    other = plan.learners > 1 or plan.gradients.compression is not None
    return [*([(1, SyncKind.EVERY_STEP)] if other else []), *pairs]


def _compresses(design: Design) -> bool:
    """Whether the data parallel ranks of the layout may be replicas that compress what they send."""
    plan = design.plan
    line = plan.tensor == 1 or plan.tensor_grid is TensorGrid.LINE
    shards = plan.first_group.sharding is not Sharding.NONE and plan.replicate > 1
    alone = plan.context == 1 or shards
    return line and alone and plan.experts is None and design.job.master is Master.FP32


def _as_replicas(
    table: PlanTable, compressed: Sequence[Meeting], *, meetings: Sequence[Meeting], plan: Plan
) -> Iterator[PlanTable]:
    whole = replace(table, replicate=np.array([plan.data]), shard=np.array([1]), sharding=np.array([_NONE]))
    layout = table if plan.first_group.sharding is not Sharding.NONE and plan.replicate > 1 else whole
    for meeting in compressed:
        yield replace(
            layout,
            sync=np.array([meetings.index(meeting)]),
            every=np.array([0]),
            syncs=tuple(meetings),
        )


def _as_learners(
    table: PlanTable, pairs: list[tuple[int, SyncKind]], *, meetings: Sequence[Meeting], every: int, plan: Plan
) -> Iterator[PlanTable]:
    for size, kind in _named(plan, pairs):
        replicate = plan.replicate if plan.replicate > 1 else size
        shard = plan.data // replicate
        yield replace(
            table,
            replicate=np.array([replicate]),
            shard=np.array([shard]),
            sharding=table.sharding if shard * plan.context > 1 else np.array([_NONE]),
            sync=np.array([list(SyncKind).index(kind)]),
            every=np.array([every if kind.has_learners else 0]),
            syncs=tuple(meetings),
        )


def _best(found: list[WayOfMeeting]) -> Iterator[WayOfMeeting]:
    """Of every way the fastest that fits, or the fastest where none does."""
    for word in MEETINGS:
        mine = [way for way in found if way.word == word]
        if mine:
            yield min(mine, key=lambda way: (not way.fits, way.step_seconds))


def met_over(design: Design, *, outer_bytes: float) -> tuple[Met, ...]:
    """Over which links data parallel ranks meet, inside a learner and across: what a device of pipeline rank 0 sends.

    `outer_bytes` are those of learners that meet, as the plan's report has them. A line's seconds are shared among its
    tiers by those that the bytes of each take by themselves.
    """
    plan = design.plan
    own = replace(design, plan=plan.of_learner())
    sent: dict[tuple[LineName, str], float] = {}
    crossed: dict[tuple[LineName, str], float] = {}
    seconds: dict[tuple[LineName, str], float] = {}
    for key, num_bytes in traffic(own, rank=0).bytes.items():
        line, operation, axes = key.split("|")
        if line in _LINES:
            names = [AxisName(name) for name in axes.split("+")]
            size = np.prod([own.plan.size(name) for name in names])
            each = _TURNS.get(operation, 1.0) * (1.0 - 1.0 / float(size)) * num_bytes
            reach = _reach(design, names)
            place = (LineName(line), reach.tier)
            sent[place] = sent.get(place, 0.0) + each
            crossed[place] = crossed.get(place, 0.0) + reach.crossing * each
            took = _alone(design, Collective(operation), names, num_bytes=num_bytes)
            seconds[place] = seconds.get(place, 0.0) + took
    if plan.learners > 1:
        reach = _reach(design, [AxisName.REPLICATE])
        sent[LineName.OUTER, reach.tier] = outer_bytes
        crossed[LineName.OUTER, reach.tier] = reach.crossing * outer_bytes
    whole = {name: sum(took for (line, _), took in seconds.items() if line is name) for name, _ in seconds}
    return tuple(
        Met(
            line=line,
            tier=where,
            bytes=each,
            crossing_bytes=crossed[line, where],
            share=seconds[line, where] / whole[line] if whole.get(line) else 1.0,
        )
        for (line, where), each in sent.items()
    )


def _alone(design: Design, operation: Collective, axes: Sequence[AxisName], *, num_bytes: float) -> float:
    """Seconds of one collective of so many bytes among ranks along `axes` of the plan, in whose way is nothing."""
    cluster, around = _rings(design, axes)
    return max(
        float(collective(operation, each, group=group, cluster=cluster).seconds(num_bytes)[0])
        for group, each in zip(cluster.groups, around, strict=True)
    )


def _rings(design: Design, axes: Sequence[AxisName]) -> tuple[ClusterSpec, list[Ring]]:
    """The machines as the plan places its ranks on them, and how those along `axes` lie on each group of them."""
    cluster, table = as_placed(design.plan, design.cluster).joined, PlanTable.from_plan(design.plan)
    return cluster, [ring(table, axes, group=group, cluster=cluster) for group in cluster.groups]


def _reach(design: Design, axes: Sequence[AxisName]) -> _Reach:
    """How far ranks along `axes` of the plan lie apart."""
    cluster, around = _rings(design, axes)
    rack = cluster.groups[0].rack
    joined = "rack" if rack is None or rack.torus is None else "pod"
    if any(each.sites[0] > 1.0 for each in around) and cluster.has_uplinks:
        return _Reach(tier="between sites", crossing=max(float(each.sites[0] / each.size[0]) for each in around))
    if any(each.racks[0] > 1.0 for each in around):
        words = "between nodes" if rack is None else f"between {joined}s"
        return _Reach(tier=words, crossing=max(float(each.racks[0] / each.size[0]) for each in around))
    return _Reach(tier=f"in a {joined}" if any(each.nodes[0] > 1.0 for each in around) else "in a node")
