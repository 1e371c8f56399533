"""Trackers: what is on disk afterwards, and what is said of a name or package that is not there."""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path

import pytest

from meshwright.spec.errors import ConfigError, EnvironmentUnfit
from meshwright.train.observe import trackers


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def test_jsonl_is_always_there_one_object_a_line(tmp_path: Path) -> None:
    tracker = trackers.build((), run_dir=tmp_path)
    tracker.start({}, step=0)
    tracker.log({"loss": 2.0, "mfu": None, "grad_norm": math.nan}, step=1)
    assert rows(tmp_path) == [{"step": 1, "loss": 2.0, "mfu": None, "grad_norm": None}]
    tracker.summarise({"validation_loss": 1.5})
    tracker.attach(tmp_path / "design.json")
    tracker.finish()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"validation_loss": 1.5, "files": ["design.json"]}


def test_going_on_drops_the_lines_of_a_lost_past_and_a_torn_one(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step}) for step in range(1, 6)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 6, "lo')
    tracker = trackers.build((), run_dir=tmp_path)
    tracker.start({}, step=3)
    tracker.log({}, step=4)
    tracker.finish()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_metrics_are_whole_again_where_their_folder_was_deleted_and_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    tracker = trackers.build((), run_dir=run)
    tracker.start({}, step=0)
    tracker.log({}, step=1)
    shutil.rmtree(run)
    tracker.log({}, step=2)
    run.mkdir()
    tracker.log({}, step=3)
    assert [row["step"] for row in rows(run)] == [1, 2, 3]
    shutil.rmtree(run)
    run.mkdir()
    tracker.finish()
    assert [row["step"] for row in rows(run)] == [1, 2, 3]


def test_tensorboard_keeps_scalars(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = trackers.build(("tensorboard",), run_dir=tmp_path)
    tracker.start({"model": "tiny"}, step=0)
    for step in (1, 2):
        tracker.log({"loss": 4.0 / step, "mfu": None}, step=step)
    tracker.summarise({"loss": 2.0})
    tracker.finish()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 4.0), (2, 2.0)]
    assert "mfu" not in events.Tags()["scalars"]


def test_every_unknown_tracker_is_named_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        trackers.build(("tensorbord", "mlflow"), run_dir=tmp_path)
    assert len(caught.value.problems) == 2
    assert "did you mean 'tensorboard'?" in str(caught.value)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(EnvironmentUnfit, match=r"pip install 'meshwright\[track\]'"):
        trackers.build(("wandb",), run_dir=tmp_path)
