"""Logs gathered from where launches leave them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.run.files import write_json
from meshwright.run.launching.logs import logs
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Design
from tests.run.launching.made import on_processors


def wrote(path: Path, *lines: str, at: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))
    os.utime(path.parent.parent, (at, at))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = on_processors(tmp_path)
    turned = replace(made, plan=replace(made.plan, placement=(1, 0)))
    folder = tmp_path / "run"
    folder.mkdir()
    write_json(folder / "design.json", turned)
    wrote(folder / "logs/node-0/old_a/attempt_0/0/stderr.log", "of an older launch", at=1.0)
    wrote(folder / "logs/node-0/new_b/attempt_0/0/stderr.log", *(f"line {number}" for number in range(30)), at=2.0)
    wrote(folder / "logs/node-1/new_c/attempt_0/0/stdout.log", "first rank", at=2.0)
    wrote(folder / "logs/node-1/new_c/attempt_0/0/stderr.log", at=2.0)
    (folder / "logs/slurm-7.out").write_text("from the job\n")
    (folder / "logs/node-1-two.log").write_text("from the host\n")
    return folder


def test_the_newest_launch_of_every_node_is_shown_by_the_plan_s_ranks(run: Path) -> None:
    found = [(log.node, log.rank, log.stream, log.lines[-1]) for log in logs(run, tail=3)]
    assert found == [
        (1, None, "output", "from the host"),
        (None, None, "output", "from the job"),
        (1, 0, "stdout", "first rank"),
        (0, 1, "stderr", "line 29"),
    ]
    assert [log.lines for log in logs(run, rank=1, tail=2)] == [("line 28", "line 29")]
    with pytest.raises(ConfigError, match="there is no rank 2; ranks of this run are 0 to 1"):
        logs(run, rank=2)


def test_the_command_says_whose_each_line_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["logs", str(run), "--lines", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "node 1 | from the host",
        "slurm-7.out | from the job",
        "rank 0 stdout | first rank",
        "rank 1 stderr | line 29",
    ]


def test_a_run_of_one_machine_keeps_its_launches_without_nodes(tmp_path: Path) -> None:
    made: Design = on_processors(tmp_path)
    write_json(tmp_path / "design.json", made)
    wrote(tmp_path / "logs/launch_a/attempt_0/1/stderr.log", "of rank 1", at=1.0)
    (group,) = made.cluster.groups
    one = replace(made.cluster, groups=(replace(group, num_nodes=1, devices_per_node=2),))
    write_json(tmp_path / "design.json", replace(made, cluster=one))
    assert [(log.rank, log.lines) for log in logs(tmp_path)] == [(1, ("of rank 1",))]
