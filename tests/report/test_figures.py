from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.report.bars import memory_figure, waterfall
from meshwright.report.curves import loss_figure, speed_figure
from meshwright.report.line_chart import smoothed
from meshwright.report.run_files import read_run
from meshwright.report.timeline_chart import measured_step, timeline_figure
from meshwright.spec.report import Origin
from meshwright.spec.span import Span
from tests.report import synthetic

PREDICTED = synthetic.report(synthetic.PREDICTED, origin=Origin.ANALYTIC)
MEASURED = synthetic.report(synthetic.MEASURED, origin=Origin.MEASURED, memory=104.0)


def test_loss_shows_training_and_validation(run_dir: Path) -> None:
    figure = loss_figure((read_run(run_dir),))
    assert figure is not None
    assert [name for _, name in figure.legend] == ["training, smoothed", "validation"]
    assert figure.body.count("<polyline") == 3
    assert figure.body.count('class="dot') == 5
    assert figure.table.headers == ("step", "training, smoothed", "validation")
    held = [row for row in figure.table.rows if row[2]]
    assert [row[0] for row in held] == ["40", "80", "120", "160", "200"]


def test_throughput_shows_the_prediction_and_starts_at_zero(run_dir: Path) -> None:
    figure = speed_figure((read_run(run_dir),))
    assert figure is not None
    assert ("s-4 dashed", "predicted") in figure.legend
    assert ">0</span>" in figure.body


def test_several_runs_share_axes(run_dir: Path, tmp_path: Path) -> None:
    runs = (read_run(run_dir), read_run(synthetic.write_run(tmp_path / "other", slower=1.5)))
    figure = loss_figure(runs)
    assert figure is not None
    assert [name for _, name in figure.legend] == ["novels", "other"]
    speed = speed_figure(runs)
    assert speed is not None
    assert speed.table.headers == ("step", "novels", "other")


def test_no_steps_make_no_curve(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("")
    files = read_run(run_dir)
    assert loss_figure((files,)) is None
    assert speed_figure((files,)) is None


def test_a_loss_that_is_not_a_number_is_left_out(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text(
        '{"step": 1, "loss": null}\n{"step": 2, "loss": 3.0}\n{"step": 3, "loss": 2}\n'
    )
    figure = loss_figure((read_run(run_dir),))
    assert figure is not None
    assert [row[0] for row in figure.table.rows] == ["2", "3"]


def test_smoothing_keeps_a_straight_line() -> None:
    line = tuple((float(x), 2.0 * x) for x in range(300))
    assert [y for _, y in smoothed(line)] == pytest.approx([y for _, y in line])
    assert smoothed(line[:20]) == line[:20]


def test_the_timeline_draws_every_action_of_both(run_dir: Path) -> None:
    files = read_run(run_dir)
    predicted = synthetic.spans(files.design)
    figure = timeline_figure(files.design.plan, predicted=predicted, measured=files.spans)
    assert figure is not None
    assert figure.body.count("c-forward tip") == 2 * 16
    assert figure.body.count("c-backward tip") == 2 * 16
    assert [row[0] for row in figure.table.rows] == [
        "predicted, rank 0",
        "predicted, rank 1",
        "measured, worker 0",
        "measured, worker 2",
    ]
    idle = [float(row[-1].removesuffix(" %")) for row in figure.table.rows[:2]]
    assert all(0.0 < share < 30.0 for share in idle)


def test_the_measured_step_is_the_median_of_one_worker_a_pipeline_rank() -> None:
    plan = synthetic.design(pipeline=2, shard=2).plan
    spans = [
        Span(name="forward", rank=rank, start=100.0 * step, seconds=seconds, stage=0, microbatch=0, step=step)
        for step, seconds in ((1, 3.0), (2, 1.0), (3, 2.0))
        for rank in range(4)
    ]
    partial = Span(name="forward", rank=0, start=900.0, seconds=2.5, step=9)
    chosen = measured_step(plan, [*spans, partial])
    assert {(span.rank, span.step) for span in chosen} == {(0, 3), (2, 3)}
    assert measured_step(plan, []) == ()


def test_without_a_pipeline_every_worker_has_a_row() -> None:
    design = synthetic.design(pipeline=1, shard=4)
    step = [replace(span, rank=worker, step=5) for worker in range(4) for span in synthetic.spans(design)]
    figure = timeline_figure(design.plan, predicted=(), measured=step)
    assert figure is not None
    assert [row[0] for row in figure.table.rows] == [f"measured, worker {rank}" for rank in range(4)]
    assert timeline_figure(design.plan, predicted=(), measured=()) is None


def test_a_timeline_of_very_many_spans_stays_small() -> None:
    design = synthetic.design(pipeline=4, shard=1, microbatches=1024)
    figure = timeline_figure(design.plan, predicted=synthetic.spans(design), measured=())
    assert figure is not None
    assert len(figure.body) < 80_000
    assert "Shown: the first" in figure.caption


def test_the_waterfall_begins_each_line_where_the_last_ended() -> None:
    figure = waterfall(PREDICTED, MEASURED)
    assert figure is not None
    starts = [float(match) for match in re.findall(r'x="([\d.]+)%"[^>]*><title>[^<]*, predicted', figure.body)]
    ends = [0.08, 0.248, 0.252, 0.283, 0.301]
    assert starts[1:6] == pytest.approx([100 * end / 0.347 for end in ends], abs=0.1)
    assert figure.table.rows[-1] == ("step", "307 ms", "347 ms", "+40.0 ms")
    assert ("input", "N/A", "1.00 ms", "N/A") in figure.table.rows


def test_the_waterfall_of_a_prediction_alone() -> None:
    figure = waterfall(PREDICTED, None)
    assert figure is not None
    assert figure.table.headers == ("line", "predicted")
    assert figure.table.rows[-1] == ("step", "307 ms")
    assert waterfall(None, None) is None


def test_memory_has_every_part_of_every_rank() -> None:
    figure = memory_figure(PREDICTED, MEASURED)
    assert figure is not None
    assert [row[0] for row in figure.table.rows] == [
        "rank 0, predicted",
        "rank 0, measured",
        "rank 1, predicted",
        "rank 1, measured",
    ]
    assert figure.table.headers[1:-2] == tuple(name for _, name in figure.legend)
    assert memory_figure(None, None) is None


def test_memory_of_many_ranks_shows_the_heaviest_and_lists_all() -> None:
    many = synthetic.report(synthetic.PREDICTED, origin=Origin.ANALYTIC, pipeline=6)
    stages = tuple(replace(many.memory[index % 6], rank=index) for index in range(20))
    figure = memory_figure(replace(many, memory=stages), None)
    assert figure is not None
    assert figure.body.count('class="bar"') == 8
    assert len(figure.table.rows) == 20
    assert "8 heaviest of 20" in figure.caption


def test_names_from_files_are_escaped() -> None:
    report = synthetic.report({"<b>odd</b>": 0.2}, origin=Origin.MEASURED)
    figure = waterfall(None, report)
    assert figure is not None
    assert "<b>" not in figure.body
    assert json.dumps(figure.table.rows)
