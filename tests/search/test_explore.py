"""Bounds that nothing beats, and a search that stops early and still finds the best."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright.search.bound import Bounds, least_bytes
from meshwright.search.decide import legal_space
from meshwright.search.explore import Explorer
from meshwright.search.prices import price
from meshwright.search.product import Product
from meshwright.spec.cluster import Link
from meshwright.spec.job import Constraints, JobSpec, Objective
from tests.search import search_samples as samples

HOST = Link(bandwidth=2e10, latency_seconds=1e-5)
SLOW = samples.device(name="slow", speed=0.4)
MODELS = {
    "dense": samples.model(layers=4),
    "tied": samples.model(layers=4, tied=True),
    "mixture": samples.model(layers=3, layer=samples.mixture_layer()),
    "latent": samples.model(layers=3, layer=samples.latent_layer()),
    "recurrent": samples.model(layers=3, layer=samples.recurrent_layer()),
}
CLUSTERS = {
    "one box": samples.cluster(samples.nodes(devices_per_node=4, host=HOST)),
    "two boxes": samples.cluster(samples.nodes(num_nodes=2, devices_per_node=2)),
    "unlike": samples.cluster(
        samples.nodes(devices_per_node=2), samples.nodes(devices_per_node=2, of=SLOW, site="b", host=HOST)
    ),
}


def asked(**changes: object) -> JobSpec:
    return replace(samples.job(sequences=8, constraints=Constraints(devices="any")), **changes)


@pytest.mark.parametrize("machines", CLUSTERS)
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_beats_its_bound(name: str, machines: str) -> None:
    model, cluster, job = MODELS[name], CLUSTERS[machines], asked()
    space = legal_space(model, cluster, job)
    bounds, every = Bounds(space, model=model, cluster=cluster, job=job), np.arange(len(space.keys))
    prices = price(space.table, model=model, cluster=cluster, job=job)
    known = prices.finite
    slack = 1.0 + 1e-9
    frame = space.frame_of(every)
    assert np.all(bounds.seconds(space.table, frames=frame)[known] <= prices.step_seconds[known] * slack)
    assert np.all(bounds.bytes(space.table, frames=frame) <= prices.memory_bytes * slack)
    assert np.all(bounds.frames()[frame][known] <= prices.step_seconds[known] * slack)
    assert np.all(least_bytes(space, model=model)[frame] <= prices.memory_bytes * slack)


@pytest.mark.parametrize("objective", list(Objective))
@pytest.mark.parametrize("name", ["dense", "mixture"])
def test_a_search_that_stops_early_finds_the_same_best(name: str, objective: Objective) -> None:
    model, cluster, job = MODELS[name], CLUSTERS["one box"], asked(objective=objective)
    space = legal_space(model, cluster, job)
    whole = Explorer(space, model=model, cluster=cluster, job=job)
    early = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    for found in (whole, early):
        found.best(5)
    best = [np.sort(found.scores()[found.prices.fits])[:5] for found in (whole, early)]
    assert best[0][0] == best[1][0]
    assert np.all(best[1] >= best[0])
    assert whole.priced == space.count


def test_a_search_leaves_out_what_cannot_be_best() -> None:
    model, cluster = samples.model(layers=12), samples.cluster(samples.nodes(num_nodes=4))
    job = samples.job(sequences=64, length=512)
    space = legal_space(model, cluster, job)
    found = Explorer(space, model=model, cluster=cluster, job=job, exhaustive=0)
    found.best(10)
    assert found.priced < 0.8 * space.count


def test_a_space_that_nothing_fits_in_is_proven_by_its_lightest_plans() -> None:
    small = samples.cluster(samples.nodes(devices_per_node=4, of=samples.device(memory_bytes=2**16)))
    job = asked()
    space = legal_space(MODELS["dense"], small, job)
    found = Explorer(space, model=MODELS["dense"], cluster=small, job=job, exhaustive=0)
    found.best(5)
    assert not found.priced or not found.prices.fits.any()


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
