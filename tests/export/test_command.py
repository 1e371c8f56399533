"""`meshwright export` and `meshwright.export`: files, JSON, mistakes and exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import meshwright
from meshwright.cli import main
from meshwright.export import Peer, read
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import ScheduleKind, Sharding
from tests.export.plans import design


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    place = tmp_path / "plan.json"
    place.write_text(design(sharding=Sharding.GRADIENTS).to_json())
    return place


@pytest.mark.parametrize("peer", Peer)
def test_writes_a_file_that_is_read_back(plan: Path, peer: Peer, capsys: pytest.CaptureFixture[str]) -> None:
    out = plan.parent / "launch"
    assert main(["export", str(plan), "--to", peer.value, "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert "kept    shard" in told.out
    assert re.search(r"kept    stages +blocks 0 to \d+ on rank 0$", told.out, re.MULTILINE)
    assert "lost    document mask" in told.out
    assert "read back as the plan" in told.err
    assert read(out.read_text(), to=peer).shard == 8
    assert main(["export", str(plan), "--to", peer.value, "--check", str(out)]) == 0


def test_a_run_directory_will_do(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plan.parent / "design.json").write_text(plan.read_text())
    assert main(["export", str(plan.parent), "--to", "deepspeed"]) == 0
    assert "deepspeed --num_nodes 1" in capsys.readouterr().out


def test_one_json_document(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(plan), "--to", "torchtitan", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["to"] == "torchtitan"
    assert found["version"] == "torchtitan 0.2.2"
    assert {line["verdict"] for line in found["lines"]} == {"kept", "lost"}


def test_another_file_than_the_plan(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = plan.parent / "launch.sh"
    assert main(["export", str(plan), "--to", "megatron-lm", "--out", str(out)]) == 0
    out.write_text(out.read_text().replace("--micro-batch-size 1", "--micro-batch-size 2"))
    assert main(["export", str(plan), "--to", "megatron-lm", "--check", str(out)]) == 2
    told = capsys.readouterr()
    assert "differs microbatches" in told.out
    assert "not the plan of" in told.err


def test_what_cannot_be_said_exits_3_and_writes_nothing(plan: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.write_text(design(pipeline=2, shard=4, kind=ScheduleKind.GPIPE).to_json())
    out = plan.parent / "launch.sh"
    assert main(["export", str(plan), "--to", "megatron-lm", "--out", str(out)]) == 3
    assert "plan.schedule.kind: Megatron-LM cannot say the gpipe schedule; choose 1f1b" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["plan.json", "--to", "megatrom"], "did you mean megatron-lm"),
        (["nothing.json", "--to", "deepspeed"], "nothing.json"),
        (
            ["plan.json", "--to", "deepspeed", "--check", "plan.jsn"],
            "no such file; did you mean 'plan.json'?",
        ),
        (["plan.json", "--to", "deepspeed", "--check", "plan.json", "--out", "x"], "--check writes nothing"),
        (["plan.json"], "--to"),
    ],
)
def test_mistakes_are_told(
    plan: Path, words: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(plan.parent)
    assert main(["export", *words]) == 2
    assert what in capsys.readouterr().err


def test_in_python(plan: Path) -> None:
    assert meshwright.export(plan, to="megatron-lm").text.startswith("#!/usr/bin/env bash")
    assert meshwright.export(design(), to="megatron-lm").to is Peer.MEGATRON_LM


def test_a_plan_that_breaks_a_rule_is_refused() -> None:
    with pytest.raises(ConfigError, match="rule chunks-are-interleaved"):
        meshwright.export(design(pipeline=2, shard=4, kind=ScheduleKind.INTERLEAVED), to="megatron-lm")
