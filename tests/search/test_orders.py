"""Axes in another order than the usual one: tried where they could matter, and the best is what brute force finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest

from meshwright import cost, search
from meshwright.cost import PlanTable
from meshwright.cost.table import DEFAULT_ORDER
from meshwright.search import RULES, Scope, check
from meshwright.search.alternatives import Alternatives
from meshwright.search.decide import legal_space
from meshwright.search.explore import Explorer
from meshwright.search.order_rules import is_trained
from meshwright.search.orders import SLACK, all_near, evenly, reorder, reorder_alternatives, without_travel
from meshwright.search.prices import price
from meshwright.search.settings import differing
from meshwright.search.wanted import Wanted
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec, DeviceKind, Link
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Constraints, JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import AxisName, Design, ExpertGrid, Plan
from tests.search import search_samples as samples
from tests.support.sampled import sampled

LEGAL = frozenset({Scope.PLAN, Scope.SEARCH, Scope.MEMORY})
NAMES = {"model": "small", "cluster": "box", "sequence_length": 128}
PLAIN = {"recompute": "none", "offload": "none", "microbatch": 1}
NIC = Link(bandwidth=1e9, latency_seconds=1e-4)


def slow(*, num_nodes: int, devices_per_node: int, site: str = "a") -> ClusterSpec:
    """Nodes with one slow adapter each."""
    group = samples.nodes(num_nodes=num_nodes, devices_per_node=devices_per_node, site=site)
    return samples.cluster(replace(group, nic=NIC, nics=1))


def halves() -> ClusterSpec:
    """Two nodes whose devices are joined well in either half and badly between them."""
    (group,) = slow(num_nodes=2, devices_per_node=4).groups
    return samples.cluster(replace(group, inside=replace(group.inside, across_sockets=1e8)))


def asked(*, sequences: int = 12, objective: Objective = Objective.TIME, **changes: object) -> JobSpec:
    constraints = Constraints(**{"fix": PLAIN, **changes})
    return replace(samples.job(sequences=sequences, constraints=constraints), objective=objective)


QUICK = ("experts", "two sites")
CASES = {
    "six devices a node": (samples.model(layers=4), slow(num_nodes=2, devices_per_node=6), asked()),
    "four devices a node": (samples.model(layers=2), slow(num_nodes=2, devices_per_node=4), asked(sequences=8)),
    "experts": (
        samples.model(layers=2, layer=samples.mixture_layer()),
        slow(num_nodes=2, devices_per_node=2),
        asked(sequences=4),
    ),
    "halves of a node": (samples.model(layers=2), halves(), asked(sequences=8)),
    "two sites": (
        samples.model(layers=2),
        samples.cluster(
            samples.nodes(num_nodes=2, devices_per_node=2), samples.nodes(num_nodes=2, devices_per_node=2, site="b")
        ),
        asked(sequences=8, forbid=("context",)),
    ),
}


THREE = (samples.model(layers=4), slow(num_nodes=2, devices_per_node=6), asked(fix={**PLAIN, "pipeline": 3}))


def brute(table: PlanTable, model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> np.ndarray:
    """The score of every row in the best of all orders of its axes, those alone whose cost is known."""
    best = np.full(len(table), np.inf)
    for order in permutations(DEFAULT_ORDER):
        usual = order == DEFAULT_ORDER
        rows = np.arange(len(table)) if usual else told_apart(table, order)
        if not len(rows):
            continue
        other = replace(table.take(rows), orders=(order,))
        prices = price(other, model=model, cluster=cluster, job=job)
        known = np.ones(len(rows), dtype=np.bool_) if usual else evenly(other, cluster=cluster)
        score = prices.upper_seconds / prices.fit_probability
        best[rows] = np.minimum(best[rows], np.where(known & prices.fits & prices.finite, score, np.inf))
    return best


def told_apart(table: PlanTable, order: tuple[AxisName, ...]) -> np.ndarray:
    """Rows that have no like order before this one: their axes of one rank are last, in the usual order."""
    alone = np.stack([getattr(table, name.value) == 1 for name in order], axis=1)
    usual = np.array([DEFAULT_ORDER.index(name) for name in order])
    behind = alone[:, 1:] & (usual[1:] > usual[:-1])
    return np.flatnonzero((~alone[:, :-1] | behind).all(axis=1))


def meshes(table: PlanTable) -> list[tuple[int, ...]]:
    names = ("pipeline", "replicate", "shard", "context", "tensor")
    return list(zip(*(getattr(table, name).tolist() for name in names), strict=True))


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name not in QUICK)]
)
def test_for_every_mesh_the_best_order_is_that_of_brute_force(name: str) -> None:
    model, cluster, job = CASES[name]
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job)
    found.best(space.count)
    usual = len(found.table)
    expected = brute(found.table, model, cluster, job)
    assert usual < 2_000
    reorder(found, space.count)
    scores = np.where(found.prices.fits, found.scores(), np.inf)
    assert len(found.table) > usual
    names, best = meshes(found.table), {}
    for mesh, score in zip(names, scores, strict=True):
        best[mesh] = min(best.get(mesh, np.inf), score)
    wanted: dict[tuple[int, ...], float] = {}
    for mesh, score in zip(names, expected, strict=False):
        wanted[mesh] = min(wanted.get(mesh, np.inf), score)
    assert set(best) == set(wanted)
    for mesh, score in wanted.items():
        assert score * (1 - 1e-9) <= best[mesh] <= score * (1 + 1.001e-3)


@pytest.mark.parametrize("objective", [Objective.TIME, pytest.param(Objective.COST, marks=pytest.mark.slow)])
def test_a_design_takes_the_order_that_is_best_of_all(objective: Objective) -> None:
    model, cluster, job = THREE
    job = replace(job, objective=objective)
    held = replace(job, constraints=replace(job.constraints, order="usual"))
    decision, usual = (search.design(model, cluster, entry) for entry in (job, held))
    assert usual.design.plan.has_usual_order
    assert not decision.design.plan.has_usual_order
    assert check(decision.design, scopes=LEGAL) == ()
    upper = [entry.report.step_seconds * entry.report.error_band[1] for entry in (decision, usual)]
    assert upper[0] < 0.95 * upper[1]
    table = legal_space(model, cluster, job).table
    best = brute(table, model, cluster, job)
    rivals = {
        (row, tuple(axis for axis in plan.axes if axis.size > 1)): replace(decision.design, plan=plan)
        for row in np.flatnonzero(best < best.min() * 1.05)
        for order in permutations(DEFAULT_ORDER)
        for plan in [replace(table, orders=(order,)).to_plan(row, **NAMES)]
    }
    reports = [cost.predict(rival) for rival in rivals.values() if check(rival, scopes=LEGAL) == ()]
    assert len(reports) > 4
    assert upper[0] <= min(report.step_seconds * report.error_band[1] for report in reports) * (1 + 1e-9)
    assert codec.decode(Design, codec.encode(decision.design), "design") == decision.design
    assert "from the outermost inwards" in decision.design.plan.describe()
    names = " ".join(axis.name for axis in decision.design.plan.axes if axis.size > 1)
    assert differing(usual.design.plan, decision.design.plan)["order of axes"] == ("usual", names)
    last = max(span.start + span.seconds for span in cost.timeline(decision.design))
    assert last == pytest.approx(decision.report.step_seconds, rel=1e-6)


def turned(design: Design) -> Design:
    """The design with its axes from the innermost outwards."""
    return replace(design, plan=replace(design.plan, axes=tuple(reversed(design.plan.axes))))


def sorted_axes(plan: Plan) -> Plan:
    return replace(plan, axes=tuple(sorted(plan.axes, key=lambda axis: list(AxisName).index(axis.name))))


def test_why_tells_what_the_usual_order_would_cost() -> None:
    model, cluster, job = THREE
    decision = search.design(model, cluster, job)
    (line,) = (line for line in decision.why if "the usual order of axes" in line)
    other = cost.predict(replace(decision.design, plan=sorted_axes(decision.design.plan)))
    ratio = other.step_seconds / decision.report.step_seconds
    assert ratio > 1.01
    assert f"would take {100 * (ratio - 1):.1f} % more time" in line


@pytest.mark.parametrize("name", sampled(CASES, quick=3))
def test_no_order_beats_links_that_take_no_time(name: str) -> None:
    """What leaves rows out: a bound of every order, as nearly as the closed forms of schedules are."""
    model, cluster, job = CASES[name]
    table = legal_space(model, cluster, job).table
    free = price(table, model=model, cluster=without_travel(cluster), job=job)
    for order in list(permutations(DEFAULT_ORDER))[::7]:
        other = replace(table, orders=(order,))
        real = price(other, model=model, cluster=cluster, job=job)
        assert np.all(free.upper_seconds <= real.upper_seconds * SLACK)


def test_one_node_has_no_other_order_to_try() -> None:
    model, job = samples.model(layers=2), asked(sequences=8)
    cluster = slow(num_nodes=1, devices_per_node=8)
    assert all_near(cluster)
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job)
    found.best(5)
    before = found.priced
    reorder(found, 5)
    assert found.priced == before


def test_a_plan_to_be_trained_has_an_order_that_the_runtime_lays() -> None:
    model, cluster, job = THREE
    decision = search.design(model, cluster, job, trainable=True)
    order = [axis.name for axis in decision.design.plan.axes if axis.size > 1]
    assert is_trained(order)
    assert not decision.design.plan.has_usual_order
    assert decision.predicts_only == ()


def test_a_search_goes_on_after_other_orders_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.search.ladder.FIRST", 2)
    model, cluster, job = THREE
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    found.best(3)
    reorder(found, 3)
    before, rows = found.priced, np.flatnonzero(found.table.order)
    plans = [found.table.to_plan(int(row), **NAMES) for row in rows]
    assert plans
    assert found.until(Wanted(limit=lambda: 20.0 * float(found.scores().min()))) == (True,)
    assert found.priced > before
    assert [found.table.to_plan(int(row), **NAMES) for row in rows] == plans


PROCESSORS = replace(samples.device(), kind=DeviceKind.CPU)
UNLIKE = samples.cluster(samples.nodes(num_nodes=2, devices_per_node=2), samples.nodes(devices_per_node=4))
SITES = samples.cluster(samples.nodes(devices_per_node=2), samples.nodes(num_nodes=3, devices_per_node=2, site="b"))


@pytest.mark.parametrize(
    ("design", "why"),
    [
        (samples.design, ""),
        (lambda: samples.design(on=samples.cluster(samples.nodes(num_nodes=4, devices_per_node=2))), ""),
        (lambda: samples.design(on=UNLIKE), "nodes of unlike sizes"),
        (
            lambda: samples.design(experts=ExpertGrid(expert=2, tensor=1)),
            "a grid of experts under ranks of the pipeline",
        ),
        (lambda: samples.design(pipeline=4, shard=1, on=SITES), "a pipeline inside other axes that leaves its site"),
        (
            lambda: samples.design(on=samples.cluster(samples.nodes(num_nodes=2, devices_per_node=4, of=PROCESSORS))),
            "a pipeline inside other axes on processors",
        ),
    ],
)
def test_an_order_of_axes_is_refused_where_its_cost_is_not_known(design: Callable[[], Design], why: str) -> None:
    """From the tensor axis to the pipeline; the usual order is never refused."""
    (rule,) = (rule for rule in RULES if rule.name == "axes-order")
    assert rule(design()) is None
    problem = rule(turned(design()))
    assert (problem.why if problem else "") == (f"{why}; rule axes-order" if why else "")


def constrained(order: str) -> Design:
    return samples.design(asked=samples.job(constraints=Constraints(order=order)))


def test_a_job_that_asks_for_the_usual_order_refuses_another() -> None:
    design = turned(constrained("usual"))
    (problem,) = (found for found in check(design, scopes=LEGAL) if "keeps-constraints" in found.why)
    assert problem.where == "plan.axes"
    assert "job.constraints.order" in problem.what
    with pytest.raises(ConfigError, match=r"job.constraints.order: 'other' is not a choice; choose any or usual"):
        check(
            constrained("other"),
            scopes=LEGAL,
        )


def test_tables_of_other_orders_are_joined_with_the_order_of_each_row() -> None:
    model, cluster, job = CASES["two sites"]
    table = legal_space(model, cluster, job).table.take(np.arange(6))
    usual, first, second = DEFAULT_ORDER, DEFAULT_ORDER[::-1], (*DEFAULT_ORDER[1:], DEFAULT_ORDER[0])
    ones = np.ones(6, dtype=np.int64)
    tables = [
        table,
        replace(table, order=ones, orders=(usual, first)),
        replace(table, order=ones, orders=(usual, second)),
        replace(table, order=2 * ones, orders=(usual, second, first)),
    ]
    joined = PlanTable.joined(tables)
    found = [joined.orders[int(order)] for order in joined.order]
    assert found == [usual] * 6 + [first] * 6 + [second] * 6 + [first] * 6


def test_alternatives_are_told_in_the_order_that_is_best_for_them_though_none_of_them_is_among_the_best() -> None:
    model, cluster, job = CASES["six devices a node"]
    space = legal_space(model, cluster, job)
    found, whole = (Explorer(space, model=model, cluster=cluster, job=job) for _ in range(2))
    lines, wanted = [], []
    for one in (found, whole):
        one.best(space.count)
    for name in ("tensor", "pipeline", "shard"):
        for value in np.unique(getattr(found.table, name)).tolist():
            lines.append(Alternatives(found, name=name, values=(value,)))
            wanted.append(lines[-1].on(whole, below=np.inf))
    reorder(whole, space.count)
    reorder(found, 1)
    before = [line.score for line in lines]
    reorder_alternatives(found, lines)
    assert [line.score for line in lines] == pytest.approx([line.score for line in wanted], rel=1.001e-3)
    assert any(line.score < 0.95 * score for line, score in zip(lines, before, strict=True))
    assert found.priced < whole.priced
