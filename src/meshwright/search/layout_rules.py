"""Rules of shape: which blocks lie on which stage, and which rank on which device."""

from __future__ import annotations

from collections import Counter

from meshwright.schedule import planned
from meshwright.schedule.build import V_SHAPES
from meshwright.search.rules import Rule, Scope
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design


def answers_design(design: Design) -> Problem | None:
    """The plan names the model and the cluster it is filed with."""
    plan = design.plan
    if plan.model != design.model.name:
        return Problem(
            where="plan.model",
            what=f"{plan.model!r} is not the design's model {design.model.name!r}",
            fix="plan again for this model",
        )
    if plan.cluster != design.cluster.name:
        return Problem(
            where="plan.cluster",
            what=f"{plan.cluster!r} is not the design's cluster {design.cluster.name!r}",
            fix="plan again for this cluster",
        )
    return None


def axes_once(design: Design) -> Problem | None:
    """Every axis is named at most once."""
    for name, count in Counter(axis.name for axis in design.plan.axes).items():
        if count > 1:
            return Problem(where="plan.axes", what=f"axis {name.value} is named {count} times", fix="name it once")
    return None


def world_fits(design: Design) -> Problem | None:
    """The ranks are no more than the devices."""
    world, devices = design.plan.world_size, design.cluster.num_devices
    if world <= devices:
        return None
    return Problem(
        where="plan.axes",
        what=f"the axes multiply to {world:,} ranks and the cluster has {devices:,} devices",
        fix=f"make the product {devices:,} or less",
    )


def world_is_whole(design: Design) -> Problem | None:
    """Every device works when the job asks for all of them."""
    world, devices = design.plan.world_size, design.cluster.num_devices
    if design.job.constraints.devices != "all" or world >= devices:
        return None
    return Problem(
        where="plan.axes",
        what=f"the axes multiply to {world:,} ranks and the job asks for all {devices:,} devices",
        fix='make the product equal, or set job.constraints.devices = "any"',
    )


def placement_permutes(design: Design) -> Problem | None:
    """Every rank has a device of its own."""
    placement, world, devices = design.plan.placement, design.plan.world_size, design.cluster.num_devices
    if placement is None:
        return None
    if len(placement) != world:
        return Problem(
            where="plan.placement",
            what=f"{len(placement):,} devices are named for {world:,} ranks",
            fix=f"name {world:,}",
        )
    twice = [device for device, count in Counter(placement).items() if count > 1]
    if twice:
        return Problem(
            where="plan.placement", what=f"device {twice[0]} holds more than one rank", fix="name every device once"
        )
    outside = [device for device in placement if not 0 <= device < devices]
    if outside:
        return Problem(
            where="plan.placement", what=f"there is no device {outside[0]}", fix=f"choose from 0 to {devices - 1}"
        )
    return None


def stages_cover(design: Design) -> Problem | None:
    """Stages hold the blocks of the model in order, every block once, and none is empty."""
    expected, last = 0, len(design.model.blocks)
    for index, stage in enumerate(design.plan.stages):
        for position, group in enumerate(stage.groups):
            where = f"plan.stages[{index}].groups[{position}]"
            if group.start != expected:
                return Problem(
                    where=f"{where}.start",
                    what=f"{group.start} does not follow block {expected - 1}",
                    fix=f"choose {expected}",
                )
            if group.stop <= group.start:
                return Problem(
                    where=f"{where}.stop",
                    what=f"{group.stop} leaves no blocks",
                    fix=f"choose {group.start + 1} or more",
                )
            expected = group.stop
    if expected == last:
        return None
    return Problem(
        where="plan.stages", what=f"they hold blocks 0 to {expected - 1} of a model of {last} blocks", fix="cover all"
    )


