"""Tensor ranks compare what they round with one scale a tensor: bytes and seconds of that, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright import cost
from meshwright.catalog import load_cluster
from meshwright.spec.cluster import Precision
from meshwright.spec.model import FeedForward
from meshwright.spec.plan import Design, Recompute
from meshwright.spec.report import LineName
from tests.support import models
from tests.support.designs import Layout, design

SUMS = f"{LineName.TENSOR.value}|all_reduce|tensor"
LAYOUT = Layout(tensor=2, sequence_parallel=True, batch=4)


def given(precision: Precision, layout: Layout = LAYOUT) -> Design:
    found = design(models.all_models()["tiny"], replace(layout, precision=precision))
    group = found.cluster.groups[0]
    device = load_cluster("8xH100").groups[0].device
    device = replace(device, peak_flops={**device.peak_flops, precision: 1e15})
    return replace(found, cluster=replace(found.cluster, groups=(replace(group, device=device),)))


@pytest.mark.parametrize(("recompute", "products"), [(Recompute.NONE, 3), (Recompute.FULL, 4)])
def test_every_product_has_its_own(recompute: Recompute, products: int) -> None:
    """Two numbers of four bytes before each."""
    layout = replace(LAYOUT, recompute=recompute)
    plain, eight, by_row = (
        dict(cost.traffic(given(precision, layout), rank=0).bytes).get(SUMS, 0.0)
        for precision in (Precision.BF16, Precision.FP8, Precision.FP8_ROW)
    )
    entry = given(Precision.FP8, layout)
    layers = entry.model.layers
    gated = isinstance(layers[0].transform, FeedForward) and layers[0].transform.gated
    passes = entry.plan.batch // (entry.plan.data * entry.plan.microbatch)
    assert eight - plain == 8.0 * products * passes * len(layers) * (4 + (3 if gated else 2))
    assert by_row == plain


def test_they_are_waited_for() -> None:
    """Rows have scales of their own, with which no other rank agrees."""
    whole, rows = (
        cost.predict(given(precision)).step.find(LineName.TENSOR) for precision in (Precision.FP8, Precision.FP8_ROW)
    )
    assert whole is not None
    assert rows is not None
    assert whole.seconds > rows.seconds
    assert whole.bytes > rows.bytes
