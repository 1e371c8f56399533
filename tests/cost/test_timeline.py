"""The step as spans: what is drawn is what was predicted, and nothing is drawn twice."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from meshwright.cost import SCHEDULES, predict, timeline
from meshwright.spec.cluster import Link
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from tests.cost.legal_plans import CASES, case, sample

WIDE = Link(bandwidth=1e9, latency_seconds=0.02)
MOST = 4000  # actions


def samples(name, *, count, seed):
    at, table = case(name), sample(name, count=count, seed=seed, schedules=tuple(SCHEDULES))
    few = table.microbatches * table.pipeline * table.chunks <= MOST
    assert few.sum() > count // 2
    return [at.design(table, int(row)) for row in np.flatnonzero(few)]


def two_sites(design: Design) -> Design:
    (group,) = design.cluster.groups
    half = group.num_nodes // 2
    groups = tuple(replace(group, name=site, site=site, num_nodes=half) for site in ("north", "south"))
    return replace(design, cluster=replace(design.cluster, groups=groups, wide_area=WIDE))


def holds(design):
    step, spans = predict(design).step, timeline(design)
    assert min(span.start for span in spans) >= 0.0
    assert max(span.start + span.seconds for span in spans) == pytest.approx(step.seconds, rel=1e-6)
    for rank in range(design.plan.pipeline):
        own = [span for span in spans if span.rank == rank]
        for first, second in pairwise(own):
            assert first.start + first.seconds <= second.start + 1e-9 * step.seconds
    lines = {line.name: line.seconds for line in step.lines}
    for name in (LineName.GRADIENTS, LineName.PARAMETERS):
        assert sum(span.seconds for span in spans if span.name == name and span.rank == 0) <= lines[name] * (1 + 1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_drawn_step_is_the_predicted_step(name):
    for design in samples(name, count=12, seed=7):
        holds(design)


def test_a_drawn_step_over_two_sites_is_the_predicted_step():
    for design in samples("llama", count=8, seed=11):
        holds(two_sites(design))


def test_passes_last_as_long_as_the_report_says():
    """Of the busiest rank: forward, backward, and all that is waited for in them."""
    for design in samples("llama", count=10, seed=3):
        report, spans = predict(design), timeline(design)
        busiest = int(report.detail["busiest_rank"])
        drawn = sum(
            span.seconds
            for span in spans
            if span.rank == busiest and span.name in (LineName.FORWARD, LineName.BACKWARD) and span.stage is not None
        )
        apart = (LineName.TRANSFER, LineName.BUBBLE, LineName.OPTIMIZER, LineName.INPUT, LineName.OTHER)
        told = sum(line.seconds for line in report.step.lines if line.name not in apart)
        told -= report.detail["first_gather_seconds"] + report.detail["last_reduce_seconds"]
        assert drawn == pytest.approx(told, rel=0.01)