def stages_match_pipeline(design: Design) -> Problem | None:
    """There are `chunks` stages for every pipeline rank."""
    plan = design.plan
    expected = plan.pipeline * plan.schedule.chunks
    if len(plan.stages) == expected:
        return None
    return Problem(
        where="plan.stages",
        what=f"{len(plan.stages)} stages for pipeline {plan.pipeline} of {plan.schedule.chunks} chunks",
        fix=f"make {expected}",
    )


def embedding_first(design: Design) -> Problem | None:
    """The embedding is on the first pipeline rank."""
    stages = design.plan.stages
    if stages[0].rank == 0:
        return None
    return Problem(
        where="plan.stages[0].rank", what="the embedding is not on the first pipeline rank", fix="choose rank 0"
    )


def head_last(design: Design) -> Problem | None:
    """The head is on the rank of the last stage: the last pipeline rank, or the first under V shapes."""
    plan = design.plan
    last = plan.pipeline - 1
    if _has_places(design):
        last = planned.placement(plan.schedule, pipeline=plan.pipeline)[-1]
    if plan.stages[-1].rank == last:
        return None
    name = "first" if last == 0 and plan.pipeline > 1 else "last"
    return Problem(
        where=f"plan.stages[{len(plan.stages) - 1}].rank",
        what=f"the head is not on the {name} pipeline rank",
        fix=f"choose rank {last}",
    )


def stages_loop(design: Design) -> Problem | None:
    """Stages are dealt to pipeline ranks in turn: stage s lives on rank s modulo the pipeline size, or down the ranks
    and up again under V shapes.
    """
    plan = design.plan
    if not _has_places(design):
        return None
    places = planned.placement(plan.schedule, pipeline=plan.pipeline)
    shape = "V" if places[-1] < plan.pipeline - 1 else "turn"
    for index, (stage, rank) in enumerate(zip(plan.stages, places, strict=True)):
        if stage.rank != rank:
            return Problem(
                where=f"plan.stages[{index}].rank",
                what=f"{stage.rank} breaks the {shape} of pipeline {plan.pipeline}",
                fix=f"choose rank {rank}",
            )
    return None


def _has_places(design: Design) -> bool:
    """Whether the schedule says where stages lie; another rule refuses what it does not."""
    plan, schedule = design.plan, design.plan.schedule
    if len(plan.stages) != plan.pipeline * schedule.chunks:
        return False
    if planned.table_problems(schedule, pipeline=plan.pipeline):
        return False
    return not (schedule.kind in V_SHAPES and schedule.chunks != 2)


def groups_uniform(design: Design) -> Problem | None:
    """All groups of blocks have one tensor degree, sequence parallelism and precision."""
    groups = design.plan.groups
    for name in ("tensor", "sequence_parallel", "precision"):
        values = {str(getattr(group, name)) for group in groups}
        if len(values) > 1:
            return Problem(
                where=f"plan.stages[*].groups[*].{name}",
                what=f"groups differ: {', '.join(sorted(values))}",
                fix="give all groups one value",
            )
    return None


LAYOUT_RULES = (
    Rule(name="answers-design", scope=Scope.PLAN, check=answers_design),
    Rule(name="axes-once", scope=Scope.PLAN, check=axes_once),
    Rule(name="world-fits", scope=Scope.PLAN, check=world_fits),
    Rule(name="world-is-whole", scope=Scope.PLAN, check=world_is_whole),
    Rule(name="placement-permutes", scope=Scope.PLAN, check=placement_permutes),
    Rule(name="stages-cover", scope=Scope.PLAN, check=stages_cover),
    Rule(name="stages-match-pipeline", scope=Scope.PLAN, check=stages_match_pipeline),
    Rule(name="embedding-first", scope=Scope.PLAN, check=embedding_first),
    Rule(name="head-last", scope=Scope.PLAN, check=head_last),
    Rule(name="stages-loop", scope=Scope.PLAN, check=stages_loop),
    Rule(name="groups-uniform", scope=Scope.PLAN, check=groups_uniform),
)
