from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.report.run_files import read_run
from meshwright.report.trace import MEASURED, PREDICTED, trace, write_trace
from tests.report import synthetic


def test_predicted_and_measured_are_two_processes_from_zero(run_dir: Path) -> None:
    files = read_run(run_dir)
    document = trace(files, predicted=synthetic.spans(files.design))
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    for process, number in ((PREDICTED, 36), (MEASURED, len(files.spans))):
        mine = [event for event in spans if event["pid"] == process]
        assert len(mine) == number
        assert min(event["ts"] for event in mine) == 0.0
    names = {event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    assert {"pipeline rank 0", "pipeline rank 1", "worker 0", "worker 3"} <= names


def test_a_span_keeps_its_times_and_numbers(run_dir: Path) -> None:
    files = read_run(run_dir)
    spans = synthetic.spans(files.design)
    document = trace(files, predicted=spans)
    first = next(event for event in document["traceEvents"] if event["ph"] == "X")
    assert first["name"] == "forward 0"
    assert first["cat"] == "forward"
    assert first["dur"] == pytest.approx(10_000.0)
    assert first["args"] == {"stage": 0, "microbatch": 0}


def test_the_file_is_json_and_small_numbers_stay(run_dir: Path, tmp_path: Path) -> None:
    out = write_trace(run_dir, tmp_path / "deep" / "trace.json")
    document = json.loads(out.read_text())
    assert document["otherData"]["run"] == "novels"
    assert all(event["dur"] >= 0 for event in document["traceEvents"] if event["ph"] == "X")


def test_a_plan_has_only_its_prediction(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(synthetic.design().to_json())
    document = json.loads(write_trace(path, tmp_path / "trace.json").read_text())
    assert {event["pid"] for event in document["traceEvents"]} == {PREDICTED}
