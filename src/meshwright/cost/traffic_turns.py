"""How often a step gathers the parameters of a stage and reduces their gradients, by its sharding and schedule."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from meshwright.cost.traffic_parameters import Part, Unit
from meshwright.schedule import Work, planned
from meshwright.spec.plan import Plan, Schedule, ScheduleKind, Sharding

Parts = tuple[Part, ...]


def shares_turns(plan: Plan) -> bool:
    """Whether all microbatches share one gather each way and one reduction: they pass a stage of one layer in a row."""
    last = len(plan.stages) - 1
    layers = (s.stop - s.start - (index == 0) - (index == last) for index, s in enumerate(plan.stages))
    return plan.schedule.kind is ScheduleKind.BREADTH_FIRST and max(layers) <= 1


def gathers(plan: Plan, index: int, unit: Unit, *, comes_back: bool) -> int:
    """Of `unit` of stage `index` in a step: once, or for every pass forward and, where backward `comes_back`, again
    for that where they are freed between."""
    if _sharding(plan, index, unit) is not Sharding.PARAMETERS:
        return 1
    ways = 1 + comes_back
    return ways if shares_turns(plan) else ways * planned.passes(plan.schedule, index)


def scatters(plan: Plan, index: int, unit: Unit, *, replicas: int) -> Counter[Parts]:
    """How often which parameters of `unit` of stage `index` have their gradients reduced together.

    Where backwards are split, gradients that come with the input's wait for the next ones of matrices, and some
    reductions of matrices find none of them; replicas, which sum their shards once, take those as zero.
    """
    found: Counter[Parts] = Counter()
    if _sharding(plan, index, unit) is Sharding.OPTIMIZER or shares_turns(plan):
        found[unit.parts] = 1
        return found
    if plan.pipeline == 1 or not planned.splits(plan.schedule):
        found[unit.parts] = planned.passes(plan.schedule, index)
        return found
    late = tuple(part for part in unit.parts if not part.early)
    waits = _early_waits(plan.schedule, index, rank=plan.stages[index].rank, pipeline=plan.pipeline)
    filled = len(waits) if late else 1  # of those that find none, from the last
    together = sum(waits[:-filled]) + filled if replicas > 1 and waits else sum(waits)
    for parts, times in ((unit.parts, together), (late, len(waits) - together)):
        if parts and times:
            found[parts] += times
    return found


def _sharding(plan: Plan, index: int, unit: Unit) -> Sharding:
    """What is sharded of `unit`; what a stage with a tied head leaves is as its head is."""
    last = plan.stages[index].stop - 1
    return plan.group_of(last if unit.block is None else unit.block).sharding


@lru_cache(maxsize=64)
def _early_waits(schedule: Schedule, index: int, *, rank: int, pipeline: int) -> tuple[bool, ...]:
    """For every backward of stage `index` that forms gradients of matrices, whether others are there too."""
    early, found = False, []
    for action in planned.table(schedule, pipeline=pipeline)[rank]:
        if action.stage != index or action.work is Work.FORWARD:
            continue
        early = early or action.work is not Work.WEIGHT
        if action.work is not Work.INPUT:
            found.append(early)
            early = False
    return tuple(found)
