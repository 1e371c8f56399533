"""Replicas: what each group of ranks along the replicate axis is by itself, where they meet by themselves."""

from __future__ import annotations

import math
from dataclasses import replace

from meshwright.spec.job import ElasticSpec
from meshwright.spec.plan import AxisName, Plan


def plan_of_replica(plan: Plan) -> Plan:
    """The plan of one replica that reads the whole batch by itself."""
    axes = tuple(replace(axis, size=1) if axis.name is AxisName.REPLICATE else axis for axis in plan.axes)
    schedule = replace(plan.schedule, microbatches=plan.schedule.microbatches * plan.replicate)
    return replace(plan, axes=axes, schedule=schedule, placement=None)


def ranks_of_replica(plan: Plan, replica: int) -> tuple[int, ...]:
    """Ranks of `plan` that are that replica, in the order of the ranks of its own plan."""
    names = [axis.name for axis in plan.axes]
    inner = math.prod(axis.size for axis in plan.axes[names.index(AxisName.REPLICATE) + 1 :])
    return tuple(rank for rank in range(plan.world_size) if rank // inner % plan.replicate == replica)


def fewest_replicas(plan: Plan, spec: ElasticSpec) -> int:
    """Of whole ones, that have `min_ranks` together."""
    return -(-spec.min_ranks * plan.replicate // plan.world_size)


def share_of(plan: Plan, *, index: int, count: int) -> range:
    """Rows of a global batch that replica `index` of `count` reads: as many as others, or one a rank more.

    Together they read each row once, whatever their number, and the ranks of each read equally many.
    """
    each = plan.shard
    units = plan.batch // each
    return range(index * units // count * each, (index + 1) * units // count * each)
