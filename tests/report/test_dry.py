"""What a dry run says of memory: its peaks, and parts whose differences a sum would hide."""

from __future__ import annotations

from dataclasses import replace

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


def test_differences_have_as_many_digits_as_a_reader_needs() -> None:
    predicted, counted = (
        held(gradients=1e9, activations=9e9, optimizer=1e9 - 1e5),
        held(gradients=1.008e9, activations=1e9, optimizer=1e9),
    )
    view = dry_view(counted, count_gaps(predicted, counted), plan="")
    told = {row[0]: row[3] for row in view.memory.rows}
    assert told["rank 0 gradients"] == "+0.8 %"
    assert told["rank 0 activations"] == "-88.9 %"
    assert told["rank 0 optimizer"] == "< 0.1 %"


def test_flops_are_in_decimal_units() -> None:
    step = Line(name=LineName.STEP, seconds=0.0, lines=(Line(name=LineName.FORWARD, seconds=0.0, flops=1.88e9),))
    report = replace(held(gradients=1e9), step=step)
    assert dry_view(report, count_gaps(report, report), plan="").work.rows[0][1:] == (
        "1.88 GFLOP",
        "1.88 GFLOP",
        "same",
    )


def test_parts_that_agree_need_no_word() -> None:
    told = sentences(held(gradients=1e9), held(gradients=1e9))
    assert not any(line.startswith("parts of memory") for line in told)
