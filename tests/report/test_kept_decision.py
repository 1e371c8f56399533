"""A decision beside its plan, edited by hand: told with the place, never shown half and never a traceback."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from meshwright import catalog, search
from meshwright.cli import main
from meshwright.report import decision_page, write_page
from meshwright.search import Decision
from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec

EVIL = "\"'></script><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(scope="module")
def decision() -> Decision:
    job = catalog.load_job(None, sets=["batch_tokens=64Ki", "constraints.fix.pipeline=2"])
    return search.design(catalog.load_model("tiny"), catalog.load_cluster("8xA100-80GB"), job, top=2)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("ranked", [], "ranked: is empty"),
        ("ranked", 3, "ranked: expected a list"),
        ("ranked.0", {}, "ranked[0]: 'plan' is missing"),
        ("ranked.0.plan.stages", [], "plan.stages: is empty"),
        ("ranked.1.plan.axes.0.size", 10**9, "more than the 8 devices of the cluster"),
        ("ranked.1.plan.stages.0.groups.0.stop", 2, "rule stages-cover"),
        ("ranked.0.step_seconds", float("nan"), "expected a number, got nan"),
        ("why", 3, "why: expected a list, got 3"),
        ("rejected", [{"rule": "x"}], "'example' is missing"),
        ("considered", "many", "'many' is not a number"),
        ("design.model.layers", [], "model.layers: is empty"),
        ("design.schema", 99, "design.schema: schema 99 is not known"),
        ("design.plan.schema", 99, "design.plan.schema: schema 99 is not known"),
        ("ranked.1.plan.schema", 99, "ranked[1].plan.schema: schema 99 is not known"),
        ("schema", 99, "schema: schema 99 is newer"),
        ("front.0.peak_bytes", float("inf"), "front[0].peak_bytes: expected a number, got inf"),
        ("report.model_flops", float("nan"), "report.model_flops: expected a number, got nan"),
        ("report", [], "report: expected a table, got []"),
        ("settled", 3, "settled: expected true or false, got 3"),
        ("priced", -1, "priced: -1 is below 0"),
        ("unheard", 1, "unheard: unknown key"),
        ("design.plan.stages.0.groups.0.precision", "fp8", "fp8 is not the job's bf16 (rule precision-is-asked)"),
        ("design.job.precision", "fp8", "design.job.precision: A100-80GB has no fp8 arithmetic"),
    ],
)
def test_what_no_decision_has_is_told(
    path: str, value: Any, told: str, decision: Decision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = copy.deepcopy(codec.encode(decision))
    table: Any = document
    *keys, last = path.split(".")
    for key in keys:
        table = table[int(key)] if isinstance(table, list) else table[key]
    table[int(last) if isinstance(table, list) else last] = value
    plan = tmp_path / "plan.json"
    plan.write_text(decision.design.to_json())
    search.decision_path(plan).write_text(json.dumps(document))
    if path in ALL_WAYS:
        _all_refuse(plan, tmp_path, told, capsys)
    else:
        _refuse(["explain", str(plan)], plan, told, capsys)


# Of a list, a plan and a figure: whichever command reads them, it is by one reader.
ALL_WAYS = ("ranked", "ranked.1.plan.stages.0.groups.0.stop", "report.model_flops")


def _all_refuse(plan: Path, folder: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command that reads the decision beside `plan`, or the decision itself, says the same of it."""
    kept, page = search.decision_path(plan), folder / "page.html"
    for arguments in (
        ["report", str(plan), "--out", str(page)],
        ["explain", str(plan)],
        ["compare", str(plan), str(plan)],
        ["train", str(plan), "--run", str(folder / "run")],
        ["report", str(kept), "--out", str(page)],
        ["explain", str(kept)],
        ["compare", str(kept), str(kept)],
    ):
        _refuse(arguments, plan, told, capsys)
    assert not page.exists()


