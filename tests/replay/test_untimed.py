"""Runs that are predicted and compared with no time are spoken of."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from meshwright.cli import main
from tests.replay.test_validate import ROW


def test_runs_that_tell_no_seconds_of_a_step_are_spoken_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    with file.open("w", newline="") as opened:
        table = csv.DictWriter(opened, [*ROW, "tflops_gpu"])
        table.writeheader()
        table.writerows([ROW, {**ROW, "id": "row-2", "iter_s": "", "tflops_gpu": "100"}])
    assert main(["validate", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "predicted runs without seconds of a step: 1 (1 with FLOP/s and no flop_conv that is known)" in told
