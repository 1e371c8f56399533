"""Every key that a command prints as JSON is in the table of docs/commands.md, and no other is."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.links import Links
from meshwright.export import Line
from meshwright.lab.links import Pair
from meshwright.report.congestion import Congestion, Relief, TierUse
from meshwright.report.diagnosis import Diagnosis, RankUse
from meshwright.report.loss_gap import LossGap
from meshwright.report.meetings import Way
from meshwright.run.outcome import Outcome
from meshwright.spec.chaos import Chaos, Struck
from meshwright.spec.goodput import Goodput, Interruption
from meshwright.spec.incident import Incident

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = (ROOT / "docs" / "commands.md").read_text().partition("## What `--json` prints")[2].partition("## In Python")[0]
ROWS = [line.strip("| ").split(" | ") for line in TABLE.splitlines() if line.startswith("| ") and "`" in line]
DOCUMENTED = {label: re.findall(r"`([a-z_0-9]+)`", keys) for label, keys in ROWS}
PLAN = ["plan", "-m", "tiny", "-c", "2xH100", "--set", "batch_tokens=64Ki", "--top", "2"]
FEW = ("context=1", "pipeline=1", "chunks=1", "recompute=none")
FIXED = [word for column in FEW for word in ("--set", f"constraints.fix.{column}")]


def _printed(arguments: list[str], capsys: pytest.CaptureFixture[str], *, code: int = 0) -> Any:
    assert main([*arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def _same(label: str, found: Any) -> None:
    assert set(DOCUMENTED.pop(label)) == set(found), label


def test_every_key_that_is_printed_is_documented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    design, page = str(tmp_path / "plan.json"), str(tmp_path / "page.html")
    decision = _printed([*PLAN, *FIXED, "--out", design], capsys)
    asked = ["--why", "tp=2", "--headroom", "--sensitivity", "--sweep", "cluster.nodes=1,2"]
    explained = _printed([*PLAN, *FIXED, *asked], capsys)
    _same("`plan`", decision)
    _same("`plan`, with what explains it", explained)
    _same("each of `ranked` and `front`", decision["ranked"][0])
    _same("each of `rejected`", decision["rejected"][0])
    _same("a report", decision["report"])
    for name in ("waterfall", "headroom", "sensitivity", "sweep"):
        _same(f"`{name}`", explained[name])
    _same("each of `why_not`", explained["why_not"][0])
    _same("`launch`", _printed(["launch", design, "--on", "slurm"], capsys))
    _same("`explain`", _printed(["explain", design], capsys))
    _same("`compare`", _printed(["compare", design, design], capsys))
    exported = _printed(["export", design, "--to", "deepspeed"], capsys)
    _same("`export`", exported)
    _same("each line of `export`, and of `export --check`", exported["lines"][0])
    assert {field.name for field in fields(Line)} == set(exported["lines"][0])
    _same("`report`", _printed(["report", design, "--out", page], capsys))
    _same("each of `models` and `clusters`", _printed(["models"], capsys)[0])
    _same("`models NAME`", _printed(["models", "tiny"], capsys))
    _same("`clusters NAME`, `cluster detect`, `cluster measure`", _printed(["clusters", "8xH100"], capsys))
    simulated = _printed(["chaos", design, "--simulate", "--days", "1", "--spares", "1"], capsys)
    _same("`chaos --simulate`", simulated)
    _same("`advice`", simulated["advice"])
    _same("each of `spares` and `intervals`", simulated["advice"]["intervals"][0])
    _same("`chaos`", ["sound", *(field.name for field in fields(Chaos))])
    _same("each of `struck`", [field.name for field in fields(Struck)])
    scores = _printed(["validate", str(ROOT / "examples" / "published.csv")], capsys)
    _same("`validate`", scores)
    _same("`overall`, and each of `sources`", scores["overall"])
    _same("each of `regimes`", next(iter(scores["regimes"].values())))
    _same("`version`", _printed(["version"], capsys))
    error = _printed(["models", "tny"], capsys, code=2)
    _same("an error of any command", [*error, *error["error"]])
    _same("`train`", [field.name for field in fields(Outcome)])
    _same("a `loss_gap`, null where none is known", [field.name for field in fields(LossGap)])
    _same("each of `ways` to meet", [field.name for field in fields(Way)])
    _same("`goodput`", [field.name for field in fields(Goodput)])
    _same("each of `interruptions`", [field.name for field in fields(Interruption)])
    _keys_of_a_diagnosis()
    _keys_of_links()
    _keys_of_commands_with_torch()
    assert not DOCUMENTED, "a row of the table is of nothing that is printed"


def _keys_of_a_diagnosis() -> None:
    _same("`diagnose`", ["healthy", *(field.name for field in fields(Diagnosis))])
    _same("each of `incidents`", [field.name for field in fields(Incident)])
    _same("each of `ranks` of `diagnose`", [field.name for field in fields(RankUse)])
    _same("`traffic`", [field.name for field in fields(Congestion)])
    _same("each of `tiers`", [field.name for field in fields(TierUse)])
    _same("`relief`", [field.name for field in fields(Relief)])


def _keys_of_links() -> None:
    pair = Pair(first=0, second=1, bandwidth=1.0, latency_seconds=0.0)
    told: dict[str, Any] = dict(Links(hosts=("a", "b"), pairs=(pair,), islands=((0, 1),), asked=None).document())
    _same("`cluster measure --across`", [*told, "cluster"])
    _same("each of `pairs`", told["pairs"][0])


def _keys_of_commands_with_torch() -> None:
    """Of a command that starts processes: the keys as its source writes them."""
    source = {name: (ROOT / "src" / "meshwright" / "cli" / f"{name}.py").read_text() for name in ("generate", "doctor")}
    document = source["generate"].partition("if as_json:")[2].partition("else:")[0]
    _same("`generate`", re.findall(r'"([a-z_]+)":', document))
    _same("`doctor`", re.findall(r'"([a-z_]+)":', source["doctor"].partition("if as_json:")[2].partition("else:")[0]))
    from meshwright.run.audit import Audit, Passes, Stored
    from meshwright.run.doctor import Row
    from meshwright.run.launching.logs import Log
    from meshwright.run.learn import Learnt, Lesson

    _same("`cluster learn`", [field.name for field in fields(Learnt)])
    _same("each of `lessons`", [field.name for field in fields(Lesson)])
    _same("`audit`", ["read", *(field.name for field in fields(Audit))])
    _same("each of `passes`", [field.name for field in fields(Passes)])
    _same("each of `stored`", [field.name for field in fields(Stored)])
    _same("`logs`", ["run", "logs"])
    _same("each of `logs`", [field.name for field in fields(Log)])
    _same("each row of `doctor`", [field.name for field in fields(Row)])
