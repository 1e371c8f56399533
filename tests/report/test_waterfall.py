"""The waterfall: its bars sum to the step whatever the report, and the first is the MFU."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import meshwright
from meshwright.catalog.devices import devices
from meshwright.report import waterfall
from meshwright.report.waterfall import COMPUTE, IDEAL, KERNELS, UNEVEN, UNEXPLAINED
from meshwright.spec.cluster import Precision
from meshwright.spec.job import DataSpec
from meshwright.spec.report import Line, LineName, Report

SECONDS = st.floats(0.0, 100.0, allow_nan=False)


def report(lines: dict[str, float], *, step: float | None = None, peak: float | None = 1e12) -> Report:
    found = tuple(Line(name=name, seconds=seconds) for name, seconds in lines.items())
    total = sum(lines.values()) if step is None else step
    return Report(
        plan="plan",
        step=Line(name=LineName.STEP, seconds=total, lines=found),
        memory=(),
        tokens_per_step=1000,
        devices=4,
        model_flops=5e11,
        peak_flops=peak,
    )


@given(st.dictionaries(st.sampled_from([name for name in LineName if name != LineName.STEP]), SECONDS), SECONDS)
def test_bars_sum_to_the_step_and_each_begins_where_the_last_ended(lines: dict[str, float], more: float) -> None:
    step = sum(lines.values()) + more
    found = waterfall(report(lines, step=step))
    assert sum(bar.seconds for bar in found.bars) == pytest.approx(step, abs=1e-6)
    for before, after in pairwise(found.bars):
        assert after.start == pytest.approx(before.end)


def test_compute_is_cut_at_the_peak_and_at_the_busiest_device() -> None:
    lines = {LineName.FORWARD: 1.0, LineName.BACKWARD: 2.0, LineName.BUBBLE: 1.0}
    value = replace(report(lines), detail={"flops": 1.5e11})
    found = waterfall(value)
    assert found.seconds(IDEAL) == 0.5
    assert found.seconds(UNEVEN) == pytest.approx(1.5e11 * 4 / 1e12 - 0.5)
    assert found.seconds(KERNELS) == pytest.approx(3.0 - 0.6)
    assert found.bars[0].share == pytest.approx(value.mfu)
    assert [bar.name for bar in found.bars] == [IDEAL, UNEVEN, KERNELS, LineName.BUBBLE]


def test_without_a_peak_compute_is_one_bar() -> None:
    found = waterfall(report({LineName.FORWARD: 1.0, LineName.BACKWARD: 2.0}, peak=None))
    assert [(bar.name, bar.seconds) for bar in found.bars] == [(COMPUTE, 3.0)]
    assert found.mfu is None


def test_less_than_the_peak_would_take_is_one_bar_and_says_so() -> None:
    found = waterfall(report({LineName.FORWARD: 0.1, LineName.BACKWARD: 0.2, LineName.BUBBLE: 0.1}))
    assert [(bar.name, bar.seconds) for bar in found.bars] == [(COMPUTE, pytest.approx(0.3)), (LineName.BUBBLE, 0.1)]
    assert "fewer FLOPs than the model's formula counts" in found.bars[0].note


def test_a_step_longer_than_its_lines_says_so() -> None:
    found = waterfall(report({LineName.FORWARD: 2.0, LineName.BACKWARD: 1.0}, step=5.0))
    assert found.seconds(UNEXPLAINED) == pytest.approx(2.0)


def test_bars_of_a_real_plan_sum_to_its_step_in_the_order_of_causes() -> None:
    job = meshwright.JobSpec(batch_tokens=2**20, constraints=meshwright.Constraints(fix={"pipeline": 4, "tensor": 2}))
    value = meshwright.design("llama-3.1-8b", "16xH100", job, top=1).report
    found = waterfall(value)
    assert sum(bar.seconds for bar in found.bars) == pytest.approx(value.step_seconds, rel=1e-12)
    names = [bar.name for bar in found.bars]
    assert names[0] == IDEAL
    assert names.index(LineName.TENSOR) < names.index(LineName.TRANSFER) < names.index(LineName.BUBBLE)


@pytest.fixture(scope="module")
def unlike() -> Report:
    """Two stages on two kinds of nodes, of which one has two and a half times the peak of the other."""
    fixed = meshwright.Constraints(fix={"pipeline": 2, "tensor": 1, "context": 1, "recompute": "none"})
    job = meshwright.JobSpec(
        sequence_length=4096, batch_tokens=2**20, data=DataSpec(document_mask=False), constraints=fixed
    )
    return meshwright.design("llama-2-7b", "8xA100+8xV100", job, top=1).report


def test_an_even_share_takes_unlike_devices_as_long_at_their_peaks(unlike: Report) -> None:
    assert unlike.peak_flops is not None
    a100, v100 = (devices()[name].peak_flops[Precision.FP16] for name in ("A100-80GB", "V100-32GB"))
    assert unlike.peak_flops == 8 * (a100 + v100)
    found = waterfall(unlike)
    excess = unlike.detail["flops"] / a100 - unlike.model_flops / unlike.peak_flops
    assert found.seconds(UNEVEN) == pytest.approx(excess)
    assert found.bars[1].share < 0.05
    assert sum(bar.seconds for bar in found.bars) == pytest.approx(unlike.step_seconds, rel=1e-12)


def test_parts_of_a_pass_are_those_of_the_device_that_sets_the_pace(unlike: Report) -> None:
    """Not those of the devices that are listed first, whose stage is another."""
    for name in (LineName.FORWARD, LineName.BACKWARD):
        line = next(line for line in unlike.step.lines if line.name == name)
        parts = {part.name: part.seconds for part in line.lines}
        assert sum(parts.values()) == pytest.approx(line.seconds)
        assert parts.get("host", 0.0) < 0.1 * line.seconds


def test_the_same_work_on_unlike_devices_is_beyond_the_share_of_the_slower() -> None:
    fixed = meshwright.Constraints(fix={"pipeline": 1, "tensor": 1, "context": 1})
    job = meshwright.JobSpec(batch_tokens=2**19, constraints=fixed)
    value = meshwright.design("llama-3.2-1b", "8xH100+8xA100", job, top=1).report
    assert value.peak_flops is not None
    peak = value.detail["busiest_peak_flops"]
    assert peak < value.peak_flops / value.devices
    excess = value.detail["flops"] / peak - value.model_flops / value.peak_flops
    assert waterfall(value).seconds(UNEVEN) == pytest.approx(excess)
