"""Orders in which node groups are laid behind each other, so that stages of a pipeline meet the machines that suit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, permutations

from meshwright import cost
from meshwright.search.precisions import runs
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

Entry = tuple[Design, Report]
MOST_GROUPS = 3  # that are laid in every order; of more, some orders are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """A cluster with its node groups in another order, or the first of them alone: its device i is device `devices[i]`
    of the cluster as listed."""

    cluster: ClusterSpec
    devices: tuple[int, ...]

    @property
    def is_listed(self) -> bool:
        return self.devices == tuple(range(len(self.devices)))


def arrangements(cluster: ClusterSpec, job: JobSpec) -> tuple[Arrangement, ...]:
    """The cluster as it is listed, then its groups in every order that differs, those of one site side by side; behind
    them those first groups of each order on which a job that says no precision has another one.

    Of more than MOST_GROUPS groups they are the reverse, and those sorted by memory and by peak, either way. The
    listed one alone where the job holds to the usual order.
    """
    groups = cluster.groups
    starts = [0, *accumulate(group.num_devices for group in groups)]
    listed = tuple(range(len(groups)))
    orders = [listed] if job.constraints.order != "any" else [listed, *_orders(groups)]
    found: dict[tuple[str, ...], Arrangement] = {}
    for order in orders:
        turned = tuple(groups[at] for at in order)
        sites = [site for site, _ in groupby(group.site for group in turned)]
        if order != listed and len(set(sites)) < len(sites):
            continue
        devices = tuple(device for at in order for device in range(starts[at], starts[at + 1]))
        found.setdefault(_key(turned), Arrangement(cluster=replace(cluster, groups=turned), devices=devices))
    for whole in tuple(found.values()):
        for run in runs(whole.cluster, job)[:-1]:
            first = replace(whole.cluster, groups=whole.cluster.groups[: run.groups])
            part = Arrangement(cluster=first, devices=whole.devices[: run.devices])
            if run.precisions:
                found.setdefault(_key(first.groups), part)
    return tuple(found.values())


def _key(groups: Sequence[NodeGroup]) -> tuple[str, ...]:
    """What tells orders of machines apart: not what they are called."""
    sites = [site for site, _ in groupby(group.site for group in groups)]
    places = {site: place for place, site in reversed(list(enumerate(sites)))}
    return tuple(str(replace(group, name="", site=str(places[group.site]))) for group in groups)


def _orders(groups: Sequence[NodeGroup]) -> Iterator[tuple[int, ...]]:
    listed = range(len(groups))
    if len(groups) <= MOST_GROUPS:
        yield from permutations(listed)
        return
    peaks = [max(group.device.peak_flops.values(), default=0.0) for group in groups]
    sites = list(dict.fromkeys(group.site for group in groups))
    for key in (lambda at: at, lambda at: groups[at].device.memory_bytes, lambda at: peaks[at]):
        ascending = sorted(listed, key=lambda at: (sites.index(groups[at].site), key(at)))
        yield from (tuple(ascending), tuple(reversed(ascending)))


def placed(entries: Sequence[Entry], arrangement: Arrangement, cluster: ClusterSpec) -> list[Entry]:
    """Designs of the arranged cluster, their ranks placed on the devices of `cluster` as listed, and their reports."""
    if arrangement.cluster == cluster:
        return list(entries)
    found = []
    for made, _ in entries:
        placement = None if arrangement.is_listed else arrangement.devices[: made.plan.world_size]
        found.append(replace(made, cluster=cluster, plan=replace(made.plan, placement=placement)))
    return list(zip(found, cost.predict_all(found), strict=True))
