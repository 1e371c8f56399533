"""Thin matrices: the bytes of a step by the formula, and what tensor ranks sum of the factors that each of them has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.catalog import load_cluster
from meshwright.cost.thin import summed_elements
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Design, Sharding
from meshwright.spec.ranks import factorable
from meshwright.spec.report import LineName
from tests.support import models
from tests.support.designs import Layout, design

DENSE = models.model()
THIN = models.factored(DENSE)
AWAY = DENSE.parameters - THIN.parameters


def sent(entry: Design, line: LineName) -> float:
    found = cost.traffic(entry, rank=0).bytes
    return sum(num_bytes for name, num_bytes in found.items() if name.startswith(f"{line.value}|"))


def test_parameters_are_those_of_the_formula() -> None:
    """An m x n matrix of rank r has r (m + n) parameters."""
    shapes = [factorable(layer.places) for layer in THIN.layers]
    ranks = [
        (shape[each.name], each.rank) for shape, layer in zip(shapes, THIN.layers, strict=True) for each in layer.ranks
    ]
    assert ranks
    assert sum(m * n - rank * (m + n) for (m, n), rank in ranks) == AWAY


@pytest.mark.parametrize(
    ("layout", "line", "each"),
    [
        (Layout(replicate=2), LineName.GRADIENTS, 4.0),
        (Layout(shard=2, sharding=Sharding.OPTIMIZER), LineName.GRADIENTS, 4.0),
        (Layout(shard=2, sharding=Sharding.OPTIMIZER), LineName.PARAMETERS, 4.0),
        # Eight microbatches, each of which gathers forward and backward.
        (Layout(shard=2, sharding=Sharding.PARAMETERS), LineName.PARAMETERS, 2 * 8 * 4.0),
    ],
    ids=["replicas", "zero1 gradients", "zero1 parameters", "zero3 parameters"],
)
def test_a_step_sends_less_by_what_the_factors_have_less(layout: Layout, line: LineName, each: float) -> None:
    dense, thin = (design(model, replace(layout, precision=Precision.FP32)) for model in (DENSE, THIN))
    assert sent(dense, line) - sent(thin, line) == each * AWAY


def test_tensor_ranks_sum_the_gradients_of_the_factors_they_all_have() -> None:
    """Once a step, in bytes and in seconds; features go as before."""
    layout = Layout(tensor=2, precision=Precision.FP32)
    dense, thin = (design(model, layout) for model in (DENSE, THIN))
    summed = sum(map(summed_elements, THIN.layers))
    whole = [(factorable(layer.places)[each.name], each) for layer in THIN.layers for each in layer.ranks]
    rows = ("mixer.output", "transform.down")
    assert summed == sum(each.rank * (shape[0] if each.name in rows else shape[1]) for shape, each in whole)
    assert sent(thin, LineName.TENSOR) - sent(dense, LineName.TENSOR) == 4.0 * summed
    machines = load_cluster("2xH100")
    line = [cost.predict(replace(entry, cluster=machines)).step.find(LineName.TENSOR) for entry in (dense, thin)]
    assert line[0] is not None
    assert line[1] is not None
    link = machines.groups[0].inside
    assert line[1].seconds - line[0].seconds >= 4.0 * summed / link.bandwidth
