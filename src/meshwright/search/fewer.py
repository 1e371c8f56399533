"""Fewer: the best design of a job for some of its ranks, as for those that are left when others are lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby

from meshwright.search.check import check
from meshwright.search.decide import RUNTIME, design
from meshwright.search.fewer_learners import fewer_learners
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints, ElasticSpec, JobSpec
from meshwright.spec.plan import Design

# Of each host that is left, in the order of the plan's devices, its group of the cluster and how many ranks it has.
Hosts = tuple[tuple[int, int], ...]

# What says how many ranks do what, which fewer ranks cannot keep.
DEGREES = frozenset(
    {
        "pipeline",
        "replicate",
        "shard",
        "data",
        "context",
        "tensor",
        "expert",
        "expert_tensor",
        "chunks",
        "microbatch",
        "devices",
    }
)


def in_order(hosts: Iterable[tuple[int, int]]) -> Hosts:
    """The same hosts as plans have them: those of one group together, those with more ranks first."""
    return tuple(sorted(hosts, key=lambda one: (one[0], -one[1])))


def hosts_of(design: Design) -> Hosts:
    """The hosts that the plan uses, each with the ranks that it has there."""
    left, found = design.plan.world_size, []
    for index, group in enumerate(design.cluster.groups):
        for _ in range(group.num_nodes):
            count = min(group.devices_per_node, left)
            left -= count
            found += [(index, count)] if count else []
    return in_order(found)


def losses(hosts: Hosts, *, fewest: int) -> Iterator[Hosts]:
    """What may be left of `hosts` with `fewest` ranks or more: after one loss of a rank or a host, then after two."""
    seen, waiting = {hosts}, deque([hosts])
    while waiting:
        for less in _one_loss(waiting.popleft()):
            if less not in seen and sum(ranks for _, ranks in less) >= max(fewest, 1):
                seen.add(less)
                waiting.append(less)
                yield less


def _one_loss(hosts: Hosts) -> Iterator[Hosts]:
    for index, (group, ranks) in enumerate(hosts):
        others = hosts[:index] + hosts[index + 1 :]
        if others:
            yield others
        if ranks > 1:
            yield in_order([*others, (group, ranks - 1)])


def for_hosts(entry: Design, hosts: Hosts) -> Design | None:
    """The best design of the job of `entry` for what is left of its machines; None where no plan is legal and fits. Of
    learners it is that of as many whole ones as so many ranks are (`fewer_learners`).

    Its batch is the job's where a plan has that: with the job's constraints, or else without those of degrees.
    Otherwise it is the nearest that so many ranks share, while the job, its steps and its learning rate stay (templates
    for what may be left, as of Oobleck, SOSP 2023).
    """
    ranks = sum(count for _, count in hosts)
    if entry.plan.learners > 1:
        each = entry.plan.world_size // entry.plan.learners
        cluster = what_is_left(entry.cluster, _without(hosts, ranks % each))
        return fewer_learners(replace(entry, cluster=cluster), ranks // each) if ranks >= each else None
    cluster = what_is_left(entry.cluster, hosts)
    for job in _asked(entry.job, ranks):
        try:
            found = design(entry.model, cluster, job, top=1, trainable=True).design
        except (NoPlanFits, ConfigError):
            continue
        # The rules of elastic runs are about the ranks that a run begins with.
        if not check(replace(found, job=replace(found.job, elastic=ElasticSpec())), scopes=RUNTIME):
            return replace(found, job=entry.job)
    return None


def _without(hosts: Hosts, idle: int) -> Hosts:
    """The same hosts with the last `idle` of their ranks left out."""
    found = []
    for group, ranks in reversed(hosts):
        out = min(idle, ranks)
        idle -= out
        found += [(group, ranks - out)] if ranks > out else []
    return in_order(found)


def what_is_left(cluster: ClusterSpec, hosts: Hosts) -> ClusterSpec:
    """The cluster of `hosts` alone."""
    groups = []
    for (group, ranks), alike in groupby(hosts):
        count = len(list(alike))
        groups.append(replace(cluster.groups[group], num_nodes=count, devices_per_node=ranks))
    return replace(cluster, groups=tuple(groups))


def _asked(job: JobSpec, ranks: int) -> Iterator[JobSpec]:
    """What is asked of the search, in turn."""
    free = replace(job, constraints=_without_degrees(job.constraints))
    yield job
    if free != job:
        yield free
    own, length = job.batch_sequences, job.sequence_length
    batches = {ranks * shares for shares in (own // ranks, own // ranks + 1) if shares} - {own}
    for batch in sorted(batches, key=lambda batch: abs(batch - own)):
        yield replace(free, batch_tokens=batch * length)


def _without_degrees(constraints: Constraints) -> Constraints:
    fix = {name: value for name, value in constraints.fix.items() if name not in DEGREES}
    return replace(constraints, fix=fix)
