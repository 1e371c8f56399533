from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.report.run_files import predicted_spans, read_run, write_file
from meshwright.spec.codec import encode
from meshwright.spec.errors import ConfigError
from tests.report import synthetic


def test_everything_a_run_wrote_is_read(run_dir: Path) -> None:
    files = read_run(run_dir)
    assert files.name == "novels"
    assert not files.is_plan
    assert files.design == synthetic.design()
    assert len(files.steps) == 200
    assert [row["step"] for row in files.evaluations] == [40, 80, 120, 160, 200]
    assert files.predicted is not None
    assert files.measured is not None
    assert files.predicted.step_seconds == pytest.approx(0.307)
    assert files.measured.step_seconds == pytest.approx(0.347)
    assert {span.rank for span in files.spans} == {0, 1, 2, 3}
    assert files.sample is not None
    assert files.environment is not None


def test_a_run_that_only_began_is_read(run_dir: Path) -> None:
    for name in ("measured.json", "decision.json", "environment.json", "metrics.jsonl", "sample.txt"):
        (run_dir / name).unlink()
    files = read_run(run_dir)
    assert files.measured is files.decision is files.environment is files.sample is None
    assert files.steps == files.evaluations == ()


def test_a_half_written_last_line_is_left_out(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 201, "loss": 3.')
    span_file = run_dir / "spans" / "rank-00000.jsonl"
    before = len(read_run(run_dir).spans)
    span_file.write_text(span_file.read_text() + '{"name": "forw')
    files = read_run(run_dir)
    assert len(files.steps) == 200
    assert len(files.spans) == before


def test_a_list_in_place_of_a_table_is_refused(run_dir: Path) -> None:
    (run_dir / "environment.json").write_text('["torch"]')
    with pytest.raises(ConfigError, match=r"environment\.json: expected a table of keys"):
        read_run(run_dir)


def test_a_broken_line_in_the_middle_is_said(run_dir: Path) -> None:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    metrics.write_text("\n".join([*lines[:3], '{"step": 4, "lo', *lines[4:]]))
    with pytest.raises(ConfigError, match=r"metrics\.jsonl:4: not JSON"):
        read_run(run_dir)


@pytest.mark.parametrize(
    ("name", "told"),
    [("design.json", r"design\.json:1: not JSON: .* at column 2"), ("predicted.json", "cannot be read as JSON")],
)
def test_a_document_of_another_form_is_said(run_dir: Path, name: str, told: str) -> None:
    (run_dir / name).write_text('{"unknown": 1}')
    with pytest.raises(ConfigError, match=name):
        read_run(run_dir)
    (run_dir / name).write_text("{not json")
    with pytest.raises(ConfigError, match=told):
        read_run(run_dir)


@pytest.mark.parametrize("broken", [{"seconds": 1e308}, {"start": float("inf")}, {"name": 3}])
def test_a_span_that_no_clock_has_is_refused(run_dir: Path, broken: dict[str, object]) -> None:
    path = next((run_dir / "spans").glob("rank-*.jsonl"))
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(first), **broken}), *rest]) + "\n")
    with pytest.raises(ConfigError, match="not a span"):
        read_run(run_dir)


def test_an_unknown_run_is_told_with_the_nearest_names(run_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(run_dir.parent / "novel")
    assert str(run_dir) in caught.value.problems[0].fix
    with pytest.raises(ConfigError, match="does not exist either"):
        read_run(run_dir.parent / "nowhere" / "run")
    with pytest.raises(ConfigError, match="novels"):
        read_run(run_dir.parent / "zzz")


def test_a_folder_of_runs_names_them(run_dir: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(run_dir.parent)
    assert str(run_dir) in caught.value.problems[0].fix
    with pytest.raises(ConfigError, match="not a run directory"):
        read_run(run_dir / "spans")


def test_a_plan_file_is_predicted_now(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(synthetic.design().to_json())
    files = read_run(path)
    assert files.is_plan
    assert files.predicted is not None
    assert files.predicted.step_seconds > 0
    assert {span.rank for span in predicted_spans(files)} == {0, 1}


def test_a_decision_written_as_json_is_a_plan_file(tmp_path: Path) -> None:
    design = synthetic.design()
    path = tmp_path / "decision.json"
    path.write_text(json.dumps(encode(synthetic.decision(design))))
    files = read_run(path)
    assert files.design == design
    assert files.decision is not None
    assert files.decision.considered == 4321


def test_a_bare_plan_says_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(encode(synthetic.design().plan)))
    with pytest.raises(ConfigError, match="without its model, cluster and job"):
        read_run(path)


def test_a_plan_that_no_rule_allows_is_refused_by_its_rule(tmp_path: Path) -> None:
    path, design = tmp_path / "plan.json", synthetic.design()
    path.write_text(replace(design, plan=replace(design.plan, stages=design.plan.stages[:1])).to_json())
    with pytest.raises(ConfigError, match="rule stages-"):
        read_run(path)
    path.write_text(replace(design, plan=replace(design.plan, stages=())).to_json())
    with pytest.raises(ConfigError, match=r"plan\.stages: is empty"):
        read_run(path)


def test_half_of_a_character_is_written_as_a_question_mark(tmp_path: Path) -> None:
    """JSON may hold a surrogate without the other one, and a file's name a byte that is no UTF-8."""
    page = write_file(tmp_path / "page.html", "a\ud800b", fix="")
    assert page.read_text(encoding="utf-8") == "a?b"
