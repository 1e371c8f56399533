"""The precisions of plans: a job says them, or they follow the machines that each plan uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from meshwright.cost.table import PRECISIONS
from meshwright.search.job_rules import allowed_precisions
from meshwright.search.product import Product
from meshwright.spec.cluster import ClusterSpec, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Automatic, Devices, JobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Plans on more than `after` and at most `devices` devices, which lie on the first `groups` node groups, and the
    precisions that the job allows there; none where it forbids those."""

    after: int
    devices: int
    groups: int
    precisions: tuple[Precision, ...]


def runs(cluster: ClusterSpec, job: JobSpec) -> tuple[Run, ...]:
    """The runs of node groups, the first of `cluster` and ever more, on which the precisions are not the same: one
    where the job says its precision, or asks for all devices."""
    whole = Run(
        after=0,
        devices=cluster.num_devices,
        groups=len(cluster.groups),
        precisions=allowed_precisions(job, cluster),
    )
    follows = isinstance(job.precision, Automatic) and job.constraints.devices == Devices.ANY
    return tuple(_runs(cluster, job)) if follows and len(cluster.groups) > 1 else (whole,)


def _runs(cluster: ClusterSpec, job: JobSpec) -> Iterator[Run]:
    ends = list(accumulate(group.num_devices for group in cluster.groups))
    each = [_allowed(job, replace(cluster, groups=cluster.groups[: count + 1])) for count in range(len(ends))]
    after = 0
    for place, end in enumerate(ends):
        if place + 1 == len(ends) or each[place + 1] != each[place]:
            yield Run(after=after, devices=end, groups=place + 1, precisions=each[place])
            after = end


def _allowed(job: JobSpec, cluster: ClusterSpec) -> tuple[Precision, ...]:
    try:
        return allowed_precisions(job, cluster)
    except ConfigError:
        return ()


def add_precisions(
    product: Product, cluster: ClusterSpec, job: JobSpec, *, trained: Sequence[Precision], tiles: bool
) -> None:
    """The precisions of the job, or where it says none those of the first machines of `cluster`, on which each plan
    lies. Where one of them is among `trained`, not those that are not, and not fp16 over context ranks where nothing
    puts its `tiles` together."""
    product.times(["precision"], [[PRECISIONS.index(kind)] for kind in allowed_precisions(job, cluster)])
    known = np.isin(product["precision"], [PRECISIONS.index(kind) for kind in trained])
    if known.any():
        product.keep(known, "runtime-precision")
    cut = (product["context"] > 1) & (product["precision"] == PRECISIONS.index(Precision.FP16)) & (not tiles)
    if not cut.all():
        product.keep(~cut, "runtime-precision")
    world = product["tensor"] * product["context"] * product["pipeline"] * product["data"]
    own = np.zeros(len(world), dtype=np.bool_)
    for run in runs(cluster, job):
        there = np.isin(product["precision"], [PRECISIONS.index(kind) for kind in run.precisions])
        own |= there & (world > run.after) & (world <= run.devices)
    product.keep(own)
