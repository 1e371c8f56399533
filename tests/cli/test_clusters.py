"""`meshwright clusters` and `cluster learn` as they are printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright import catalog
from meshwright.cli import cluster, main
from meshwright.run.learn import Learnt, Lesson


def test_a_latency_that_a_file_does_not_say_is_not_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('name = "ours"\n[[groups]]\ndevice = "A100-40GB-PCIe"\nnic.bandwidth = "25Gbit/s"\n')
    assert main(["clusters", str(file)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the cluster file; latency: " in told
    file.write_text(file.read_text() + 'nic.latency_seconds = "20us"\n')
    assert main(["clusters", str(file)]) == 0
    assert "the cluster file; latency: " not in " ".join(capsys.readouterr().out.split())


def test_one_run_alone_is_not_foretold_by_others() -> None:
    lesson = Lesson(run="first", measured=2.0, before=0.3, after=1.9)
    learnt = Learnt(cluster=catalog.load_cluster("8xH100"), lessons=(lesson,), moved=(), step_error=0.3)
    said = "one run alone tells nothing of others: plans for these machines have intervals of 35.0 %, as before"
    assert list(cluster._learnt(learnt))[-1] == said
    two = Learnt(cluster=learnt.cluster, lessons=(lesson, lesson), moved=(), step_error=0.3)
    assert "a run that the others foretell is missed by 35.0 %, and" in list(cluster._learnt(two))[-1]
