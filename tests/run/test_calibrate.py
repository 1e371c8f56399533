"""Figures that made the steps are found again from them; a prior keeps those that no step tells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog, cost, search
from meshwright.run.calibrate import FIGURES, Observation, calibrate
from meshwright.run.measure_steps import probe_designs
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


def test_steps_that_other_figures_made_are_explained() -> None:
    cluster = truth()
    observations = [Observation(design=design, seconds=seconds(design, cluster)) for design in designs()]
    found = calibrate(CLUSTER, observations, stamp="moved in a test")
    assert found.before > 0.1
    assert found.after < 0.03
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


def test_steps_that_contradict_each_other_move_nothing() -> None:
    alone = probe_designs(CLUSTER, ranks=1)
    noise = np.random.default_rng(0).normal(0.0, 1.5, size=len(alone))
    observations = [
        Observation(design=design, seconds=seconds(design, CLUSTER) * float(np.exp(shift)))
        for design, shift in zip(alone, noise, strict=True)
    ]
    found = calibrate(CLUSTER, observations, stamp="moved in a test")
    assert found.cluster == CLUSTER


@pytest.mark.parametrize("figure", FIGURES, ids=[figure.name for figure in FIGURES])
def test_every_figure_changes_a_prediction(figure: object) -> None:
    entry = next(known for known in FIGURES if known is figure)
    value = 1.5 * (entry.read(CLUSTER) or entry.start)
    moved = entry.write(CLUSTER, value)
    assert any(seconds(design, moved) != seconds(design, CLUSTER) for design in designs())
