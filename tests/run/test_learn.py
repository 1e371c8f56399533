"""Runs teach the machines that they ran on: what they took is foretold afterwards, of other plans too."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import catalog, cost
from meshwright.cli import main
from meshwright.run.files import write_json
from meshwright.run.learn import Learnt, learn
from meshwright.run.measure_steps import probe_designs
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Design
from meshwright.spec.report import Origin

CLUSTER = catalog.local_cluster(cores=2, memory_bytes=16e9, devices=4)
DESIGNS = probe_designs(CLUSTER, ranks=2)


def slower(cluster: ClusterSpec) -> ClusterSpec:
    """Machines whose memory and whose host are half as fast."""
    group = cluster.groups[0]
    device = replace(group.device, memory_fraction=0.5 * group.device.memory_fraction, launch_seconds=2e-5)
    return replace(cluster, groups=(replace(group, device=device),))


def seconds(design: Design, cluster: ClusterSpec) -> float:
    return cost.predict(replace(design, cluster=cluster)).step_seconds


def run_of(design: Design, place: Path) -> Path:
    """The folder of a run of `design` that took what it takes on machines that are slower."""
    place.mkdir()
    write_json(place / "design.json", design)
    report = cost.predict(design)
    took = seconds(design, slower(design.cluster))
    write_json(place / "measured.json", replace(report, step=replace(report.step, seconds=took)))
    return place


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [run_of(design, folder / f"run{index}") for index, design in enumerate(DESIGNS[:2])]


@pytest.fixture(scope="module")
def learnt(runs: list[Path]) -> Learnt:
    return learn(runs)


@pytest.mark.slow
def test_what_ran_is_foretold_and_so_is_a_plan_that_did_not(learnt: Learnt) -> None:
    for lesson in learnt.lessons:
        assert abs(lesson.after / lesson.measured - 1.0) < 0.1 < abs(lesson.before / lesson.measured - 1.0)
    another = DESIGNS[3]
    truth = seconds(another, slower(CLUSTER))
    assert abs(seconds(another, learnt.cluster) / truth - 1.0) < 0.5 * abs(seconds(another, CLUSTER) / truth - 1.0)
    assert learnt.cluster.origin is Origin.CALIBRATED
    assert learnt.cluster.source.endswith("learnt from run0, run1")


def test_the_command_writes_a_cluster_that_plans_take(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One run says nothing of how far off others are: the error is that of data sheets until a second one was
    foretold."""
    out = tmp_path / "learnt.json"
    assert main(["cluster", "learn", str(runs[0]), "--out", str(out), "--quiet"]) == 0
    told = capsys.readouterr().out
    assert "a step; foretold" in told
    assert "moved: " in told
    measured, design = seconds(DESIGNS[0], slower(CLUSTER)), DESIGNS[0]
    written = catalog.load_cluster(str(out))
    assert written.step_error == pytest.approx(abs(math.log(seconds(design, CLUSTER) / measured)))
    assert seconds(design, written) == pytest.approx(measured, rel=0.1)


def test_what_teaches_nothing_is_refused(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a run directory"):
        learn([tmp_path])
    unmeasured = run_of(DESIGNS[0], tmp_path / "unmeasured")
    (unmeasured / "measured.json").unlink()
    with pytest.raises(ConfigError, match="no measured step"):
        learn([*runs, unmeasured])
    with pytest.raises(ConfigError, match="learn from runs on one kind of machine"):
        learn(runs, cluster=catalog.load_cluster("2x8xH100"))
    with pytest.raises(ConfigError, match="several kinds of machines"):
        learn(runs, cluster=catalog.load_cluster("8xH100+8xA100"))
    with pytest.raises(ConfigError, match="had 2 devices"):
        learn(runs, cluster=catalog.local_cluster(cores=2, memory_bytes=16e9, devices=1))
