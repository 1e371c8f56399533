"""Rules of form, asked before all others: what counts something is 1 or more, and what holds something holds it."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.search.rules import Rule, Scope
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design, Plan


def counts_are_positive(design: Design) -> Problem | None:
    """Sizes, degrees and counts of the plan are 1 or more."""
    for where, number in _counts(design.plan):
        if number < 1:
            return Problem(where=where, what=f"{number} is not a count of anything", fix="choose 1 or more")
    return None


def stages_hold_blocks(design: Design) -> Problem | None:
    """There are stages, and each has groups of blocks, none of more than the model has."""
    stages, blocks = design.plan.stages, len(design.model.blocks)
    if not stages:
        return Problem(where="plan.stages", what="the plan has no stages", fix="give it one or more")
    if len(stages) > blocks:
        held = f"{len(design.model.layers):,} layers, embedding and head"
        what = f"{len(stages):,} stages are more than the {blocks:,} blocks of the model ({held})"
        return Problem(where="plan.stages", what=what, fix=f"choose {blocks:,} stages or fewer")
    for index, stage in enumerate(stages):
        if not stage.groups:
            return Problem(where=f"plan.stages[{index}]", what="the stage holds no blocks", fix="give it one or more")
        for position, group in enumerate(stage.groups):
            if group.stop - group.start > blocks:
                where = f"plan.stages[{index}].groups[{position}].stop"
                what = f"blocks {group.start} to {group.stop - 1} are more than the {blocks} of the model"
                return Problem(where=where, what=what, fix=f"choose {group.start + blocks} or less")
    return None


def _counts(plan: Plan) -> Iterator[tuple[str, int]]:
    """Every number of a plan that counts something, with its place."""
    yield "plan.sequence_length", plan.sequence_length
    yield "plan.microbatch", plan.microbatch
    yield "plan.schedule.microbatches", plan.schedule.microbatches
    yield "plan.schedule.chunks", plan.schedule.chunks
    yield "plan.schedule.slices", plan.schedule.slices
    yield "plan.exchange.inner", plan.exchange.inner
    if plan.experts is not None:
        yield "plan.experts.expert", plan.experts.expert
        yield "plan.experts.tensor", plan.experts.tensor
    for index, axis in enumerate(plan.axes):
        yield f"plan.axes[{index}].size", axis.size
    for index, stage in enumerate(plan.stages):
        for position, group in enumerate(stage.groups):
            yield f"plan.stages[{index}].groups[{position}].tensor", group.tensor
            if group.shards is not None:
                yield f"plan.stages[{index}].groups[{position}].shards", group.shards


FORM_RULES = (
    Rule(name="counts-are-positive", scope=Scope.FORM, check=counts_are_positive),
    Rule(name="stages-hold-blocks", scope=Scope.FORM, check=stages_hold_blocks),
)
