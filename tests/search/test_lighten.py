"""Less recompute where there is room: it fits, is faster, and no rank could do with one layer less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.cost import PlanTable
from meshwright.search import Scope, check
from meshwright.search.constraints import columns_of, keeps_constraints
from meshwright.search.lighten import lightened
from meshwright.search.refine import refine
from meshwright.spec.job import Constraints
from meshwright.spec.plan import Design, Recompute, Sharding
from meshwright.spec.report import Report
from tests.search import search_samples as samples
from tests.support.designs import sharded

LARGE = samples.model(layers=10, layer=samples.dense_layer(hidden=2048), vocab=512)


def uniform(design: Design, kind: Recompute) -> Design:
    stages = tuple(
        replace(stage, groups=tuple(replace(group, recompute=kind) for group in stage.groups))
        for stage in design.plan.stages
    )
    return replace(design, plan=replace(design.plan, stages=stages))


def squeezed(share: float, *, pipeline: int = 2) -> Design:
    """A design that fits when all layers are computed again, with `share` of the room that none would need."""
    design = uniform(samples.design(of=LARGE, pipeline=pipeline, shard=4 // pipeline, schedule=None), Recompute.FULL)
    full, none = (cost.predict(uniform(design, kind)).peak_bytes for kind in (Recompute.FULL, Recompute.NONE))
    assert full < none
    device = samples.device(memory_bytes=(full + share * (none - full)) / 0.94)
    return replace(design, cluster=samples.cluster(samples.nodes(of=device)))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_fewer_layers_are_computed_again_and_it_fits(share: float, pipeline: int) -> None:
    design = squeezed(share, pipeline=pipeline)
    before = cost.predict(design)
    found = lightened([design])[0]
    assert found
    best, report = min(found, key=lambda entry: entry[1].step_seconds)
    assert report.fits
    assert report.step_seconds < before.step_seconds
    assert any(len(stage.groups) > 1 for stage in best.plan.stages)


def test_mixes_that_leave_room_are_tried_too_and_fit_more_surely() -> None:
    found = [report for _, report in lightened([squeezed(0.9, pipeline=1)])[0]]
    fullest = [filled(report) for report in found]
    assert min(fullest) < 0.91 < 0.95 < max(fullest)
    steps = [report.step_seconds for report in found]
    assert steps[fullest.index(max(fullest))] == min(steps)
    chances = [report.fit_probability or 0.0 for report in found]
    assert chances[fullest.index(min(fullest))] == max(chances)


def test_a_mixed_plan_tells_all_that_its_blocks_do_and_keeps_to_what_is_asked_of_each() -> None:
    design = squeezed(0.5)
    made = min(lightened([design])[0], key=lambda entry: entry[1].step_seconds)[0]
    assert columns_of(design.plan)["recompute"] == "full"
    assert set(str(columns_of(made.plan)["recompute"]).split("+")) > {"none"}
    assert keeps_constraints(made) is None
    for asked in (Constraints(fix={"recompute": "full"}), Constraints(forbid=("recompute=none",))):
        held = replace(design, job=replace(design.job, constraints=asked))
        assert keeps_constraints(held) is None
        refused = keeps_constraints(replace(made, job=held.job))
        assert refused is not None
        assert "recompute" in refused.where
        table = PlanTable.from_plan(design.plan)
        ((chosen, _),) = refine(table, [0], model=held.model, cluster=held.cluster, job=held.job)
        kinds = set(str(columns_of(chosen.plan)["recompute"]).split("+"))
        assert kinds == ({"full"} if asked.fix else {"full", "selective"})


def filled(report: Report) -> float:
    """The share of the fullest device."""
    return max(each.total / each.capacity for each in report.memory)


def test_one_layer_less_would_not_fit() -> None:
    """Into the room that a mix was made for: all of a device, or what leaves it room."""
    design = squeezed(0.5, pipeline=1)
    found = [
        entry for entry in lightened([design])[0] if entry[0].plan.stages[0].groups[-2].recompute is Recompute.NONE
    ]
    assert len(found) > 1
    for made, report in found:
        groups = made.plan.stages[0].groups
        heavy = next(index for index, group in enumerate(groups) if group.recompute is Recompute.FULL)
        less = replace(groups[heavy], stop=groups[heavy].stop - 1)
        more = replace(groups[heavy + 1], start=less.stop)
        stages = (replace(made.plan.stages[0], groups=(*groups[:heavy], less, more, *groups[heavy + 2 :])),)
        room = min(room for room in (1.0, 0.9, 0.8) if filled(report) <= room)
        assert filled(cost.predict(replace(made, plan=replace(made.plan, stages=stages)))) > room


def short_of_memory(share: float, *, pipeline: int = 1) -> Design:
    """A design that fits under zero3, with `share` of the room that zero1 would need, over a slow network."""
    made = samples.design(
        of=LARGE, pipeline=pipeline, tensor=1, shard=8 // pipeline, sharding=Sharding.PARAMETERS, microbatch=1
    )
    made = replace(made, plan=replace(made.plan, schedule=replace(made.plan.schedule, microbatches=4 * pipeline)))
    third, first = (cost.predict(sharded(made, digit * 12)).peak_bytes for digit in "31")
    assert third < first
    nodes = samples.nodes(of=samples.device(memory_bytes=(third + share * (first - third)) / 0.94))
    slow = replace(nodes.inside, bandwidth=nodes.inside.bandwidth / 100)
    return replace(made, cluster=samples.cluster(replace(nodes, inside=slow)))


@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_as_few_blocks_are_sharded_whole_as_memory_asks_for(share: float, pipeline: int) -> None:
    design = short_of_memory(share, pipeline=pipeline)
    before = cost.predict(design)
    assert before.fits
    assert not cost.predict(sharded(design, "1" * 12)).fits
    found = lightened([design])[0]
    best, report = min(found, key=lambda entry: entry[1].step_seconds)
    assert report.fits
    assert report.step_seconds < 0.99 * before.step_seconds
    assert check(best, scopes=frozenset({Scope.PLAN, Scope.RUNTIME})) == ()
    assert {"zero1", "zero2", "zero3"} > set(str(columns_of(best.plan)["zero"]).split("+")) != {"zero3"}
    held = replace(best, job=replace(best.job, constraints=Constraints(fix={"zero": "zero3"})))
    refused = keeps_constraints(held)
    assert refused is not None
    assert "zero" in refused.where


def test_a_tied_table_and_its_head_are_sharded_alike() -> None:
    design = short_of_memory(0.5)
    model = replace(design.model, head=replace(design.model.head, tied=True))
    found = lightened([replace(design, model=model)])[0]
    assert found
    for made, _ in found:
        assert made.plan.group_of(0).sharding is made.plan.group_of(11).sharding is not Sharding.OPTIMIZER


def test_nothing_is_lightened_where_nothing_is_computed_again_or_nothing_fits() -> None:
    assert lightened([uniform(squeezed(0.5), Recompute.NONE)]) == [[]]
    tiny = replace(squeezed(0.5), cluster=samples.cluster(samples.nodes(of=samples.device(memory_bytes=2**16))))
    assert lightened([tiny]) == [[]]


def over_nodes(share: float) -> Design:
    """A design that fits where all blocks are divided over two nodes of four, with `share` of the room that they would
    need over one, between which the network is slow."""
    made = samples.design(of=LARGE, pipeline=1, tensor=1, shard=8, sharding=Sharding.PARAMETERS, microbatch=1)
    made = replace(made, plan=replace(made.plan, schedule=replace(made.plan.schedule, microbatches=4)))
    nodes = samples.nodes(num_nodes=2, devices_per_node=4)
    wide, near = (
        cost.predict(replace(entry, cluster=samples.cluster(nodes))).peak_bytes
        for entry in (made, sharded(made, "3" * 12, over="4" * 12))
    )
    assert wide < near
    short = samples.device(memory_bytes=(wide + share * (near - wide)) / 0.94)
    nodes = replace(nodes, device=short, nic=replace(nodes.nic, bandwidth=nodes.inside.bandwidth / 100))
    return replace(made, cluster=samples.cluster(nodes))


def test_as_few_blocks_leave_their_node_as_memory_asks_for() -> None:
    design = over_nodes(0.5)
    before = cost.predict(design)
    found = [entry for entry in lightened([design])[0] if entry[0].plan.extents]
    best, report = min(found, key=lambda entry: entry[1].step_seconds)
    assert before.fits
    assert report.fits
    assert report.step_seconds < 0.99 * before.step_seconds
    assert {group.shards for group in best.plan.groups} == {None, 4}
    assert check(best, scopes=frozenset({Scope.PLAN, Scope.RUNTIME})) == ()
    assert "zero3 over 4 in" in best.plan.describe()
    held = replace(design, job=replace(design.job, constraints=Constraints(fix={"shard": 8})))
    assert not any(made.plan.extents for made, _ in lightened([held])[0])
