"""What a dry run says of memory: its peaks, and parts whose differences a sum would hide."""

from __future__ import annotations

from meshwright.report.dry import dry_view
from meshwright.spec.counted import count_gaps
from meshwright.spec.report import Line, LineName, Report, StageMemory


def held(**parts: float) -> Report:
    step = Line(name=LineName.STEP, seconds=0.0)
    memory = (StageMemory(rank=0, parts=parts, capacity=1e12),)
    return Report(plan="", step=step, memory=memory, tokens_per_step=1, devices=1, model_flops=1.0, peak_flops=None)


def sentences(predicted: Report, counted: Report) -> tuple[str, ...]:
    return dry_view(counted, count_gaps(predicted, counted), plan="").sentences


def test_parts_that_cancel_are_told() -> None:
    told = sentences(held(gradients=3e9, activations=1e9), held(gradients=1e9, activations=3e9))
    assert "memory: every peak is predicted within 0.5 % of what is counted" in told
    assert any(line.startswith("parts of memory: rank 0 gradients differs most") for line in told)
    assert any("less counted than predicted, 50.0 % of the rank's peak" in line for line in told)


def test_parts_that_agree_need_no_word() -> None:
    told = sentences(held(gradients=1e9), held(gradients=1e9))
    assert not any(line.startswith("parts of memory") for line in told)
