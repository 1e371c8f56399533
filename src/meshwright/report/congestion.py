"""Traffic: which tier of the network a run waited for longer than predicted, and which order of axes relieves it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from meshwright import cost, search
from meshwright.search.rules import Scope
from meshwright.spec.cluster import ClusterSpec, DeviceKind, Link
from meshwright.spec.errors import ConfigError
from meshwright.spec.places import Place, Tier, places, tier_between
from meshwright.spec.plan import Axis, AxisName, Design, Plan
from meshwright.spec.report import LineName, Report
from meshwright.spec.units import format_seconds

CONGESTED = 1.3  # times as long as predicted
FELT = 0.05  # of the step, that it takes longer
WORTH = 0.99  # of the step: another order has to be faster than that

# The axes along which the groups of a line lie; those of the grid of experts lie in a stage.
_AXES = {
    LineName.TENSOR: (AxisName.TENSOR,),
    LineName.CONTEXT: (AxisName.CONTEXT,),
    LineName.EXPERTS: (AxisName.SHARD, AxisName.CONTEXT, AxisName.TENSOR),
    LineName.TRANSFER: (AxisName.PIPELINE,),
    LineName.GRADIENTS: (AxisName.REPLICATE, AxisName.SHARD, AxisName.CONTEXT),
    LineName.PARAMETERS: (AxisName.SHARD, AxisName.CONTEXT),
    LineName.OUTER: (AxisName.REPLICATE,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """What a step waited for the collectives of `lines`, whose groups reach over `tier`: predicted and measured."""

    tier: Tier
    lines: tuple[str, ...]
    predicted: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Relief:
    """Another order of the plan's axes, from the outermost inwards, and the step with the network as it was measured:
    of the plan as it is and of that one."""

    axes: tuple[str, ...]
    seconds: float
    relieved_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Congestion:
    """The tiers that the plan uses, and of the one that is `congested`, if any, what relieves it, if anything does;
    `on_cores`: it is the inside of nodes whose processors compute and communicate."""

    tiers: tuple[TierUse, ...]
    congested: Tier | None = None
    relief: Relief | None = None
    on_cores: bool = False

    def lines(self) -> list[str]:
        """In words, a line a tier, then what would help."""
        told = [_tier_line(use) for use in self.tiers]
        if self.congested is None:
            return told
        if self.on_cores:
            told.append("ranks of a node wait for each other longer than predicted: see what else runs on its cores")
        else:
            told.append(f"the network {self.congested} is congested: the plan waits for it longer than predicted")
        if self.relief is None:
            told.append("no other order of the plan's axes would wait less")
        else:
            seconds, better = format_seconds(self.relief.seconds), format_seconds(self.relief.relieved_seconds)
            order = ", ".join(self.relief.axes)
            told.append(f"with its axes in the order {order} a step would take {better} instead of {seconds} there")
        return told


def congestion(design: Design, *, predicted: Report, measured: Report) -> Congestion:
    """The lines of two reports of one plan by the tier that their groups reach over; a rank alone has no group."""
    lines: dict[Tier, list[tuple[str, float, float]]] = defaultdict(list)
    for name, axes in _AXES.items():
        one, other = predicted.step.find(name), measured.step.find(name)
        seconds = (one.seconds if one else 0.0, other.seconds if other else 0.0)
        is_alone = math.prod(design.plan.size(axis) for axis in axes) == 1
        if any(seconds) and not is_alone:
            lines[tier_of(design, axes)].append((name.value, *seconds))
    tiers = tuple(
        TierUse(
            tier=tier,
            lines=tuple(name for name, _, _ in lines[tier]),
            predicted=sum(seconds for _, seconds, _ in lines[tier]),
            measured=sum(seconds for _, _, seconds in lines[tier]),
        )
        for tier in Tier
        if tier in lines
    )
    felt = [use for use in tiers if use.ratio > CONGESTED]
    felt = [use for use in felt if use.measured - use.predicted > FELT * measured.step_seconds]
    if not felt:
        return Congestion(tiers=tiers)
    worst = max(felt, key=lambda use: use.measured - use.predicted)
    processors = all(group.device.kind is DeviceKind.CPU for group in design.cluster.groups)
    on_cores = worst.tier is Tier.NODE and processors
    return Congestion(tiers=tiers, congested=worst.tier, relief=_relief(design, worst), on_cores=on_cores)


def tier_of(design: Design, axes: Sequence[AxisName]) -> Tier:
    """How far the groups along `axes` reach, the widest of them."""
    plan = design.plan
    found = list(places(design.cluster))
    groups: dict[tuple[int, ...], set[Place]] = defaultdict(set)
    for rank in range(plan.world_size):
        device = rank if plan.placement is None else plan.placement[rank]
        groups[_others(plan, rank, axes)].add(found[device])
    widest = Tier.NODE
    for first, *others in map(tuple, groups.values()):
        widest = max([widest, *(tier_between(first, other) for other in others)], key=list(Tier).index)
    return widest


def _others(plan: Plan, rank: int, axes: Sequence[AxisName]) -> tuple[int, ...]:
    """Where a rank stands on all axes but `axes`: alike for the ranks of one group."""
    found = []
    for axis in reversed(plan.axes):
        rank, place = divmod(rank, axis.size)
        if axis.name not in axes:
            found.append(place)
    return tuple(found)


def _relief(design: Design, use: TierUse) -> Relief | None:
    """The quickest order of axes on machines whose `use.tier` is as much slower as it was measured to be."""
    plan = design.plan
    large = [axis for axis in plan.axes if axis.size > 1]
    if plan.is_placed or len(large) < 2:
        return None
    slowed = replace(design, cluster=_slowed(design.cluster, use.tier, 1.0 / use.ratio))
    alone = tuple(axis for axis in plan.axes if axis.size == 1)
    orders = [(*order, *alone) for order in permutations(large)]
    tried = [replace(slowed, plan=replace(plan, axes=order)) for order in orders]
    legal = [each for each in tried if not search.check(each, scopes=frozenset(Scope) - {Scope.MEMORY, Scope.JOB})]
    try:
        now, *found = cost.predict_all([slowed, *legal])
    except ConfigError:
        return None
    if not found:
        return None
    best, report = min(zip(legal, found, strict=True), key=lambda pair: pair[1].step_seconds)
    if report.step_seconds >= WORTH * now.step_seconds:
        return None
    return Relief(axes=_named(best.plan.axes), seconds=now.step_seconds, relieved_seconds=report.step_seconds)


def _named(axes: Sequence[Axis]) -> tuple[str, ...]:
    return tuple(f"{axis.name.value} {axis.size}" for axis in axes if axis.size > 1)


def _slowed(cluster: ClusterSpec, tier: Tier, factor: float) -> ClusterSpec:
    """The cluster with the links of one tier at `factor` of their rate; what was fitted to them is set aside."""

    def slow(link: Link) -> Link:
        return replace(link, bandwidth=link.bandwidth * factor, fits=())

    if tier is Tier.SITES:
        return cluster.with_uplinks(slow)
    groups = []
    for group in cluster.groups:
        if tier is Tier.NODE:
            groups.append(replace(group, inside=slow(group.inside)))
        elif tier is Tier.RACKS and group.rack is not None:
            groups.append(replace(group, rack=slow(group.rack)))
        else:
            groups.append(replace(group, nic=slow(group.nic)))
    return replace(cluster, groups=tuple(groups))


def _tier_line(use: TierUse) -> str:
    times = f", {use.ratio:.2f} times as long" if use.predicted else ""
    seconds = f"{format_seconds(use.measured)} measured, {format_seconds(use.predicted)} predicted{times}"
    return f"{use.tier}: {seconds} ({', '.join(use.lines)})"
