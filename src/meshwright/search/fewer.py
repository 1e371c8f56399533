"""Fewer: the best design of a job for some of its ranks, as for those that are left when others are lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshwright.search.check import check
from meshwright.search.decide import RUNTIME, design
from meshwright.search.fewer_learners import fewer_learners
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, NoPlanFits
from meshwright.spec.job import Constraints, ElasticSpec, JobSpec
from meshwright.spec.plan import Design

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


def for_ranks(entry: Design, ranks: int) -> Design | None:
    """The best design of the job of `entry` for the first `ranks` of its devices, all of one node; None where no plan
    is legal and fits. Of learners it is that of as many whole ones as so many ranks are (`fewer_learners`).

    Its batch is the job's where a plan has that: with the job's constraints, or else without those of degrees.
    Otherwise it is the nearest that so many ranks share, while the job, its steps and its learning rate stay (templates
    for what may be left, as of Oobleck, SOSP 2023).
    """
    if entry.plan.learners > 1:
        each = entry.plan.world_size // entry.plan.learners
        cluster = first_devices(entry.cluster, ranks - ranks % each)
        return fewer_learners(replace(entry, cluster=cluster), ranks // each) if ranks >= each else None
    cluster = first_devices(entry.cluster, ranks)
    for job in _asked(entry.job, ranks):
        try:
            found = design(entry.model, cluster, job, top=1, trainable=True).design
        except (NoPlanFits, ConfigError):
            continue
        # The rules of elastic runs are about the ranks that a run begins with.
        if not check(replace(found, job=replace(found.job, elastic=ElasticSpec())), scopes=RUNTIME):
            return replace(found, job=entry.job)
    return None


def first_devices(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """The first `count` devices of the cluster's first node."""
    group = cluster.groups[0]
    assert count <= group.devices_per_node, "they are of one node"
    return replace(cluster, groups=(replace(group, num_nodes=1, devices_per_node=count),))


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
