"""Rules of extents: over which numbers of data parallel ranks groups of blocks may be sharded, and beside what."""

from __future__ import annotations

from meshwright.search.rules import Rule, Scope, choices, divisors, groups_of
from meshwright.spec.errors import Problem
from meshwright.spec.plan import BlockGroup, Design, Plan, Sharding

_MOST_TOLD = 2**20  # data parallel ranks of which all divisors are looked for


def extents_divide(design: Design) -> Problem | None:
    """A group's shards are a part of the shard axis or several of it, and others than those of all groups where no
    learners take the replicate axis."""
    plan = design.plan
    for where, group in groups_of(plan):
        what, fix = _wrong(group, plan)
        if what:
            return Problem(where=f"{where}.shards", what=what, fix=fix or _extents_fix(design, where))
    return _together(design)


def _wrong(group: BlockGroup, plan: Plan) -> tuple[str, str]:
    """What is wrong with the shards of one group, and what mends it where that is said of itself; "" where nothing."""
    shards = group.shards
    if shards is None:
        return "", ""
    if group.sharding is Sharding.NONE:
        return f"{shards} of a group that is not sharded", "leave it out, or choose zero1, zero2 or zero3"
    if shards == plan.shard:
        return f"{shards} is the size of the shard axis, which groups are sharded over that do not say", ""
    if not _fits(shards, plan):
        what = f"{shards} ranks neither divide the shard axis of {plan.shard} nor are several of it"
        whose = " of a learner" if plan.learners > 1 else ""
        return f"{what} that divide the {_data(plan)} data parallel ranks{whose}", ""
    return "", ""


def _together(design: Design) -> Problem | None:
    """What is wrong with the shards of groups beside each other."""
    plan = design.plan
    first = plan.first_group.shards
    if first is not None and all(group.shards == first for group in plan.groups) and plan.learners == 1:
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
    against = {
        "with experts on a grid of their own": plan.experts is not None,
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
    return _data(plan) % shards == 0 and (plan.shard % shards == 0 or shards % plan.shard == 0)


def _data(plan: Plan) -> int:
    """Data parallel ranks that meet in every step."""
    return plan.data // plan.learners


def _extents_fix(design: Design, where: str) -> str:
    """The numbers of ranks that the group at `where` may be sharded over beside the other groups as they are."""
    plan = design.plan
    others = {path: group.shards for path, group in groups_of(plan) if path != where}
    ends = [path for path, _ in groups_of(plan)]
    tied = {ends[0]: ends[-1], ends[-1]: ends[0]} if design.model.head.tied and len(ends) > 1 else {}
    if (other := others.get(tied.get(where, ""))) is not None:
        unlike = other != plan.shard and _fits(other, plan) and (len(set(others.values())) > 1 or plan.learners > 1)
        return f"choose {other}" if unlike else "leave it out, here and of the group that is tied to it"
    if where in tied:
        return "leave it out"
    if dict(groups_of(plan))[where].shards == plan.shard:
        return "leave it out"
    alike = len(set(others.values())) == 1 and plan.learners == 1
    alone = set(others.values()) if alike else set()
    free = others and extents_laid(design) is None and _data(plan) <= _MOST_TOLD
    told = [n for n in divisors(_data(plan)) if n != plan.shard and n not in alone and _fits(n, plan)] if free else []
    return f"{choices(told)}, or leave it out" if told else "leave it out"


EXTENT_RULES = (
    Rule(name="shards-divide", scope=Scope.PLAN, check=extents_divide),
    Rule(name="shards-laid", scope=Scope.PLAN, check=extents_laid),
)
