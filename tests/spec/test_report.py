from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.spec.errors import ConfigError, ExitCode, NoPlanFits, Problem
from meshwright.spec.report import Gap, Line, LineName, MemoryPart, Report, StageMemory, close, diff


def report(**seconds: float) -> Report:
    lines = tuple(Line(name=LineName[name.upper()], seconds=value) for name, value in seconds.items())
    memory = StageMemory(rank=0, parts={MemoryPart.PARAMETERS: 60.0, MemoryPart.RESERVED: 10.0}, capacity=100.0)
    return Report(
        plan="p",
        step=Line(name=LineName.STEP, seconds=sum(seconds.values()), lines=lines),
        memory=(memory,),
        tokens_per_step=1000,
        devices=2,
        model_flops=6e12,
        peak_flops=4e12,
        total_tokens=10_000,
        price_per_hour=3600.0,
    )


def test_figures_follow_from_the_lines() -> None:
    value = report(forward=1.0, backward=2.0)
    assert value.balanced
    assert value.tokens_per_second == pytest.approx(1000 / 3)
    assert value.mfu == pytest.approx(6 / 12)
    assert value.total_seconds == pytest.approx(30.0)
    assert value.total_cost == pytest.approx(30.0)
    assert value.share(LineName.FORWARD) == pytest.approx(1 / 3)
    assert value.peak_bytes == 70
    assert value.allocated_bytes == 60
    assert value.fits


def test_the_tightest_rank_may_be_short_of_the_hosts_memory_alone() -> None:
    """The one whose device is fullest may be another."""
    parts = {MemoryPart.PARAMETERS: 70.0}
    device = StageMemory(rank=0, parts=parts, capacity=80.0)
    host = StageMemory(rank=1, parts=parts, capacity=100.0, host=60.0, host_capacity=50.0)
    value = replace(report(forward=1.0), memory=(device, host))
    assert not value.fits
    assert (value.fullest, value.tightest) == (device, host)
    assert (value.tightest.over, value.tightest.need) == (10.0, "needs 60 B of the host's memory, has 50 B")
    without = replace(value, memory=())
    assert without.fullest == without.tightest


def test_an_unknown_peak_gives_no_mfu() -> None:
    unknown = Report(
        plan="p",
        step=Line(name=LineName.STEP, seconds=1.0),
        memory=(),
        tokens_per_step=1,
        devices=1,
        model_flops=1.0,
        peak_flops=None,
    )
    assert unknown.mfu is None
    assert unknown.total_cost is None


def test_diff_names_the_worst_line_first_after_the_step() -> None:
    gaps = diff(report(forward=1.0, backward=2.0), report(forward=1.1, backward=3.0, bubble=0.2))
    assert [gap.name for gap in gaps] == [LineName.STEP, LineName.BACKWARD, LineName.BUBBLE, LineName.FORWARD]
    assert gaps[1].seconds == pytest.approx(1.0)
    assert gaps[1].relative == pytest.approx(-1 / 3)
    assert Gap(name="x", predicted=1.0, measured=0.0).relative is None


def test_close_makes_the_lines_sum_to_the_step() -> None:
    value = report(forward=1.0)
    grown = Report(
        plan="p",
        step=Line(name=LineName.STEP, seconds=1.5, lines=value.step.lines),
        memory=(),
        tokens_per_step=1,
        devices=1,
        model_flops=1.0,
        peak_flops=None,
    )
    assert not grown.balanced
    closed = close(grown)
    assert closed.balanced
    other = closed.step.find(LineName.OTHER)
    assert other is not None
    assert other.seconds == pytest.approx(0.5)


def test_problems_say_what_where_why_and_fix() -> None:
    problem = Problem(what="3 does not divide 8", where="plan.tensor", why="heads are split", fix="choose 1, 2, 4 or 8")
    assert str(problem) == "plan.tensor: 3 does not divide 8 (heads are split); choose 1, 2, 4 or 8"
    error = ConfigError([problem, problem])
    assert len(str(error).splitlines()) == 2
    assert error.exit_code is ExitCode.USAGE
    assert NoPlanFits("none").exit_code == 3
