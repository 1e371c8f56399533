"""Whether a part of the machines alone would be clearly faster than all of them, and what learners would save between
sites: each is told by a search of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from meshwright.search.advice import advise_apart
from meshwright.search.job_rules import allowed_precisions
from meshwright.search.refine import entry_value
from meshwright.search.worth import TRIED
from meshwright.spec.cluster import ClusterSpec, NodeGroup, Precision
from meshwright.spec.job import JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName, Report
from meshwright.spec.synchronize import SyncKind
from meshwright.spec.units import counted, format_seconds, format_times

Entry = tuple[Design, Report]
WORTH = 0.1  # of a step, that a part of the machines saves before it is spoken of
_KERNELS = 0.7  # of the peak: no stack of matrix products and attention is quicker
_NO_LEARNERS = f"sync={SyncKind.EVERY_STEP.value}"


class Search(Protocol):
    """The best plan of a question; None where none fits, and where none has a value `below` what is told."""

    def __call__(self, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, below: float = ...) -> Entry | None: ...


def advise_parts(chosen: Design, report: Report, *, best: Search, learners: bool) -> tuple[str, ...]:
    """What a part of the machines would take, where the job asks for all, and learners, where they are to be told."""
    if chosen.job.objective is not Objective.TIME:
        return ()
    part = _best_part(chosen, report, best=best)
    told = () if part is None else (_part_words(chosen, report, part),)
    return (*told, *(_apart(chosen, report, best=best) if learners else ()))


def _best_part(chosen: Design, report: Report, *, best: Search) -> Entry | None:
    """The best plan on a part of the machines alone, where that saves WORTH of the step."""
    constraints = chosen.job.constraints
    if constraints.devices != "all" or "devices" in constraints.fix:
        return None
    job = chosen.job
    found: Entry | None = None
    limit = (1.0 - WORTH) * report.step_seconds
    own, peak = _peak(chosen.cluster, [chosen.plan.first_group.precision]), partial(_best_peak, job=job)
    for parts in sorted(_parts(chosen.cluster), key=lambda parts: -max(map(peak, parts), default=0.0)):
        for part in parts:
            share = peak(part) / max(own, 1.0)
            entry = best(chosen.model, part, job) if _work_seconds(chosen, report) < share * limit else None
            if entry is None or entry[1].step_seconds >= limit:
                break
            found, limit = entry, entry[1].step_seconds
    return found


def _parts(cluster: ClusterSpec) -> Iterator[Sequence[ClusterSpec]]:
    """Each site alone, each kind of device, and each kind of a site; of nodes that are all alike ever fewer, each half
    of those before, of which one is not faster than more are."""
    groups = cluster.groups
    if len(groups) == 1:
        number = groups[0].num_nodes
        halves = (number >> times for times in range(1, number.bit_length()))
        yield [replace(cluster, groups=(replace(groups[0], num_nodes=count),)) for count in halves]
        return
    told: list[tuple[NodeGroup, ...]] = [groups]
    for key in (_site, _kind, lambda group: (_site(group), _kind(group))):
        for value in dict.fromkeys(map(key, groups)):
            alike = tuple(group for group in groups if key(group) == value)
            if alike not in told:
                told.append(alike)
                yield [replace(cluster, groups=alike)]


def _site(group: NodeGroup) -> str:
    return group.site


def _kind(group: NodeGroup) -> str:
    return group.device.name


def _work_seconds(chosen: Design, report: Report) -> float:
    """Seconds that the work of a step alone takes all machines, about the least: a part takes as much longer as its
    peak is less."""
    alike = len(chosen.cluster.groups) == 1
    work = report.share(LineName.FORWARD, LineName.BACKWARD) if alike else (report.mfu or 0.0) / _KERNELS
    return work * report.step_seconds


def _best_peak(cluster: ClusterSpec, job: JobSpec) -> float:
    return _peak(cluster, allowed_precisions(job, cluster))


def _peak(cluster: ClusterSpec, precisions: Sequence[Precision]) -> float:
    """FLOP/s of all devices in the one of `precisions` in which they are most."""
    each = (
        sum(group.device.peak_flops.get(kind, 0.0) * group.num_devices for group in cluster.groups)
        for kind in precisions
    )
    return max(each, default=0.0)


def _part_words(chosen: Design, report: Report, part: Entry) -> str:
    made, found = part
    ours, theirs = chosen.cluster, made.cluster
    kinds = list(dict.fromkeys(map(_kind, theirs.groups)))
    named = kinds if len(kinds) < len(set(map(_kind, ours.groups))) else []
    named += [f"site {site}" for site in theirs.sites] if len(theirs.sites) < len(ours.sites) else []
    times = report.step_seconds / found.step_seconds
    which = f" ({', '.join(named)})" if named else ""
    return (
        f"{theirs.num_devices:,} of the {counted(ours.num_devices, 'device')} alone{which} would be "
        f"{format_times(times)} as fast, "
        f"{format_seconds(found.step_seconds)} a step, not {format_seconds(report.step_seconds)} "
        f"({made.plan.describe()}); the job asks for all, and --set constraints.devices=any lets a plan leave some out"
    )


def _apart(chosen: Design, report: Report, *, best: Search) -> tuple[str, ...]:
    """What learners would save between sites, where the job allows none and a plan with some is better."""
    cluster, job = chosen.cluster, chosen.job
    has_learners = chosen.plan.gradients.kind.has_learners or any(kind.has_learners for kind in job.synchronize.kinds)
    if len(cluster.sites) < 2 or has_learners:
        return ()
    kinds = replace(job.synchronize, kinds=(*job.synchronize.kinds, *TRIED), compressions=())
    forbid = replace(job.constraints, forbid=(*job.constraints.forbid, _NO_LEARNERS))
    value = entry_value((chosen, report), job.objective)
    other = best(chosen.model, cluster, replace(job, synchronize=kinds, constraints=forbid), below=value)
    if other is None or entry_value(other, job.objective) >= value:
        return ()
    return advise_apart(report, other, len(cluster.sites))
