"""Jobs: what has to be traced of a design to count its pipeline ranks, each once, and shared out among processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.run.dry.count import content
from meshwright.run.dry.names import passes_of
from meshwright.run.dry.shrink import fewer_microbatches, is_split, keeps_order, shrunk, split
from meshwright.spec.plan import Design


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A trace of pipeline rank `rank` of `design`; those of equal keys are the same."""

    key: str
    design: Design
    rank: int

    @property
    def work(self) -> float:
        """About how long it takes: layers of all passes, and of those of the step before."""
        schedule = self.design.plan.schedule
        return (1.0 + len(self.design.model.layers)) * (1.0 + schedule.microbatches) * schedule.slices

    @property
    def passes(self) -> int:
        """How many it runs in a step."""
        plan = self.design.plan
        if plan.pipeline == 1:
            return 2 * plan.schedule.microbatches
        return passes_of(plan, rank=self.rank).total()

    @property
    def words(self) -> str:
        layers, microbatches = len(self.design.model.layers), self.design.plan.schedule.microbatches
        return f"{layers:,} layers and {microbatches:,} microbatches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Traces of one pipeline rank, the shorter first; `layers` repetitions and `microbatches` are missing from that
    one. One that lacks nothing where it is whole."""

    jobs: tuple[Job, ...]
    layers: int
    microbatches: int


def jobs_of(design: Design, *, rank: int, whole: bool) -> Jobs:
    """What pipeline rank `rank` is counted from: of ranks whose stages have the same content, and run it in the same
    order, one is traced."""
    probe = shrunk(design, rank=rank, whole=whole)
    few = [each if whole else fewer_microbatches(each, rank=rank) for each in probe.designs]
    return Jobs(
        jobs=tuple(_job(each, rank, ordered=whole or keeps_order(each.plan, of=design.plan)) for each in few),
        layers=probe.more,
        microbatches=design.plan.schedule.microbatches - few[0].plan.schedule.microbatches,
    )


def _job(design: Design, rank: int, *, ordered: bool) -> Job:
    plan = design.plan
    ordered = ordered and plan.pipeline > 1
    if is_split(plan) and not ordered:
        design = replace(design, plan=replace(plan, schedule=split(plan, rank=rank)))
    key = f"{content(design, rank)} {design.plan.schedule} {rank if ordered else 0}"
    return Job(key=key, design=design, rank=rank)


def shared_out(jobs: Sequence[Job], *, processes: int) -> list[list[Job]]:
    """Jobs for each process, those of equal keys once, none without any."""
    different = {job.key: job for job in jobs}
    shares: list[list[Job]] = [[] for _ in range(min(processes, len(different)))]
    for job in sorted(different.values(), key=lambda job: job.work, reverse=True):
        min(shares, key=lambda share: sum(each.work for each in share)).append(job)
    return shares
