"""Unlike machines laid behind each other in the order that is best, and never in a worse one than the listed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost, search
from meshwright.search import Scope, check, decide
from meshwright.search.arrangements import arrangements
from meshwright.search.refine import minimised
from meshwright.search.settings import differing
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.errors import NoPlanFits
from meshwright.spec.job import Constraints, JobSpec, Objective
from meshwright.spec.plan import Design
from meshwright.spec.report import Report
from meshwright.spec.units import format_times
from tests.search import search_samples as samples
from tests.support.sampled import sampled

MODEL = samples.model(layers=4)
LEGAL = frozenset({Scope.PLAN, Scope.SEARCH, Scope.MEMORY})


def group(
    name: str, *, memory: float = 16 * 2**30, speed: float = 1.0, site: str = "a", num_nodes: int = 1
) -> NodeGroup:
    of = samples.device(name=name, memory_bytes=memory, speed=speed)
    return replace(samples.nodes(num_nodes=num_nodes, devices_per_node=2, of=of, site=site), name=name)


LARGE, SMALL = group("large"), group("small", memory=1.4e7)
QUICK, SLOW = group("quick"), group("slow", speed=0.01)
FAR = group("far", site="b", speed=0.02)
FEW = {"recompute": "none", "microbatch": 1, "schedule": "1f1b", "context": 1, "offload": "none"}
STAGES = {**FEW, "pipeline": 2, "replicate": 2, "tensor": 1}


def asked(*, objective: Objective = Objective.TIME, **constraints: object) -> JobSpec:
    return replace(samples.job(sequences=8, constraints=Constraints(**constraints)), objective=objective)


def usual(job: JobSpec) -> JobSpec:
    return replace(job, constraints=replace(job.constraints, order="usual"))


def test_groups_are_laid_in_every_order_that_differs() -> None:
    def names(*groups: NodeGroup, job: JobSpec | None = None) -> list[tuple[str, ...]]:
        found = arrangements(samples.cluster(*groups), job or asked())
        return [tuple(group.name for group in each.cluster.groups) for each in found]

    assert names(QUICK, SLOW) == [("quick", "slow"), ("slow", "quick")]
    assert names(QUICK, SLOW, job=usual(asked())) == [("quick", "slow")]
    assert names(QUICK, replace(QUICK, name="other")) == [("quick", "other")]
    assert names(QUICK, replace(QUICK, site="b")) == [("quick", "quick")]
    assert len(names(QUICK, SLOW, SMALL)) == 6
    assert names(QUICK, SLOW, FAR) == [
        ("quick", "slow", "far"),
        ("slow", "quick", "far"),
        ("far", "quick", "slow"),
        ("far", "slow", "quick"),
    ]
    many = names(QUICK, SLOW, SMALL, LARGE)
    assert many[0] == ("quick", "slow", "small", "large")
    assert ("large", "small", "slow", "quick") in many
    assert len(many) == len(set(many)) <= 7


def test_devices_of_an_arrangement_are_those_of_the_cluster() -> None:
    cluster = samples.cluster(QUICK, replace(SLOW, num_nodes=2))
    listed, turned = arrangements(cluster, asked())
    assert listed.is_listed
    assert turned.devices == (2, 3, 4, 5, 0, 1)
    assert [each.name for each in turned.cluster.groups] == ["slow", "quick"]


@pytest.mark.parametrize("objective", sampled(Objective, quick=1))
@pytest.mark.parametrize(
    "cluster",
    sampled((samples.cluster(*groups) for groups in ((SMALL, LARGE), (QUICK, SLOW, FAR), (SLOW, QUICK))), quick=2),
    ids=lambda cluster: "-".join(group.name for group in cluster.groups),
)
def test_a_design_is_never_worse_than_on_machines_as_listed(cluster: ClusterSpec, objective: Objective) -> None:
    """And as good as the best over every order of the groups, each told as a cluster of its own."""
    job = asked(objective=objective, devices="any", fix={**FEW, "tensor": 1})
    decision = search.design(MODEL, cluster, job, top=2)

    def value(found: search.Decision) -> float:
        return minimised(found.design, found.report, objective)

    each = [value(search.design(MODEL, other.cluster, usual(job), top=2)) for other in arrangements(cluster, job)]
    assert min(each) * (1 - 1e-9) <= value(decision) <= min(each) * (1 + 1.001e-3)
    assert value(decision) <= each[0] * (1 + 1e-9)
    for entry in decision.ranked:
        report = cost.predict(replace(decision.design, plan=entry.plan))
        assert (report.step_seconds, report.fits) == (entry.step_seconds, True)
    seconds = [entry.step_seconds * entry.error_band[1] for entry in decision.front]
    assert seconds == sorted(seconds)


def test_the_first_stages_meet_the_machines_with_more_memory() -> None:
    """The first pipeline rank keeps most: it fits on the large machines, which are listed last."""
    job = asked(fix=STAGES)
    first, last = search.design(MODEL, samples.cluster(QUICK, LARGE), usual(job)).report.memory
    assert first.total > last.total
    usable = LARGE.device.usable_fraction
    small = group("small", memory=0.5 * (first.total + last.total) / usable)
    cluster = samples.cluster(small, LARGE)
    with pytest.raises(NoPlanFits):
        search.design(MODEL, cluster, usual(job))
    decision = search.design(MODEL, cluster, job, top=2)
    assert decision.design.cluster == cluster
    assert decision.design.plan.placement == (2, 3, 0, 1)
    assert check(decision.design, scopes=LEGAL) == ()
    assert " on devices 2 to 3, 0 to 1 (" in decision.design.plan.describe()
    assert any("as they are listed no plan fits" in line for line in decision.why)
    assert codec.decode(Design, codec.encode(decision.design), "design") == decision.design
    (problem,) = check(replace(decision.design, job=usual(job)), scopes=LEGAL)
    assert problem.where == "plan.placement"


def test_why_tells_what_the_machines_as_listed_would_cost() -> None:
    cluster, job = samples.cluster(SLOW, QUICK), asked(devices="any", fix={"devices": 2})
    decision, listed = search.design(MODEL, cluster, job), search.design(MODEL, cluster, usual(job))
    assert decision.design.plan.placement == (2, 3)
    assert differing(listed.design.plan, decision.design.plan)["order of devices"] == ("as listed", "2 to 3")
    ratio = listed.report.step_seconds / decision.report.step_seconds
    assert ratio > 3.0
    (line,) = (line for line in decision.why if line.startswith("machines as they are listed"))
    assert f"would take {format_times(ratio)} the time" in line


OLD, NEW = group("old", speed=0.002, num_nodes=2), group("new", site="b", num_nodes=3)


@pytest.mark.parametrize(
    "groups",
    [
        pytest.param((OLD, NEW), id="first"),
        pytest.param((NEW, OLD), id="last", marks=pytest.mark.slow),
        pytest.param((replace(OLD, site="b"), NEW), id="near", marks=pytest.mark.slow),
    ],
)
def test_any_devices_are_never_worse_than_those_of_one_kind_or_site(groups: tuple[NodeGroup, ...]) -> None:
    """As the search over each alone finds them."""
    cluster, job = samples.cluster(*groups), asked(devices="any", fix={**FEW, "tensor": 1})
    decision = search.design(MODEL, cluster, job, top=4)
    alone = [search.design(MODEL, replace(cluster, groups=(one,)), job, top=4) for one in groups]
    value, *each = (minimised(found.design, found.report, Objective.TIME) for found in (decision, *alone))
    assert value <= min(each) * (1 + 1e-9)
    assert decision.report.step_seconds == pytest.approx(decision.ranked[0].step_seconds)


@pytest.mark.parametrize("devices", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_a_part_of_the_machines_that_suit_is_divided_as_though_it_were_alone(devices: int) -> None:
    """Of a site that is used in part too, and what is told of other plans is told of the chosen one."""
    fix = {**FEW, "tensor": 1, "devices": devices, "pipeline": devices // 2}
    cluster, job = samples.cluster(OLD, NEW), asked(devices="any", fix=fix)
    decision, alone = (search.design(MODEL, each, job) for each in (cluster, replace(cluster, groups=(NEW,))))
    assert decision.design.plan.placement == tuple(range(4, 4 + devices))
    assert decision.design.plan.stages == alone.design.plan.stages
    assert decision.report.step_seconds == pytest.approx(alone.report.step_seconds)
    assert decision.why[: len(alone.why)] == alone.why
    usual_order = search.design(MODEL, samples.cluster(NEW, OLD), usual(job))
    assert usual_order.design.plan.stages == alone.design.plan.stages


@pytest.mark.parametrize(
    "groups",
    [(QUICK, SLOW), (SLOW, QUICK), pytest.param((QUICK, SLOW, FAR), marks=pytest.mark.slow), (SMALL, LARGE)],
)
@pytest.mark.parametrize("objective", [Objective.TIME, Objective.COST])
def test_the_best_alone_is_that_of_all_orders(groups: tuple[NodeGroup, ...], objective: Objective) -> None:
    """Orders that promise nothing better are left out before they are searched whole."""
    cluster, job = samples.cluster(*groups), asked(objective=objective, fix=FEW)
    best = decide.best(MODEL, cluster, job)
    whole = search.design(MODEL, cluster, job, top=1)
    assert best.design.plan.digest() == whole.design.plan.digest()
    listed = minimised(*searched(cluster, usual(job)), objective)
    others = [minimised(*searched(each.cluster, usual(job)), objective) for each in arrangements(cluster, job)]
    assert minimised(best.design, best.report, objective) <= min(listed, min(others) / 0.999) * (1.0 + 1e-9)


def searched(cluster: ClusterSpec, job: JobSpec) -> tuple[Design, Report]:
    found = decide.best(MODEL, cluster, job)
    return found.design, found.report


def test_a_best_plan_below_a_value_is_the_best_or_none() -> None:
    cluster, job = samples.cluster(QUICK, SLOW), asked(fix=FEW)
    made, report = searched(cluster, job)
    value = minimised(made, report, Objective.TIME)
    assert decide.best(MODEL, cluster, job, below=2.0 * value).design.plan.digest() == made.plan.digest()
    with pytest.raises(NoPlanFits):
        decide.best(MODEL, cluster, job, explained=False, below=0.5 * value)
