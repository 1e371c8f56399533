"""What else a run may have been, where its source leaves unsaid what its authors will have tuned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright import schedule
from meshwright.replay.stages import in_parts
from meshwright.spec.plan import BlockGroup, Design, Offload, Recompute, Schedule, ScheduleKind, Stage

_MICROBATCHES = (2, 4, 8, 16, 32)
_CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
_SHARES = (0.25, 0.5, 0.75)  # of a stage's layers
_MORE = {  # computed again than that
    Recompute.NONE: (Recompute.SELECTIVE, Recompute.FULL),
    Recompute.SELECTIVE: (Recompute.FULL,),
    Recompute.FULL: (),
}


def alternatives(design: Design, *, microbatches: bool, chunks: bool) -> tuple[Design, ...]:
    """The design with every other microbatch and number of interleaved stages on a rank, of those asked for."""
    sizes = (design.plan.microbatch, *(_MICROBATCHES if microbatches else ()))
    batches = [found for size in sizes if (found := _with_microbatch(design, size)) is not None]
    layered = [_with_chunks(one, count) for one in batches for count in (_CHUNKS if chunks else ())]
    return (*batches[1:], *(one for one in layered if one is not None))


def smaller(designs: Sequence[Design], *, some: bool) -> tuple[Design, ...]:
    """Every design with attention and with every layer computed again, where that is more than before, and of `some`
    stacks with the first layers of each stage; with activations in the host's memory where there is one stage."""
    found = [_with(one, recompute=how) for one in designs for how in _MORE[one.plan.first_group.recompute]]
    plain = [one for one in designs if some and one.plan.first_group.recompute is not Recompute.FULL]
    found += [_with_again(one, share) for one in plain for share in _SHARES]
    return (*found, *(_with(one, offload=Offload.ACTIVATIONS) for one in designs if one.plan.pipeline == 1))


def _with_again(design: Design, share: float) -> Design:
    """With that share of the layers of each stage computed again, the first ones, and no more of the others."""

    def parted(stage: Stage) -> tuple[BlockGroup, ...]:
        start, stop = stage.groups[0].start, stage.groups[-1].stop
        layers = stop - start - (start == 0) - (stop == len(design.model.layers) + 2)
        whole = replace(stage.groups[0], stop=stop, recompute=Recompute.FULL)
        return in_parts(whole, None, round(share * layers))

    stages = tuple(replace(stage, groups=parted(stage)) for stage in design.plan.stages)
    return replace(design, plan=replace(design.plan, stages=stages))


def _with(design: Design, *, recompute: Recompute | None = None, offload: Offload | None = None) -> Design:
    def changed(group: BlockGroup) -> BlockGroup:
        return replace(group, recompute=recompute or group.recompute, offload=offload or group.offload)

    stages = tuple(replace(stage, groups=tuple(map(changed, stage.groups))) for stage in design.plan.stages)
    return replace(design, plan=replace(design.plan, stages=stages))


def _with_microbatch(design: Design, size: int) -> Design | None:
    """None where the batch is no whole number of them, or too few for the pipeline."""
    plan = design.plan
    if size == plan.microbatch:
        return design
    local = plan.microbatch * plan.schedule.microbatches
    count = local // size
    bad = local % size or (plan.schedule.kind is ScheduleKind.INTERLEAVED and count % plan.pipeline)
    if bad or count < plan.pipeline:
        return None
    return replace(design, plan=replace(plan, microbatch=size, schedule=replace(plan.schedule, microbatches=count)))


def _with_chunks(design: Design, chunks: int) -> Design | None:
    """None where the layers, or those with the embedding and the head for two, or the microbatches are not whole runs
    of them, or another schedule is named."""
    plan, layers = design.plan, len(design.model.layers)
    pipeline, kind = plan.pipeline, ScheduleKind.INTERLEAVED
    alone = next((extra for extra in (0, 2) if (layers + extra) % (pipeline * chunks) == 0), None)
    if pipeline == 1 or plan.schedule.kind is not ScheduleKind.ONE_F_ONE_B or alone is None:
        return None
    if schedule.problems(kind, pipeline=pipeline, chunks=chunks, microbatches=plan.schedule.microbatches):
        return None
    each, count = (layers + alone) // (pipeline * chunks), pipeline * chunks
    before = 0 if alone else 1
    edges = [0, *(before + each * index for index in range(1, count)), layers + 2]
    stages = tuple(
        Stage(
            rank=schedule.stage_rank(kind, index, pipeline=pipeline, chunks=chunks),
            groups=(replace(plan.first_group, start=edges[index], stop=edges[index + 1]),),
        )
        for index in range(count)
    )
    table = Schedule(kind=kind, microbatches=plan.schedule.microbatches, chunks=chunks)
    return replace(design, plan=replace(plan, stages=stages, schedule=table))
