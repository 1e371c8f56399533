from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.report.drawn_step import MOST_ACTIONS, drawn_step, shown_microbatches
from meshwright.report.losses import losses_figure
from meshwright.report.memory_columns import memory_of_ranks
from meshwright.report.scatter import front, scatter
from meshwright.report.settings import settings
from meshwright.report.waterfall import IDEAL, KERNELS, UNEVEN, waterfall
from meshwright.search import Candidate
from meshwright.spec.plan import Plan, Recompute, Schedule, ScheduleKind
from meshwright.spec.report import Origin
from meshwright.spec.units import format_bytes, format_seconds
from tests.report import synthetic

REPORT = synthetic.report(synthetic.PREDICTED, origin=Origin.ANALYTIC)


def candidate(step: float, peak: float) -> Candidate:
    return Candidate(
        plan=synthetic.design().plan,
        step_seconds=step,
        error_band=(0.8, 1.25),
        tokens_per_second=1.0,
        mfu=None,
        peak_bytes=peak,
        capacity_bytes=100.0,
        bubble_share=0.0,
        communication_share=0.0,
        total_seconds=1.0,
        total_cost=None,
    )


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12))
def test_nothing_beats_the_front_and_something_matches_the_rest(figures: list[tuple[int, int]]) -> None:
    found = front([candidate(float(step), float(peak)) for step, peak in figures])
    for index, (step, peak) in enumerate(figures):
        others = [figures[other] for other in range(len(figures)) if other != index]
        if index in found:
            assert not any(s <= step and p <= peak and (s, p) != (step, peak) for s, p in others)
        else:
            assert any(s <= step and p <= peak and (s, p) != (step, peak) for s, p in others)


def test_the_plot_has_a_link_for_every_plan_and_a_line_for_the_capacity_when_near() -> None:
    near = scatter([candidate(1.0, 90.0), candidate(1.5, 70.0), candidate(2.0, 95.0)], chosen=0)
    assert near.body.count("<a ") == 3
    assert near.body.count("tip front") == 2
    assert 'class="limit"' in near.body
    assert [row[1] for row in near.table.rows] == ["yes", "yes", "no"]
    far = scatter([candidate(1.0, 9.0), candidate(1.5, 7.0)], chosen=0)
    assert 'class="limit"' not in far.body
    assert "All are far below the 100 B" in far.caption
    wide = scatter([candidate(0.5, 9.0), candidate(50.0, 7.0)], chosen=0)
    assert "logarithmic" in wide.caption
    assert ">1.00 s</span>" in wide.body
    assert "logarithmic" not in far.caption
    close = scatter([candidate(14.201, 9.0), candidate(14.202, 7.0), candidate(14.202, 7.0)], chosen=0)
    assert "longer a step is than 14.2 s" in close.caption
    assert ">+1.00 ms</span>" in close.body
    assert close.body.count("margin-left") == 1, "of two at one place the second is beside the first"
    alone = scatter([candidate(1.0, 9.0)], chosen=0)
    assert alone.body.count("<a ") == 1


def test_bars_of_the_page_are_those_of_the_terminal() -> None:
    known = replace(REPORT, model_flops=2.0e9, peak_flops=2.0e10, detail={"flops": 1.2e9})
    body = losses_figure(known).body
    shown = [bar for bar in waterfall(known).bars if abs(bar.share) > 5e-4]
    assert [bar.name for bar in shown[:3]] == [IDEAL, UNEVEN, KERNELS]
    for bar in shown:
        assert f'<span class="name">{bar.name}</span>' in body
        assert f'<span class="note">{format_seconds(bar.seconds)}</span>' in body


def test_the_band_is_drawn_where_there_is_one() -> None:
    assert 'class="band tip"' in losses_figure(REPORT).body
    assert 'class="band tip"' not in losses_figure(replace(REPORT, error_band=(1.0, 1.0))).body


def test_memory_of_many_ranks_is_columns_of_every_rank() -> None:
    stages = tuple(
        replace(REPORT.memory[0], rank=rank, parts={"parameters": 4e8 + rank, "new": 2e8}, capacity=1e9)
        for rank in range(20)
    )
    figure = memory_of_ranks(replace(REPORT, memory=stages))
    assert figure is not None
    assert figure.body.count("hover tip") == 20
    assert len(figure.table.rows) == 20
    assert format_bytes(6e8 + 7) in figure.table.rows[7]
    few = memory_of_ranks(replace(REPORT, memory=stages[:3]))
    assert few is not None
    assert few.body.count('class="bar"') == 3


def test_settings_say_which_blocks_differ() -> None:
    design = synthetic.design(pipeline=2)
    first, second = design.plan.stages
    full = replace(second, groups=tuple(replace(group, recompute=Recompute.FULL) for group in second.groups))
    mixed = replace(design, plan=replace(design.plan, stages=(first, full)))
    counts = [stage.stop - stage.start for stage in design.plan.stages]
    assert dict(settings(design))["recompute"] == "none"
    assert dict(settings(mixed))["recompute"] == f"none in {counts[0]} blocks, full in {counts[1]} blocks"
    assert dict(settings(mixed)).keys() == dict(settings(design)).keys()


def with_schedule(plan: Plan, **changes: object) -> Plan:
    return replace(plan, schedule=replace(plan.schedule, **changes))


def test_steps_of_many_actions_are_drawn_with_fewer_microbatches() -> None:
    plan = synthetic.design(pipeline=2).plan
    assert shown_microbatches(plan) == 8
    long = with_schedule(plan, microbatches=50_000)
    assert shown_microbatches(long) == MOST_ACTIONS // 4
    assert shown_microbatches(long) % long.pipeline == 0
    assert shown_microbatches(with_schedule(long, slices=1_000_000)) == 0


def test_the_beginning_of_a_shorter_step_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    design = synthetic.design(pipeline=3, shard=1, microbatches=24)
    design = replace(
        design, plan=replace(design.plan, schedule=Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=24))
    )
    whole = drawn_step(design)
    monkeypatch.setattr("meshwright.report.drawn_step.MOST_ACTIONS", 60)
    part = drawn_step(design)
    assert whole is not None
    assert part is not None
    assert whole.is_whole
    assert (part.microbatches, part.of) == (9, 24)

    ours, theirs = ([span for span in step.spans if span.rank == 1][:8] for step in (part, whole))
    assert [(span.name, span.microbatch) for span in ours] == [(span.name, span.microbatch) for span in theirs]
    for mine, full in zip(ours, theirs, strict=True):
        assert mine.start == pytest.approx(full.start, rel=0.01)
        assert mine.seconds == pytest.approx(full.seconds, rel=0.01)
