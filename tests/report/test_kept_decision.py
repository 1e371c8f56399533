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
    return search.design(catalog.load_model("gpt3-1.3b"), catalog.load_cluster("8xA100-80GB"), job, top=2)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("ranked", [], "ranked: is empty"),
        ("ranked", 3, "ranked: expected a list"),
        ("ranked.0", {}, "ranked[0]: expected a plan and its figures"),
        ("ranked.0.plan.stages", [], "plan.stages: is empty"),
        ("ranked.1.plan.axes.0.size", 10**9, "more than the 8 devices of the cluster"),
        ("ranked.1.plan.stages.0.groups.0.stop", 3, "rule stages-cover"),
        ("ranked.0.step_seconds", float("nan"), "expected a number, got nan"),
        ("why", 3, "why: expected a list, got 3"),
        ("rejected", [{"rule": "x"}], "'example' is missing"),
        ("considered", "many", "'many' is not a number"),
        ("design.model.layers", [], "model.layers: is empty"),
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
    assert main(["report", str(plan), "--out", str(tmp_path / "page.html")]) == 2
    err = capsys.readouterr().err
    assert told in err
    assert "Traceback" not in err
    assert not (tmp_path / "page.html").exists()


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
