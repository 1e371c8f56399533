"""Fewer: the best design of a job for some of its ranks, as for those that are left when others are lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from meshwright.search.check import check
from meshwright.search.decide import RUNTIME, design
from meshwright.search.fewer_learners import fewer_learners
from meshwright.search.rules import divisors
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints, Devices, ElasticSpec, JobSpec
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

    Its batch is the job's: with the job's constraints where a plan has it with all of them, or else without those of
    degrees, where data ranks divide it or leave rows empty, whichever is faster. Where neither can be, as with experts,
    it is the nearest that so many ranks share, while the job, its steps and its learning rate stay (templates for what
    may be left, as of Oobleck, SOSP 2023).
    """
    ranks = sum(count for _, count in hosts)
    if entry.plan.learners > 1:
        each = entry.plan.world_size // entry.plan.learners
        cluster = what_is_left(entry.cluster, _without(hosts, ranks % each))
        return fewer_learners(replace(entry, cluster=cluster), ranks // each) if ranks >= each else None
    cluster = what_is_left(entry.cluster, hosts)
    free = replace(entry.job, constraints=_without_degrees(entry.job.constraints))
    asked = _best(entry, cluster, [entry.job])
    if asked is not None and free != entry.job:
        return asked.design
    kept = asked if free == entry.job else _best(entry, cluster, [free])
    found = [one for one in (kept, _with_empty_rows(entry, cluster, free, ranks)) if one is not None]
    best = min(found, key=lambda one: one.seconds, default=None) or _best(entry, cluster, _nearest(free, ranks))
    return None if best is None else best.design


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A design that this runtime can train, for the job as it was, and the predicted seconds of its step."""

    design: Design
    seconds: float


def _best(entry: Design, cluster: ClusterSpec, asked: Iterable[JobSpec], *, empty_rows: int = 0) -> _Found | None:
    """Of the first of the jobs that are `asked` for which there is a plan, that one."""
    for job in asked:
        try:
            decision = design(entry.model, cluster, _on_all(job), top=1, trainable=True)
        except (NoPlanFits, ConfigError):
            continue
        found = replace(decision.design, plan=replace(decision.design.plan, empty_rows=empty_rows))
        read = replace(found.job, batch_tokens=found.plan.read_tokens, elastic=ElasticSpec())
        # The rules of elastic runs are about the ranks that a run begins with.
        if not check(replace(found, job=read), scopes=RUNTIME):
            return _Found(design=replace(found, job=entry.job), seconds=decision.report.step.seconds)
    return None


def _with_empty_rows(entry: Design, cluster: ClusterSpec, job: JobSpec, ranks: int) -> _Found | None:
    """The best design of as many data ranks as leave the fewest rows empty, of those that do not divide the batch."""
    own = job.batch_sequences
    rows = {data: -(-own // data) * data for data in divisors(ranks) if own % data and own > data}
    if not rows:
        return None
    data = min(rows, key=lambda data: (rows[data], -data))
    fixed = replace(job.constraints, fix={**job.constraints.fix, "data": data})
    asked = replace(job, batch_tokens=rows[data] * job.sequence_length, constraints=fixed)
    return _best(entry, cluster, [asked], empty_rows=rows[data] - own)


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


def _nearest(job: JobSpec, ranks: int) -> Iterator[JobSpec]:
    """The job with the batches nearest to its own that so many ranks share, in turn."""
    own, length = job.batch_sequences, job.sequence_length
    batches = {ranks * shares for shares in (own // ranks, own // ranks + 1) if shares} - {own}
    for batch in sorted(batches, key=lambda batch: abs(batch - own)):
        yield replace(job, batch_tokens=batch * length)


def _on_all(job: JobSpec) -> JobSpec:
    """The job on every rank that is left, each of which is a member of the epoch, also where fewer would be faster."""
    return replace(job, constraints=replace(job.constraints, devices=Devices.ALL))


def _without_degrees(constraints: Constraints) -> Constraints:
    fix = {name: value for name, value in constraints.fix.items() if name not in DEGREES}
    return replace(constraints, fix=fix)
