"""Rules of extents: over which numbers of data parallel ranks groups of blocks may be sharded, and beside what."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope, choices, divisors, groups_of
from meshwright.search.runtime_rules import EIGHT_BIT_GRADIENTS
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design, Offload, Plan, Sharding

_MOST_TOLD = 2**20  # data parallel ranks of which all divisors are looked for


def extents_divide(design: Design) -> Problem | None:
    """A group's shards are a part of the shard axis or several of it, and others than those of all groups."""
    plan = design.plan
    for where, group in groups_of(plan):
        shards = group.shards
        if shards is None:
            continue
        where = f"{where}.shards"
        if group.sharding is Sharding.NONE:
            what = f"{shards} of a group that is not sharded"
            return Problem(where=where, what=what, fix="leave it out, or choose zero1, zero2 or zero3")
        if shards == plan.shard:
            what = f"{shards} is the size of the shard axis, which groups are sharded over that do not say"
            return Problem(where=where, what=what, fix="leave it out")
        if not _fits(shards, plan):
            what = f"{shards} ranks neither divide the shard axis of {plan.shard} nor are several of it"
            what += f" that divide the {plan.data} data parallel ranks"
            return Problem(where=where, what=what, fix=_extents_fix(plan))
    first = plan.first_group.shards
    if first is not None and all(group.shards == first for group in plan.groups):
        fix = f"leave it out, with replicate {plan.data // first} and shard {first}"
        return Problem(
            where="plan.stages", what=f"every group is sharded over {first} rank{'s' * (first > 1)}", fix=fix
        )
    head, table = plan.groups[-1].shards, plan.first_group.shards
    if design.model.head.tied and head != table:
        last = f"plan.stages[{len(plan.stages) - 1}].groups[{len(plan.stages[-1].groups) - 1}].shards"
        what = f"a head over {head or plan.shard} ranks that is tied to a table over {table or plan.shard}"
        return Problem(where=last, what=what, fix="choose the same for both")
    return None


def extents_laid(design: Design) -> Problem | None:
    """Groups that are sharded over ranks of their own stand in plans of which that is known to run, and what it
    costs."""
    plan, job = design.plan, design.job
    if not plan.extents:
        return None
    precision = plan.gradients.precision
    against = {
        "of learners": plan.gradients.kind.has_learners,
        "whose gradients are compressed": plan.gradients.compression is not None,
        f"whose gradients meet in {precision.value}": precision in EIGHT_BIT_GRADIENTS,
        "with experts on a grid of their own": plan.experts is not None,
        "with parameters in the host's memory": any(group.offload is Offload.PARAMETERS for group in plan.groups),
        "with axes in another order": not plan.has_usual_order,
        "of replicas under torchft": job.elastic.by_torchft,
    }
    for how, refused in against.items():
        if refused:
            where = next(where for where, group in groups_of(plan) if group.shards is not None)
            what = f"a group over ranks of its own in a plan {how}"
            return Problem(where=f"{where}.shards", what=what, fix="leave it out")
    return None


def _fits(shards: int, plan: Plan) -> bool:
    return plan.data % shards == 0 and (plan.shard % shards == 0 or shards % plan.shard == 0)


def _extents_fix(plan: Plan) -> str:
    known = divisors(plan.data) if len(plan.groups) > 1 and plan.data <= _MOST_TOLD else ()
    told = [shards for shards in known if shards != plan.shard and _fits(shards, plan)]
    return f"{choices(told)}, or leave it out" if told else "leave it out"


EXTENT_RULES = (
    Rule(name="shards-divide", scope=Scope.PLAN, check=extents_divide),
    Rule(name="shards-laid", scope=Scope.PLAN, check=extents_laid),
)
