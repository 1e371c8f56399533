"""What a job is trained in that says no precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from meshwright.search.job_rules import allowed_precisions
from meshwright.spec.cluster import Precision
from meshwright.spec.job import Automatic, Constraints, JobSpec
from tests.search import search_samples as samples
from tests.search.test_decide import BOXES


def job(**changes: Any) -> JobSpec:
    return replace(samples.job(sequences=8), **changes)


@pytest.mark.parametrize(
    ("peaks", "taken"),
    [
        ({Precision.BF16: 200.0, Precision.FP32: 100.0}, {Precision.BF16}),
        ({Precision.BF16: 2.0, Precision.FP32: 100.0}, {Precision.BF16, Precision.FP32}),
        ({Precision.FP16: 200.0, Precision.FP32: 100.0}, {Precision.FP16, Precision.FP32}),
        ({Precision.FP32: 100.0}, {Precision.FP32}),
    ],
)
def test_a_job_that_says_no_precision_is_trained_in_what_the_devices_are_best_at(
    peaks: Mapping[Precision, float], taken: set[Precision]
) -> None:
    group = BOXES.groups[0]
    device = replace(
        group.device, peak_flops=peaks, matrix=dict.fromkeys(peaks, next(iter(group.device.matrix.values())))
    )
    cluster = replace(BOXES, groups=(replace(group, device=device),))
    assert set(allowed_precisions(job(precision=Automatic.AUTO), cluster)) == taken
    assert set(allowed_precisions(job(precision=Precision.BF16), cluster)) == {Precision.BF16}
    fixed = job(precision=Automatic.AUTO, constraints=Constraints(fix={"precision": "fp32"}))
    assert allowed_precisions(fixed, cluster) == (Precision.FP32,)
