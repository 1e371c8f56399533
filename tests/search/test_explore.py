"""Bounds that nothing beats, and a search that stops early and still finds the best."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.cost import PlanTable, evaluate, fitting
from meshwright.cost.table import PRECISIONS, SCHEDULES, column_names
from meshwright.search.bound import Bounds
from meshwright.search.choices import PLAN, SCHEDULE, SHARDING, Choices
from meshwright.search.decide import legal_space
from meshwright.search.explore import SURE, Explorer
from meshwright.search.floors import Floors
from meshwright.search.prices import price
from meshwright.search.product import Product
from meshwright.search.states_held import least_bytes
from meshwright.search.wanted import Wanted
from meshwright.spec.cluster import ClusterSpec, Link, Precision
from meshwright.spec.job import Constraints, JobSpec, Objective
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import Adafactor, Muon, Optimizer, Sgd
from meshwright.spec.plan import ScheduleKind
from tests.search import search_samples as samples
from tests.search.bound_cases import hold_bytes, hold_times
from tests.support.sampled import sampled

HOST = Link(bandwidth=2e10, latency_seconds=1e-5)
SLOW = samples.device(name="slow", speed=0.4)
MODELS = {
    "dense": samples.model(layers=4),
    "tied": samples.model(layers=4, tied=True),
    "mixture": samples.model(layers=3, layer=samples.mixture_layer()),
    "latent": samples.model(layers=3, layer=samples.latent_layer()),
    "recurrent": samples.model(layers=3, layer=samples.recurrent_layer()),
}
BOX = samples.nodes(devices_per_node=4, host=HOST)
CLUSTERS = {
    "one box": samples.cluster(replace(BOX, inside=replace(BOX.inside, across_sockets=5e10))),
    "two boxes": samples.cluster(samples.nodes(num_nodes=2, devices_per_node=2)),
    "unlike": samples.cluster(
        samples.nodes(devices_per_node=2), samples.nodes(devices_per_node=2, of=SLOW, site="b", host=HOST)
    ),
}


SEVERAL = (Precision.FP8, Precision.FP32)
PEAKS = {Precision.BF16: 1e14, Precision.FP8: 2e14, Precision.FP32: 1e13}
QUICK, QUIETER = (
    replace(
        samples.device(name=name, speed=speed),
        peak_flops={kind: peak * speed for kind, peak in PEAKS.items()},
        matrix=dict.fromkeys(PEAKS, samples.device().matrix[Precision.BF16]),
    )
    for name, speed in (("quick", 1.0), ("quieter", 0.4))
)
MIXED = samples.cluster(
    samples.nodes(devices_per_node=2, of=QUICK), samples.nodes(devices_per_node=2, of=QUIETER, site="b", host=HOST)
)


def asked(**changes: object) -> JobSpec:
    return replace(samples.job(sequences=8, constraints=Constraints(devices="any")), **changes)


@pytest.mark.parametrize(("name", "machines"), sampled(itertools.product(MODELS, CLUSTERS), quick=7))
def test_no_plan_beats_its_bound(name: str, machines: str) -> None:
    hold(MODELS[name], CLUSTERS[machines], asked())


@pytest.mark.parametrize("speeds", [(1.0, 0.4, 0.1), (0.1, 1.0, 0.4)], ids=["quickest first", "slowest first"])
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_no_plan_beats_its_bound_where_every_stage_is_on_other_devices(name: str, speeds: tuple[float, ...]) -> None:
    kinds = (samples.device(name=f"kind {place}", speed=speed) for place, speed in enumerate(speeds))
    machines = samples.cluster(
        *(samples.nodes(devices_per_node=1, of=kind, site=f"site {place}") for place, kind in enumerate(kinds))
    )
    hold(MODELS[name], machines, asked())


def test_bounds_of_unlike_devices_know_which_of_them_a_stage_lies_on() -> None:
    """As if all were of the quicker kind, one bound in twenty would be less than a quarter of the step."""
    model, machines = catalog.load_model("llama-3.2-1b"), catalog.load_cluster("2xH100 + 2xL40S")
    fixed = ["constraints.fix.tensor=1", "constraints.fix.context=1", "constraints.fix.recompute=none"]
    job = catalog.load_job(None, sets=["sequence_length=1024", "batch_tokens=65536", "precision=bf16", *fixed])
    space = legal_space(model, machines, job)
    bounds = Bounds(space, model=model, cluster=machines, job=job)
    seconds = bounds.seconds(space.table, frames=space.frame_of(np.arange(len(space.keys))))
    prices = price(space.table, model=model, cluster=machines, job=job)
    whole = prices.finite & (space.table.world == machines.num_devices)
    assert float(np.percentile(seconds[whole] / prices.step_seconds[whole], 5)) > 0.5


def far_apart(latency: float, *, bandwidth: float = 1e9, devices: int = 4) -> ClusterSpec:
    """Two sites of so many alike devices."""
    nodes = (samples.nodes(devices_per_node=devices, site=site) for site in ("a", "b"))
    wide = Link(bandwidth=bandwidth, latency_seconds=latency)
    return replace(samples.cluster(*nodes), wide_area=wide)


@pytest.mark.parametrize("latency", [1e-5, 1e-3, 0.1])
def test_no_plan_beats_its_bound_where_microbatches_go_to_and_fro(latency: float) -> None:
    hold(MODELS["dense"], far_apart(latency, devices=2), replace(asked(), batch_tokens=64 * 128))


def test_what_slow_links_make_of_few_microbatches_under_way_is_in_the_bound() -> None:
    """It leaves an eighth untold where microbatches are many; it left nearly all."""
    model, cluster, job = MODELS["dense"], far_apart(0.1), replace(asked(), batch_tokens=64 * 128)
    space = legal_space(model, cluster, job)
    few = [SCHEDULES.index(kind) for kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZERO_BUBBLE_H1)]
    many = np.isin(space.table.schedule, few) & (space.table.world == 8) & (space.table.microbatches >= 32)
    rows = np.flatnonzero(many & (space.table.pipeline > 1))
    table, frames = space.table.take(rows), space.frame_of(np.arange(len(space.keys)))[rows]
    step = price(table, model=model, cluster=cluster, job=job).step_seconds
    least = Bounds(space, model=model, cluster=cluster, job=job).scheduled(table, frames=frames)
    assert len(rows) > 500
    assert np.all(least > 0.87 * step)


@pytest.mark.parametrize("bandwidth", [1e6, 1e9])
def test_no_plan_beats_its_bound_where_the_ends_of_pipelines_sum_a_table(bandwidth: float) -> None:
    hold(MODELS["tied"], far_apart(1e-3, bandwidth=bandwidth, devices=2), asked())


def test_what_the_ends_of_pipelines_sum_over_a_slow_link_is_in_the_bound() -> None:
    """Of pipelines over both sites it is most of the step; without it bounds were less than half."""
    model, cluster, job = MODELS["tied"], far_apart(1e-4, bandwidth=1e6, devices=2), asked()
    space = legal_space(model, cluster, job)
    rows = np.flatnonzero((space.table.world == 4) & (space.table.pipeline == 2) & (space.table.sharding == 0))
    table, frames = space.table.take(rows), space.frame_of(np.arange(len(space.keys)))[rows]
    costs = evaluate(table, model=model, cluster=cluster, job=job)
    apart = costs.figures["tied_seconds"] > 0.5 * costs.step_seconds
    bounds = Bounds(space, model=model, cluster=cluster, job=job)
    assert np.count_nonzero(apart) > 50
    for least in (bounds.scheduled(table, frames=frames), bounds.seconds(table, frames=frames)):
        assert np.all(least[apart] > costs.figures["tied_seconds"][apart])


def test_what_slow_networks_reduce_once_a_step_is_in_the_bound() -> None:
    """On machines with a slow network whose gradients meet once a step, which is most of it."""
    model, job = MODELS["dense"], asked()
    quick, slow = (samples.nodes(devices_per_node=2, of=QUICK), samples.nodes(num_nodes=2, devices_per_node=2))
    slow = replace(slow, name="slow", nic=Link(bandwidth=1e6, latency_seconds=1e-5), nics=1)
    cluster = samples.cluster(slow, replace(quick, name="quick"))
    space = legal_space(model, cluster, job)
    of_four = (space.table.world == 4) & (space.table.pipeline == 1) & (space.table.tensor == 1)
    rows = np.flatnonzero(of_four & (space.table.context == 1))
    table, frames = space.table.take(rows), space.frame_of(np.arange(len(space.keys)))[rows]
    step = price(table, model=model, cluster=cluster, job=job).step_seconds
    assert len(rows) > 20
    least = Bounds(space, model=model, cluster=cluster, job=job).seconds(table, frames=frames)
    assert float(np.percentile(least / step, 5)) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_no_plan_beats_its_bound_whatever_its_precision(name: str) -> None:
    hold(MODELS[name], MIXED, asked(other_precisions=SEVERAL))


@pytest.mark.parametrize("spec", sampled((Muon(), Sgd(momentum=0.0), Adafactor()), quick=2), ids=lambda spec: spec.kind)
def test_no_plan_beats_its_bound_whatever_its_optimizer(spec: Optimizer) -> None:
    hold(MODELS["mixture"], CLUSTERS["one box"], asked(optimizer=spec))


def hold(model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    """Checks the bounds of every plan of the job."""
    space = legal_space(model, cluster, job)
    bounds, every = Bounds(space, model=model, cluster=cluster, job=job), np.arange(len(space.keys))
    prices = price(space.table, model=model, cluster=cluster, job=job)
    known = prices.finite
    slack = 1.0 + 1e-9
    frame = space.frame_of(every)
    for floor in (bounds.shared, bounds.scheduled):
        assert np.all(floor(space.table, frames=frame)[known] <= prices.step_seconds[known] * slack)
    assert np.all(bounds.seconds(space.table, frames=frame)[known] <= prices.step_seconds[known] * slack)
    floors = Floors(space, model=model, cluster=cluster, job=job)
    for schedule in np.unique(space.table.schedule):
        other = replace(space.table, schedule=np.full_like(space.table.schedule, schedule))
        assert np.all(floors.shared(other, frame)[known] <= prices.upper_seconds[known] * slack)
    for floor in (floors.scheduled, floors.own):
        assert np.all(floor(space.table, frame)[known] <= prices.upper_seconds[known] * slack)
    held = bounds.bytes(space.table, frames=frame)
    assert np.all(bounds.bytes(space.table, frames=frame, ranks=1) <= held)
    assert np.all(held <= prices.memory_bytes * slack)
    room = float(prices.capacity.max())
    assert np.all(fitting.most_likely(held, capacity=room) >= prices.fit_probability * (1.0 - 1e-9))
    likely, fits = floors.likely(held, space.table), held <= room
    assert np.all(likely[fits] >= prices.fit_probability[fits] * (1.0 - 1e-9))
    assert np.all(prices.fit_probability[~fits] < 0.5)
    filled = floors.likely(floors.bytes(space.table, frame), space.table)
    assert np.all(filled[prices.fits] >= prices.fit_probability[prices.fits] * (1.0 - 1e-9))
    assert np.all(bounds.frames()[frame][known] <= prices.step_seconds[known] * slack)
    assert np.all(least_bytes(space, model=model, job=job)[frame] <= prices.memory_bytes * slack)
    hold_bytes(space, model=model, cluster=cluster, job=job, prices=prices)
    hold_times(space, model=model, cluster=cluster, job=job, prices=prices)


@pytest.mark.parametrize("machines", ["two boxes", "unlike"])
def test_plans_below_a_score_are_found_as_among_all_and_no_others_are_asked_for(machines: str) -> None:
    space = legal_space(MODELS["dense"], CLUSTERS[machines], asked())
    question = {"model": MODELS["dense"], "cluster": CLUSTERS[machines], "job": asked()}
    whole = Explorer(space, **question)
    whole.best(1)
    least = float(np.min(whole.scores()[whole.prices.fits]))
    for below, known in ((1.5 * least, True), (1.001 * least, True), (least, False)):
        some = Explorer(space, **question, below=below)
        some.best(1)
        scores = some.scores()[some.prices.fits] if some.priced else np.array([np.inf])
        assert (float(np.min(scores, initial=np.inf)) == least) or not known
        assert some.priced < whole.priced


@pytest.mark.parametrize(
    "software", sampled(("torch", "scaling-fused-norms", "internevo", "megatron-core-serial"), quick=2)
)
def test_no_plan_of_a_large_model_beats_its_bound(software: str) -> None:
    """Of some plans of every twentieth frame, in which exchanges and sums of gradients outlast work and latency."""
    model, cluster = catalog.load_model("mixtral-8x7b"), catalog.load_cluster("64xH100")
    job = replace(catalog.load_job(None), software=software)
    space = legal_space(model, cluster, job)
    bounds, chosen = Bounds(space, model=model, cluster=cluster, job=job), np.arange(0, len(space.keys), 20)
    some = np.arange(0, int(space.sizes[chosen].sum()), 97)
    table, frames = space.rows_of(chosen).take(some), space.frame_of(chosen)[some]
    prices = price(table, model=model, cluster=cluster, job=job)
    least, known = bounds.seconds(table, frames=frames), prices.finite
    assert np.all(least[known] <= prices.step_seconds[known] * (1.0 + 1e-9))
    assert np.median(least[known] / prices.step_seconds[known]) > 0.95


def tight(model: ModelSpec, job: JobSpec) -> ClusterSpec:
    """A box that as many plans fit on as do not."""
    roomy = CLUSTERS["one box"]
    need = price(legal_space(model, roomy, job).table, model=model, cluster=roomy, job=job).memory_bytes
    of = samples.device(memory_bytes=float(np.median(need)) / samples.device().usable_fraction)
    return samples.cluster(samples.nodes(devices_per_node=4, host=HOST, of=of))


def plans_of(table: PlanTable, *, without: tuple[str, ...] = ()) -> list[tuple[int, ...]]:
    names = [name for name in column_names() if name not in without]
    return list(zip(*(getattr(table, name).tolist() for name in names), strict=True))


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize("objective", sampled(Objective, quick=1))
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_a_search_that_stops_early_finds_the_same_best(name: str, objective: Objective, roomy: bool) -> None:
    """Every one of the best is found, but one that recomputes or offloads more than a like one that surely fits."""
    model, job = MODELS[name], asked(objective=objective)
    compare(model, CLUSTERS["one box"] if roomy else tight(model, job), job)


@pytest.mark.parametrize("objective", list(Objective))
def test_a_search_among_precisions_finds_the_best_of_all(objective: Objective) -> None:
    compare(MODELS["dense"], MIXED, asked(objective=objective, other_precisions=SEVERAL))


def compare(model: ModelSpec, cluster: ClusterSpec, job: JobSpec) -> None:
    """Checks that the 20 best of a search that stops early are those of all plans."""
    objective = job.objective
    space = legal_space(model, cluster, job)
    whole = Explorer(space, model=model, cluster=cluster, job=job)
    early = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    for found in (whole, early):
        found.best(20)
    known, more = plans_of(early.table), ("recompute", "offload")
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, plan in enumerate(plans_of(early.table, without=more)):
        alike.setdefault(plan, []).append(row)
    assert len(known) == len(set(known)) == early.priced < whole.priced == space.count
    order = np.argsort(np.where(whole.prices.fits, whole.scores(), np.inf), kind="stable")[:20]
    best = whole.table.take(order)
    for plan, rest, row in zip(plans_of(best), plans_of(best, without=more), order, strict=True):
        lighter = [
            other
            for other in alike.get(rest, ())
            if all(getattr(early.table, column)[other] <= getattr(whole.table, column)[row] for column in more)
            and early.prices.fit_probability[other] >= SURE
            and early.prices.upper_seconds[other] <= whole.prices.upper_seconds[row]
        ]
        assert plan in set(known) or (lighter and objective is not Objective.MEMORY)


def test_a_space_of_several_precisions_is_those_of_each() -> None:
    """Plans, stages and prices are what a job of that precision alone has."""
    model, job = MODELS["tied"], asked(other_precisions=SEVERAL)
    joint = legal_space(model, MIXED, job)
    prices = price(joint.table, model=model, cluster=MIXED, job=job)
    for kind in (Precision.BF16, *SEVERAL):
        alone = replace(job, precision=kind, other_precisions=())
        table = legal_space(model, MIXED, alone).table
        mine = joint.table.precision == PRECISIONS.index(kind)
        own = price(table, model=model, cluster=MIXED, job=alone)
        assert np.array_equal(prices.step_seconds[mine], own.step_seconds)
        assert np.array_equal(prices.memory_bytes[mine], own.memory_bytes)
    assert joint.count == 3 * len(table)


def test_a_search_goes_on_where_it_stopped() -> None:
    """With a higher limit all below it is found, nothing is priced twice, and what was asked for alone is found too."""
    model, cluster, job = MODELS["dense"], CLUSTERS["two boxes"], asked()
    space = legal_space(model, cluster, job)
    whole, found = (
        Explorer(space, model=model, cluster=cluster, job=job, exhaustive=size) for size in (space.count, 0)
    )
    whole.best(1)
    found.best(1)
    first = float(np.min(found.scores()))
    schedules = np.unique(whole.table.schedule[whole.prices.fits])
    assert len(schedules) > 3
    for schedule in schedules:
        other = whole.table.schedule != schedule
        best = float(whole.scores()[other & whole.prices.fits].min())
        others = tuple(int(kind) for kind in schedules if kind != schedule)
        assert found.until(Wanted(limit=lambda best=best: best * (1.0 + 1e-9), column="schedule", values=others)) == (
            True,
        )
        mine = found.table.schedule != schedule
        assert float(found.scores()[mine & found.prices.fits].min()) == pytest.approx(best, rel=1e-12)
    limit = 1.2 * first
    assert found.settled < limit
    assert found.until(Wanted(limit=lambda: limit)) == (True,)
    assert found.settled >= limit
    known = plans_of(found.table)
    assert len(known) == len(set(known))
    least = (whole.table.recompute == 0) & (whole.table.offload == 0)
    below = np.flatnonzero(least & whole.prices.fits & (whole.scores() < limit))
    assert len(below) > 10
    assert set(plans_of(whole.table.take(below))) <= set(known)


def test_choices_are_the_plans_of_their_frames_step_by_step() -> None:
    model, cluster, job = MODELS["mixture"], CLUSTERS["one box"], asked()
    space = legal_space(model, cluster, job)
    choices, every = Choices(space), np.arange(len(space.keys))
    picked = choices.of(every)
    for step in (SCHEDULE, SHARDING, PLAN):
        assert int(choices.plans(picked, step - 1).sum()) == len(space.plain.table)
        picked = choices.after(picked, step)
    assert sorted(plans_of(choices.table(picked, PLAN))) == sorted(plans_of(space.plain.table))
    kinds = [int(kind) for kind in np.unique(space.plain.table.schedule) if kind != 1]
    other = picked.take(choices.among("schedule", kinds, PLAN)[picked.at])
    assert np.all(choices.table(other, PLAN).schedule != 1)
    assert len(other) == np.count_nonzero(space.plain.table.schedule != 1)


def test_a_search_leaves_out_what_cannot_be_best() -> None:
    model, cluster = samples.model(layers=12), samples.cluster(samples.nodes(num_nodes=4))
    job = samples.job(sequences=64, length=512)
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    found.best(10)
    assert found.priced < 0.02 * space.count


def test_a_space_that_nothing_fits_in_is_proven_by_its_lightest_plans() -> None:
    small = samples.cluster(samples.nodes(devices_per_node=4, of=samples.device(memory_bytes=2**16)))
    job = asked()
    space = legal_space(MODELS["dense"], small, job)
    found = Explorer(space, model=MODELS["dense"], cluster=small, job=job, exhaustive=0)
    found.best(5)
    assert found.priced
    assert not found.prices.fits.any()
    least = price(space.table, model=MODELS["dense"], cluster=small, job=job).memory_bytes.min()
    assert found.prices.memory_bytes.min() == pytest.approx(least, rel=1e-12)
    assert found.hopeless >= space.count


def test_the_lightest_plan_of_a_frame_is_among_those_called_so() -> None:
    model, cluster, job = MODELS["dense"], CLUSTERS["two boxes"], asked()
    space = legal_space(model, cluster, job)
    every = np.arange(len(space.keys))
    heavy = price(space.table, model=model, cluster=cluster, job=job).memory_bytes
    light = price(space.lightest.table, model=model, cluster=cluster, job=job).memory_bytes
    frame, few = np.repeat(every, space.sizes), space.lightest.frame_of(every)
    for index in every:
        assert light[few == index].min() <= heavy[frame == index].min() * (1.0 + 1e-9)


def test_a_join_crosses_each_row_with_the_options_of_its_key() -> None:
    product = Product(None, {"a": np.array([1, 2, 3])})
    product.join(["b", "c"], product["a"], lambda key: [[key, index] for index in range(key - 1)])
    assert product["a"].tolist() == [2, 3, 3]
    assert product["b"].tolist() == [2, 3, 3]
    assert product["c"].tolist() == [0, 0, 1]


def test_two_spaces_of_one_job_are_the_same() -> None:
    model, cluster, job = MODELS["mixture"], CLUSTERS["one box"], asked()
    first, second = (legal_space(model, cluster, job) for _ in range(2))
    assert first.count == second.count == len(first.table)
    assert np.array_equal(first.table.layout, second.table.layout)
