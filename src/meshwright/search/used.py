"""The machines that a plan uses."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import Plan


def used_of(plan: Plan, cluster: ClusterSpec) -> ClusterSpec:
    """`cluster` without the node groups of which `plan` uses no device; whole where it uses none that there is."""
    devices = range(plan.world_size) if plan.placement is None else plan.placement
    ends = list(accumulate(group.num_devices for group in cluster.groups))
    groups = tuple(
        group
        for group, start, end in zip(cluster.groups, [0, *ends[:-1]], ends, strict=True)
        if any(start <= device < end for device in devices)
    )
    return replace(cluster, groups=groups) if groups else cluster
