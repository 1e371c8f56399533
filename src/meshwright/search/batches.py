"""The batch that all devices can share: which one is nearest when the job's own divides over no layout of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from meshwright.search.constraints import limits
from meshwright.search.rules import divisors
from meshwright.search.space import Space
from meshwright.search.tensor_degrees import legal_degrees
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import Problem
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec

Listed = Callable[[ModelSpec, ClusterSpec, JobSpec], Space]
TRIED = 4
RULE = "batch-is-asked"


def batch_problem(
    model: ModelSpec, cluster: ClusterSpec, job: JobSpec, space: Space, *, listed: Listed
) -> Problem | None:
    """The batch as the cause of there being no legal plan, with the nearest that has one; None when it is not.

    Only a job that must use all devices can fail by its batch: with fewer, one sequence a step always has a plan.
    """
    if job.constraints.devices != "all" or RULE not in {entry.rule for entry in space.rejected}:
        return None
    sizes = data_sizes(model, cluster, job)
    if not sizes:
        return None
    length, own = job.sequence_length, job.batch_sequences
    batches = {count * size for size in sizes for count in (own // size, own // size + 1) if count}
    for batch in sorted(batches, key=lambda batch: abs(batch - own))[:TRIED]:
        tokens = batch * length
        if not listed(model, cluster, replace(job, batch_tokens=tokens)).count:
            continue
        devices, least = cluster.num_devices, sizes[0]
        batch_words = f"{own:,} sequences of {length:,} tokens"
        if least > own:
            what = f"{batch_words} are too few for {devices:,} devices, which share at least {least:,}"
        else:
            what = f"{batch_words} divide over no data parallel size of {devices:,} devices"
        fix = f"choose {tokens} tokens ({batch:,} sequences), the nearest that does, or constraints.devices = any"
        return Problem(where="job.batch_tokens", what=what, why=f"rule {RULE}", fix=fix)
    return None


def data_sizes(model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> tuple[int, ...]:
    """Data parallel sizes that fill all devices with tensor and pipeline degrees the model and the job allow."""
    asked, devices = limits(job.constraints), cluster.num_devices
    legal = legal_degrees(model, most=devices)
    tensors = [degree for degree in legal if devices % degree == 0 and asked.allows("tensor", degree)]
    pipelines = [degree for degree in divisors(devices) if degree <= len(model.blocks)]
    inner = {tensor * pipeline for tensor in tensors for pipeline in pipelines if asked.allows("pipeline", pipeline)}
    found = {devices // size for size in inner if devices % size == 0}
    return tuple(sorted(size for size in found if asked.allows("data", size)))
