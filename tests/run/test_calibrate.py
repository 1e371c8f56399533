"""Figures that made the steps are found again from them; a prior keeps those that no step tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog, cost, search
from meshwright.catalog.figures import machine_problems
from meshwright.run.calibrate import Observation, calibrate
from meshwright.run.fit import Array, least_log_squares, left_out_errors
from meshwright.run.measure_steps import probe_designs
from meshwright.run.moved_figures import FIGURES, figures_of
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.plan import Design

CLUSTER = catalog.local_cluster(cores=2, memory_bytes=16e9, devices=4)


def truth() -> ClusterSpec:
    """The cluster with other figures than the defaults."""
    group = CLUSTER.groups[0]
    device = replace(
        group.device,
        memory_fraction=0.6,
        launch_seconds=9e-6,
        layer_seconds=9e-5,
        step_overhead_seconds=2e-3,
        tensor_layer_seconds=1e-3,
        context_layer_seconds=8e-4,
        shard_layer_seconds=3e-4,
        action_seconds=5e-4,
    )
    fits = tuple(replace(fit, latency_seconds=1.5 * fit.latency_seconds) for fit in group.inside.fits)
    group = replace(group, device=device, inside=replace(group.inside, fits=fits))
    return replace(CLUSTER, groups=(group,))


def designs() -> list[Design]:
    return [design for ranks in (1, 2, 4) for design in probe_designs(CLUSTER, ranks=ranks)]


def seconds(design: Design, cluster: ClusterSpec) -> float:
    return cost.predict(replace(design, cluster=cluster)).step_seconds


def test_every_probe_is_a_legal_plan() -> None:
    assert [search.check(design) for design in designs()] == [()] * len(designs())


@pytest.mark.slow
def test_steps_that_other_figures_made_are_explained() -> None:
    cluster = truth()
    observations = [Observation(design=design, seconds=seconds(design, cluster)) for design in designs()]
    found = calibrate(CLUSTER, observations, stamp="moved in a test")
    assert found.before > 0.1
    assert found.after < 0.03
    assert 0.0 < found.left_out < 0.2
    assert found.cluster.step_error == found.left_out
    unseen = [catalog.load_model("llama-2m"), catalog.load_model("llama-5m")]
    errors = []
    for model in unseen:
        job = catalog.load_job(None, sets=["sequence_length=256", "batch_tokens=8Ki", "precision=bf16"])
        for candidate in search.design(model, CLUSTER, job, top=12).ranked:
            design = Design(model=model, cluster=CLUSTER, job=job, plan=candidate.plan)
            errors.append(abs(np.log(seconds(design, found.cluster) / seconds(design, cluster))))
    assert float(np.mean(errors)) < 0.08
    assert found.cluster.groups[0].device.sources["launch_seconds"].startswith("moved in a test")


def test_without_observations_nothing_moves() -> None:
    found = calibrate(CLUSTER, [], stamp="moved in a test")
    assert found.cluster == CLUSTER
    assert found.moved == ()


@pytest.mark.slow
def test_steps_that_contradict_each_other_move_nothing() -> None:
    alone = probe_designs(CLUSTER, ranks=1)
    noise = np.random.default_rng(0).normal(0.0, 1.5, size=len(alone))
    observations = [
        Observation(design=design, seconds=seconds(design, CLUSTER) * float(np.exp(shift)))
        for design, shift in zip(alone, noise, strict=True)
    ]
    found = calibrate(CLUSTER, observations, stamp="moved in a test")
    assert replace(found.cluster, step_error=None) == CLUSTER
    assert found.cluster.step_error == pytest.approx(float(np.sqrt(np.mean(noise**2))), rel=1e-9)


def test_an_error_left_out_is_that_of_a_fit_without_it() -> None:
    rng = np.random.default_rng(1)
    design, noise = rng.normal(size=(12, 3)), rng.normal(scale=0.1, size=12)
    start, pull = np.zeros(3), 0.05

    def fitted(rows: list[int]) -> Array:
        return least_log_squares(lambda logs: np.exp(design[rows] @ logs), np.exp(noise[rows]), start=start, pull=pull)

    at = fitted(list(range(12)))
    found = left_out_errors(lambda logs: np.exp(design @ logs), np.exp(noise), at=at, pull=pull)
    for index in range(12):
        without = fitted([row for row in range(12) if row != index])
        assert found[index] == pytest.approx(design[index] @ without - noise[index], abs=2e-3)


@pytest.mark.parametrize("figure", figures_of(CLUSTER), ids=[figure.name for figure in figures_of(CLUSTER)])
def test_every_figure_changes_a_prediction(figure: object) -> None:
    entry = next(known for known in FIGURES if known is figure)
    value = 1.5 * (entry.read(CLUSTER) or entry.start)
    moved = entry.write(CLUSTER, value)
    assert any(seconds(design, moved) != seconds(design, CLUSTER) for design in designs())


def test_a_figure_that_the_machine_does_not_have_stays_unsaid() -> None:
    (group,) = CLUSTER.groups
    bare = replace(group, device=replace(group.device, optimizer_bandwidth=None, sources={}))
    cluster = replace(CLUSTER, groups=(bare,))
    made = probe_designs(cluster, ranks=1)[:2]
    observations = [Observation(design=design, seconds=1.3 * seconds(design, cluster)) for design in made]
    found = calibrate(cluster, observations, stamp="moved in a test")
    device = found.cluster.groups[0].device
    assert found.after < found.before
    assert device.optimizer_bandwidth is None
    assert "optimizer_bandwidth" not in {*device.sources, *(name for name, _, _ in found.moved)}
    assert not list(machine_problems(found.cluster))


def test_steps_quicker_than_the_memory_raise_its_bandwidth_and_keep_a_share_of_it() -> None:
    (figure,) = (each for each in FIGURES if each.name == "memory_fraction")
    device = figure.write(CLUSTER, 1.5).groups[0].device
    assert device.memory_fraction == 1.0
    assert device.memory_bandwidth == 1.5 * CLUSTER.groups[0].device.memory_bandwidth
    assert not list(machine_problems(figure.write(CLUSTER, 1.5)))
