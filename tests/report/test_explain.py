from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright.report.explain import explain
from meshwright.report.run_files import read_run
from meshwright.spec.codec import encode
from meshwright.spec.report import LineName, MemoryPart, Origin
from meshwright.spec.units import format_bytes
from tests.report import synthetic


def test_the_headline_and_the_worst_line_carry_figures(run_dir: Path) -> None:
    found = explain(run_dir)
    assert found.headline == "The step took 347 ms, 13.0 % longer than the 307 ms predicted."
    assert "Most of the difference is gradient collectives: 21.0 ms more than 18.0 ms." in found.sentences
    assert any("inside the interval" in sentence for sentence in found.sentences)


def test_lines_are_worst_first_behind_the_step(run_dir: Path) -> None:
    rows = explain(run_dir).rows
    assert rows[0].name == LineName.STEP
    gaps = [abs(row.gap) for row in rows[1:] if row.gap is not None]
    assert gaps[0] == pytest.approx(0.021)
    assert gaps == sorted(gaps, reverse=True)
    assert sum(row.gap or row.measured or 0.0 for row in rows[1:]) == pytest.approx(rows[0].gap)


def test_a_line_that_was_not_predicted_has_no_gap(run_dir: Path) -> None:
    row = next(row for row in explain(run_dir).rows if row.name == LineName.INPUT)
    assert row.predicted is None
    assert row.gap is None
    assert any(line.startswith("input") and line.count("N/A") == 2 for line in explain(run_dir).lines())


def test_a_faster_run_says_less_and_outside_the_band(tmp_path: Path) -> None:
    found = explain(synthetic.write_run(tmp_path / "fast", slower=0.6))
    assert "less than the 307 ms predicted" in found.headline
    assert any("outside the interval" in sentence for sentence in found.sentences)
    assert any("backward: 64.8 ms less than 168 ms" in sentence for sentence in found.sentences)


def test_what_goes_the_other_way_is_told(run_dir: Path) -> None:
    lines = {**synthetic.MEASURED, LineName.BACKWARD: 0.120, LineName.GRADIENTS: 0.139}
    report = synthetic.report(lines, origin=Origin.MEASURED)
    (run_dir / "measured.json").write_text(json.dumps(encode(report)))
    sentences = explain(run_dir).sentences
    assert "Most of the difference is gradient collectives: 121 ms more than 18.0 ms." in sentences
    assert "The other way goes backward: 48.0 ms less than 168 ms." in sentences


def test_a_step_far_from_the_prediction_is_told_in_times(tmp_path: Path) -> None:
    found = explain(synthetic.write_run(tmp_path / "slow", slower=3.0))
    assert found.headline == "The step took 1.04 s, 3.39 times the 307 ms predicted."


def test_a_step_as_predicted_says_so(run_dir: Path) -> None:
    report = synthetic.report(synthetic.PREDICTED, origin=Origin.MEASURED)
    (run_dir / "measured.json").write_text(json.dumps(encode(report)))
    assert explain(run_dir).headline == "The step took 307 ms, as predicted (307 ms)."


def test_memory_is_compared_by_rank(run_dir: Path) -> None:
    memory = explain(run_dir).memory
    assert {row.rank for row in memory} == {0, 1}
    assert all(row.measured / row.predicted == pytest.approx(1.04) for row in memory)
    assert "(+4.0 %)" in memory[0].words


def test_a_run_without_measurement_tells_its_prediction(run_dir: Path) -> None:
    (run_dir / "measured.json").unlink()
    found = explain(run_dir)
    assert found.headline.startswith("A step takes 307 ms: 6,671 tokens/s, MFU N/A")
    assert found.sentences[-1] == "The run has not measured a step yet."
    (run_dir / "predicted.json").unlink()
    assert explain(run_dir).headline == "nothing is predicted or measured yet"


def test_a_plan_is_explained_by_its_prediction(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(synthetic.design().to_json())
    found = explain(path)
    assert found.headline.startswith("A step takes ")
    assert any(sentence.startswith("Bottleneck: ") for sentence in found.sentences)
    assert all(row.measured is None for row in found.rows)
    assert all(row.predicted for row in found.rows)
    seconds = [row.predicted or 0.0 for row in found.rows[1:]]
    assert seconds == sorted(seconds, reverse=True)
    assert not any("N/A" in line or "measured" in line for line in found.lines()[len(found.sentences) + 2 :])


def test_the_text_is_aligned_and_the_value_is_json(run_dir: Path) -> None:
    found = explain(run_dir)
    lines = found.lines()
    first, second = (index for index, line in enumerate(lines) if not line)
    ways, table = lines[first + 1 : second], lines[second + 1 :]
    assert len(ways) == len(found.ways) + 1
    assert len({len(line) for line in ways}) == len({len(line) for line in table}) == 1
    document = json.loads(json.dumps(encode(found)))
    assert document["rows"][1]["name"] == "gradient collectives"
    assert document["rows"][1]["words"] == "gradient collectives took 39.0 ms: 21.0 ms more than 18.0 ms"


def test_memory_says_whether_reserved_bytes_are_in_it(run_dir: Path) -> None:
    found = explain(run_dir)
    predicted = read_run(run_dir).predicted
    assert predicted is not None
    fullest = max(predicted.memory, key=lambda stage: stage.total)
    reserved = fullest.parts[MemoryPart.RESERVED]
    (sentence,) = (line for line in found.sentences if line.startswith("The predicted peak is "))
    assert sentence.startswith(f"The predicted peak is {format_bytes(fullest.total)} of ")
    allocated = f"{format_bytes(fullest.allocated)} that the run allocates"
    beside = f"{format_bytes(reserved)} that the context and libraries reserve on a device."
    assert sentence.endswith(f": {allocated} and {beside}")
    assert any(line.startswith("memory allocated, pipeline rank ") for line in found.lines())
