"""`plan --why --headroom --sensitivity --sweep` and `compare` from end to end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import meshwright
from meshwright import catalog, search
from meshwright.cli import explanations, main
from meshwright.search import Decision
from meshwright.spec import codec

pytestmark = pytest.mark.usefixtures("searched_once")

NARROW = ("constraints.fix.context=1", "constraints.fix.recompute=none", "constraints.fix.pipeline=1")
SETS = ("sequence_length=2048", "batch_tokens=256Ki", *NARROW)
PLAN = ["plan", "--model", "llama-5m", "--cluster", "2x2xH100", *(part for text in SETS for part in ("--set", text))]
EVERYTHING = ["--why", "tp=4", "--why", "tp=3", "--headroom", "--sensitivity", "--sweep", "cluster.nodes=1,2"]


@pytest.mark.parametrize("columns", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_every_explanation_is_shown_within_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*PLAN, *EVERYTHING]) == 0
    text, _ = capsys.readouterr()
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "…" not in text
    for words in (
        "ideal compute at peak",
        "why not tensor 4: worse",
        "why not tensor 3: illegal",
        "tensor-shares-kv-heads",
        "what holds it back",
        "sensitivity of the step",
        "what if: cluster.nodes",
        "scaling",
    ):
        assert words in text, words


@pytest.mark.parametrize("keeps", ["nothing", "--json", "--html"])
def test_reasons_that_nobody_reads_are_not_looked_for(
    keeps: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whys = []

    def spied(*arguments: object, explained: bool, **options: object) -> Decision:
        whys.append(explained)
        return search.decide.design(*arguments, explained=explained, **options)

    monkeypatch.setattr(search, "design", spied)
    kept = {"nothing": [], "--json": ["--json"], "--html": ["--html", str(tmp_path / "plan.html")]}[keeps]
    assert main([*PLAN, "--why", "tp=3", *kept]) == 0
    assert whys == [keeps != "nothing"]
    assert ("--json" in kept) is capsys.readouterr().out.startswith("{")


def test_explanations_are_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, *EVERYTHING, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["decision", "waterfall", "why_not", "headroom", "sensitivity", "sweep"]
    decision = codec.decode(Decision, document["decision"])
    seconds = sum(bar["seconds"] for bar in document["waterfall"]["bars"])
    assert seconds == pytest.approx(decision.report.step_seconds)
    assert [answer["verdict"] for answer in document["why_not"]] == ["worse", "illegal"]
    assert len(document["sweep"]["points"]) == 2
    assert document["sensitivity"]["step_seconds"] == decision.report.step_seconds


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (["--why", "tenser=2"], "did you mean 'tensor'?"),
        (["--why", "tp"], "write settings as tp=4,pp=2"),
        (["--sweep", "cluster.intre.bandwidth=1,2"], "did you mean cluster.inter.bandwidth or cluster.intra.bandwidth"),
        (["--sweep", "cluster.nodes=1..8"], "the range has no steps"),
    ],
)
def test_bad_questions_are_exit_code_2_before_the_search(
    asked: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.search.design", None)
    assert main([*PLAN, *asked]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_compare_prints_a_verdict_and_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    assert main([*PLAN, "--out", paths[0]]) == 0
    assert main([*PLAN, "--set", "constraints.fix.tensor=4", "--out", paths[1]]) == 0
    capsys.readouterr()
    assert main(["compare", *paths]) == 0
    text = " ".join(capsys.readouterr().out.split())
    found = meshwright.compare(*paths)
    assert found.verdict in text
    assert "tensor collectives" in text
    assert main(["compare", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(codec.encode(found)))
    assert main(["compare", paths[0], str(tmp_path / "c.json")]) == 2
    assert "no such run or plan" in capsys.readouterr().err


@pytest.mark.slow
def test_the_same_answers_come_from_python() -> None:
    narrow = meshwright.Constraints(fix={"context": 1, "recompute": "none", "pipeline": 1})
    job = meshwright.JobSpec(batch_tokens=2**18, constraints=narrow)
    answer = meshwright.why_not("llama-3.1-8b", "16xH100", job, settings="tp=3")
    assert answer.verdict.value == "illegal"
    assert meshwright.headroom("llama-3.1-8b", "16xH100", job).limits
    assert len(meshwright.sensitivity("llama-3.1-8b", "16xH100", job).effects) == 6
    points = meshwright.sweep("llama-3.1-8b", "16xH100", job, over="cluster.nodes=1,2").points
    assert [point.devices for point in points] == [8, 16]


def test_progress_says_what_is_counted_of_how_many_and_what_comes_now(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("meshwright.report.terminal_validation._SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr("meshwright.cli.output.note", lines.append)
    question = search.Question(
        model=catalog.load_model("tiny"),
        cluster=catalog.load_cluster("2xH100"),
        job=catalog.load_job(None, sets=["batch_tokens=16Ki", *NARROW]),
    )
    decision = search.design(question.model, question.cluster, question.job, top=1)
    explanations.answers(explanations.Asked(headroom=True, sweep=["cluster.nodes=1,2"]), question, decision)
    assert (
        "1 of 7 limits lifted, each time designing the job again; now: with twice the bandwidth between nodes" in lines
    )
    assert "1 of 2 points of the sweep designed; now: 2" in lines


def test_long_work_is_told_while_it_goes_on_unless_quiet_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("meshwright.cli.waiting.SECONDS_BETWEEN_LINES", 0.01)
    asked = ["plan", "-m", "tiny", "-c", "2xH100", "--top", "1", "--why", "tp=2", "--set", "batch_tokens=24Ki"]
    asked += [word for entry in NARROW for word in ("--set", entry)]
    assert main(asked) == 0
    told = capsys.readouterr().err
    assert re.search(r"plans of tiny on 2xH100 searched: \d+ s so far", told)
    assert re.search(r"plans with tensor 2 searched: \d+ s so far", told)
    assert main([*asked, "--quiet"]) == 0
    assert "so far" not in capsys.readouterr().err