def _refuse(arguments: list[str], plan: Path, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2, arguments
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err, arguments
    assert f"error: {search.decision_path(plan)}" in err
    assert all("; " in line for line in err.splitlines()), f"each says what to do: {err}"
    assert "Traceback" not in err


@pytest.mark.parametrize("key", ["design", "report", "ranked", "why", "considered", "priced", "fitting", "seconds"])
def test_a_key_that_is_missing_is_told(
    key: str, decision: Decision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = codec.encode(decision)
    del document[key]
    (plan := tmp_path / "plan.json").write_text(decision.design.to_json())
    search.decision_path(plan).write_text(json.dumps(document))
    _refuse(["explain", str(plan)], plan, f"{key!r} is missing", capsys)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "the file is empty"),
        ("[]", "expected a table of keys, got a list"),
        ("[1, 2]", "expected a table of keys, got a list"),
        ("{}", "'design' is missing"),
        ("null", "expected a table of keys, got null"),
        ("3", "expected a table of keys, got a number"),
        ('{"design": {"model": ', "not JSON"),
    ],
)
def test_what_is_no_decision_is_told(
    text: str, told: str, decision: Decision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan := tmp_path / "plan.json").write_text(decision.design.to_json())
    search.decision_path(plan).write_text(text)
    for arguments in (["report", str(plan)], ["explain", str(plan)], ["train", str(plan)]):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, told in err) == ("", True)
        assert "or delete this file" in err


def test_a_decision_is_no_design_and_is_told_in_one_line(
    decision: Decision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (plan := tmp_path / "plan.json").write_text(decision.design.to_json())
    kept = search.decision_path(plan)
    kept.write_text(json.dumps(codec.encode(decision)))
    for arguments in (["train", str(kept)], ["export", str(kept), "--to", "deepspeed"]):
        assert main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == (
            f"error: {kept}: is a kept decision, not a design (plan --out writes it beside the design); "
            f"give {plan}, the design beside it; meshwright explain {kept} reads it"
        )
    plan.unlink()
    assert main(["train", str(kept)]) == 2
    assert f"); meshwright explain {kept} reads it" in capsys.readouterr().err


def test_a_decision_with_explanations_is_read_too(
    decision: Decision, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"decision": codec.encode(decision), "waterfall": {}}
    (tmp_path / "both.json").write_text(json.dumps(both, indent=1))
    (tmp_path / "plan.json").write_text(decision.design.to_json())
    assert main(["compare", str(tmp_path / "both.json"), str(tmp_path / "plan.json")]) == 0
    assert "the two plans are the same" in capsys.readouterr().out
    both["decision"]["seconds"] = -1.0
    (tmp_path / "both.json").write_text(json.dumps(both, indent=1))
    assert main(["explain", str(tmp_path / "both.json")]) == 2
    line = [row for row, text in enumerate(json.dumps(both, indent=1).splitlines(), 1) if '"seconds": -1.0' in text]
    assert f"both.json:{line[-1]} decision.seconds: -1.0 is below 0" in capsys.readouterr().err


class _Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def _renamed(cluster: ClusterSpec) -> ClusterSpec:
    groups = tuple(
        replace(group, name=EVIL, site=EVIL, device=replace(group.device, name=EVIL)) for group in cluster.groups
    )
    return replace(cluster, name=EVIL, groups=groups, source=EVIL)


def test_no_name_becomes_a_tag_in_any_page(decision: Decision, tmp_path: Path) -> None:
    plain = decision.design
    design = replace(
        plain,
        model=replace(plain.model, name=EVIL, source=EVIL),
        cluster=_renamed(plain.cluster),
        job=replace(plain.job, name=EVIL),
        plan=replace(plain.plan, model=EVIL, cluster=EVIL),
    )
    ranked = tuple(replace(entry, plan=replace(entry.plan, model=EVIL, cluster=EVIL)) for entry in decision.ranked)
    (tmp_path / "plan.json").write_text(design.to_json())
    pages = {
        "decision": decision_page(replace(decision, design=design, ranked=ranked, why=(EVIL,))),
        "plan": write_page([tmp_path / "plan.json"], tmp_path / "plan.html").read_text(),
        "two": write_page([tmp_path / "plan.json"] * 2, tmp_path / "two.html").read_text(),
    }
    for name, text in pages.items():
        found = _Outline()
        found.feed(text)
        assert "img" not in found.tags, name
        assert not found.handlers, name
        assert found.tags.count("script") == (6 if name == "decision" else 1), name
        assert "<script>alert" not in text, name
