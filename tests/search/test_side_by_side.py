"""What a plan costs is its own, whatever is priced beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.search.decide import legal_space
from meshwright.search.prices import price
from meshwright.spec.cluster import ClusterSpec, Link
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from tests.search import search_samples as samples
from tests.search.test_explore import CLUSTERS, MIXED, MODELS, SEVERAL, asked
from tests.support.sampled import sampled

BAD = Link(bandwidth=1e9, latency_seconds=1e-4)
NODES = samples.nodes(num_nodes=2, devices_per_node=4)
HALVES = samples.cluster(
    replace(NODES, inside=replace(NODES.inside, across_sockets=1e8), nic=replace(BAD, staged=True), nics=1)
)
CASES = [
    ("dense", MIXED, asked(other_precisions=SEVERAL)),
    ("tied", CLUSTERS["one box"], asked()),
    ("latent", CLUSTERS["two boxes"], asked()),
    ("recurrent", CLUSTERS["one box"], asked()),
    ("mixture", CLUSTERS["unlike"], asked()),
    ("dense", HALVES, asked()),
]


@pytest.mark.parametrize(("name", "machines", "job"), sampled(CASES, quick=2), ids=lambda value: str(value)[:9])
def test_a_plan_costs_alone_what_it_costs_among_all(name: str, machines: ClusterSpec, job: JobSpec) -> None:
    hold(MODELS[name], machines, job, plans=50)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "gemma-2-9b", "qwen3-30b-a3b"])
def test_a_plan_of_a_known_model_costs_alone_what_it_costs_among_all(name: str) -> None:
    fixed = ("constraints.fix.tensor=2", "constraints.fix.pipeline=2", "constraints.fix.microbatch=1")
    job = catalog.load_job(None, sets=["sequence_length=4096", "batch_tokens=524288", *fixed])
    hold(catalog.load_model(name), catalog.load_cluster("16xH100"), job, plans=300)


def hold(model: ModelSpec, cluster: ClusterSpec, job: JobSpec, *, plans: int) -> None:
    """Checks so many of the job's plans, drawn from all."""
    table = legal_space(model, cluster, job).table
    known = {"model": model, "cluster": cluster, "job": job}
    every = price(table, **known)
    drawn = np.random.default_rng(0).choice(len(table), min(plans, len(table)), replace=False)
    assert len(drawn) > 20
    for row in drawn:
        alone = price(table.take(np.array([row])), **known)
        assert alone.memory_bytes[0] == pytest.approx(every.memory_bytes[row], rel=1e-12)
        assert alone.step_seconds[0] == pytest.approx(every.step_seconds[row], rel=1e-12)
