"""Of plans that are as good the first is the one that uses least, whatever their order was."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from meshwright import cost
from meshwright.search import decide
from meshwright.search.candidate import TIE
from meshwright.search.refine import Entry, entry_order
from meshwright.search.simple import mechanisms, simplest_first, why_simplest
from meshwright.spec.job import Objective
from meshwright.spec.plan import Axis, AxisName, Design, Plan, Recompute, Schedule, ScheduleKind
from tests.search import search_samples as samples
from tests.support import searches


@searches.once
def plain() -> Entry:
    model, cluster, job = samples.model(layers=2), samples.cluster(samples.nodes(devices_per_node=4)), samples.job()
    made = decide.best(model, cluster, job)
    return made.design, made.report


def axes(**sizes: int) -> tuple[Axis, ...]:
    return tuple(Axis(name=name, size=sizes.get(name.value, 1)) for name in AxisName)


def entry(plan: Plan, value: float) -> Entry:
    """The plan with what plans are ranked by at `value` times that of the plain one."""
    design, report = plain()
    step = replace(report.step, seconds=value * report.step_seconds)
    return replace(design, plan=plan), replace(report, step=step)


def variants() -> dict[str, Plan]:
    start = replace(plain()[0].plan, axes=axes(shard=4), microbatch=1, schedule=Schedule(microbatches=4))
    return {
        "plain": start,
        "two axes": replace(start, axes=axes(pipeline=2, shard=2)),
        "loops": replace(
            start,
            axes=axes(pipeline=2, shard=2),
            schedule=Schedule(kind=ScheduleKind.INTERLEAVED, microbatches=4, chunks=17),
        ),
        "odd": replace(start, microbatch=3),
    }


@pytest.mark.parametrize("order", list(permutations(("plain", "two axes", "loops", "odd"))))
def test_what_is_as_good_as_the_best_is_ordered_by_what_it_uses(order: tuple[str, ...]) -> None:
    found = variants()
    entries = [entry(found[name], 1.0 + 0.3 * TIE * place) for place, name in enumerate(order)]
    slower = entry(replace(found["plain"], microbatch=2), 1.0 + 1.5 * TIE)
    ranked = simplest_first([*entries, slower], Objective.TIME)
    names = {plan.digest(): name for name, plan in found.items()}
    assert [names[made.plan.digest()] for made, _ in ranked[:4]] == [
        "plain",
        *sorted(("two axes", "odd"), key=order.index),
        "loops",
    ]
    assert ranked[4] is slower, "what is beyond the tie of the best stays behind, however plain it is"


def test_plans_that_use_as_much_stay_in_the_order_of_what_they_cost() -> None:
    found = variants()["plain"]
    entries = [entry(found, 1.0), entry(replace(found, microbatch=2), 1.0 + 0.5 * TIE)]
    assert simplest_first(entries, Objective.TIME) == entries
    assert why_simplest(entries, Objective.TIME) == ()


def test_where_memory_is_least_the_faster_of_equals_is_first() -> None:
    found = variants()
    entries = [entry(found["loops"], 1.0), entry(found["plain"], 1.0)]
    assert simplest_first(entries, Objective.MEMORY) == entries


def test_where_cost_is_least_fewer_devices_are_not_taken_for_as_good() -> None:
    """They take as much longer."""
    found = variants()
    few = replace(found["plain"], axes=axes(shard=2))
    entries = [entry(found["loops"], 1.0), entry(few, 2.0)]
    assert simplest_first(entries, Objective.COST) == entries
    assert simplest_first([entry(found["loops"], 1.0), entry(few, 1.0)], Objective.TIME)[0][0].plan == few


def test_a_plan_that_is_ranked_behind_for_what_it_uses_is_told() -> None:
    found = variants()
    ranked = simplest_first([entry(found["loops"], 1.0 - 0.6 * TIE), entry(found["plain"], 1.0)], Objective.TIME)
    (line,) = why_simplest(ranked, Objective.TIME)
    assert "promises less by 0.03 %" in line
    assert "as good, within 0.05 %, and uses more: pipeline 2; 17 stages on a rank" in line
    wide = replace(found["loops"], schedule=replace(found["loops"].schedule, chunks=2))
    ranked = simplest_first([entry(found["loops"], 1.0 - 0.6 * TIE), entry(wide, 1.0)], Objective.TIME)
    assert ranked[0][0].plan == wide
    assert "17 stages on a rank, not 2 stages on a rank" in why_simplest(ranked, Objective.TIME)[0]


def test_mechanisms_are_what_a_plan_has_beside_plain_passes() -> None:
    start = variants()["plain"]
    alone = replace(start, axes=axes())
    assert mechanisms(alone) == {}
    assert set(mechanisms(start)) == {"shard"}
    again = tuple(
        replace(stage, groups=tuple(replace(group, recompute=Recompute.FULL) for group in stage.groups))
        for stage in start.stages
    )
    assert set(mechanisms(replace(start, stages=again))) == {"shard", "recompute"}
    halves = replace(start, schedule=Schedule(kind=ScheduleKind.ZERO_BUBBLE_H1, microbatches=4))
    assert set(mechanisms(halves)) == {"shard", "halves"}
    assert set(mechanisms(replace(start, axes=axes(shard=6)))) == {"shard", "odd shard"}
    assert "placement" in mechanisms(replace(start, placement=(2, 3, 0, 1)))


def test_the_first_plan_is_as_good_as_the_best_and_as_simple_whatever_is_ranked() -> None:
    model, job = samples.model(layers=2), samples.job(sequences=8)
    cluster = samples.cluster(samples.nodes(devices_per_node=4))
    many, one = (decide.design(model, cluster, job, top=top) for top in (10, 1))
    assert one.design.plan == many.design.plan == decide.best(model, cluster, job).design.plan
    designs = [Design(model=model, cluster=cluster, job=job, plan=each.plan) for each in many.ranked]
    entries = sorted(
        zip(designs, cost.predict_all(designs), strict=True), key=lambda each: entry_order(each, job.objective)
    )
    assert simplest_first(entries, job.objective)[0][0].plan == many.design.plan
