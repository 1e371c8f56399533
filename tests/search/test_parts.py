"""A part of the machines alone that is clearly faster than all of them is told first, with how to ask for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import search
from meshwright.spec.cluster import ClusterSpec, Link, NodeGroup
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.units import format_seconds
from tests.search import search_samples as samples

MODEL = samples.model(layers=4)
FEW = {"recompute": "none", "schedule": "1f1b", "context": 1, "offload": "none", "tensor": 1, "pipeline": 1}


def group(name: str, *, speed: float = 1.0, site: str = "a", num_nodes: int = 1) -> NodeGroup:
    of = samples.device(name=name, speed=speed)
    return replace(samples.nodes(num_nodes=num_nodes, devices_per_node=2, of=of, site=site), name=name)


def asked(**constraints: object) -> JobSpec:
    return samples.job(sequences=16, constraints=Constraints(**{"fix": FEW, **constraints}))


def told(cluster: ClusterSpec, job: JobSpec) -> list[str]:
    return [line for line in search.design(MODEL, cluster, job, top=1).why if " alone" in line]


QUICK, SLOW, FAR = group("quick"), group("slow", speed=1e-3), group("quick", site="b")
FARTHER = replace(FAR, name="far")
SLOWLY = Link(bandwidth=1e7, latency_seconds=1e-2)
NODES = samples.cluster(replace(group("quick", num_nodes=4), nic=SLOWLY, nics=1))


@pytest.mark.parametrize(
    ("cluster", "alone"),
    [
        (samples.cluster(SLOW, QUICK), "2 of the 4 devices alone (quick)"),
        (samples.cluster(QUICK, FARTHER), "2 of the 4 devices alone (site a)"),
        (samples.cluster(replace(SLOW, site="b"), QUICK), "2 of the 4 devices alone (quick, site a)"),
        (NODES, "2 of the 8 devices alone"),
    ],
    ids=("kind", "site", "kind and site", "nodes"),
)
def test_a_part_that_is_faster_alone_is_told_with_what_it_takes(cluster: ClusterSpec, alone: str) -> None:
    (line,) = told(cluster, asked())
    assert line.startswith(f"{alone} would be ")
    assert "--set constraints.devices=any" in line
    freed = search.design(MODEL, cluster, asked(devices="any"), top=1)
    assert f" as fast, {format_seconds(freed.report.step_seconds)} a step" in line


@pytest.mark.parametrize(
    ("cluster", "job"),
    [
        (samples.cluster(replace(QUICK, num_nodes=4)), asked()),
        (samples.cluster(SLOW, QUICK), asked(devices="any")),
        (samples.cluster(SLOW, QUICK), asked(fix={**FEW, "devices": 4})),
    ],
    ids=("all are faster", "fewer may be used", "so many are asked for"),
)
def test_nothing_is_told_where_no_part_is_faster_or_the_job_has_its_say(cluster: ClusterSpec, job: JobSpec) -> None:
    assert not told(cluster, job)
