"""Sixty columns: nothing is wider and no word is broken, in whatever a command shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from meshwright import replay, search
from meshwright.cli import main
from meshwright.cli.output import LEAST_COLUMNS
from meshwright.report import terminal, terminal_validation
from meshwright.search import Decision
from tests.search import search_samples as samples

NARROW, WIDE = 60, 400
ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def decision() -> Decision:
    return search.design(samples.model(), samples.cluster(), samples.job(), top=4)


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"\S+", text) if not set(word) & set("─█")}


def _shown(view: RenderableType, width: int) -> str:
    console = Console(width=width, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(view)
    return captured.get()


def _unbroken(narrow: str, wide: str) -> None:
    assert max(map(len, narrow.splitlines())) <= NARROW
    assert "…" not in narrow
    assert _words(narrow) - _words(wide) <= {"-", "time:", "MFU"}, "a word is broken"


def test_a_decision(decision: Decision) -> None:
    view = terminal.decision(decision)
    narrow = _shown(view, NARROW)
    _unbroken(re.sub(r"(?m)^ - [^:]+:", " -", narrow), _shown(view, WIDE))
    bars = [line for line in narrow.splitlines() if "█" in line]
    assert all(re.search(r"\d %\s+█", line) for line in bars), "a bar stands beside its share"


def test_the_ranked_plans_at_forty_columns(decision: Decision) -> None:
    """All figures stand below each other, each beside its name's line in the head, and no word is broken."""
    narrow = _shown(terminal.ranked(decision.ranked, width=40), 40)
    assert max(map(len, narrow.splitlines())) <= 40
    assert _words(narrow) <= _words(_shown(terminal.ranked(decision.ranked, width=WIDE), WIDE)) | {
        "ranked",
        "by",
        "GiB",
    }
    assert len(narrow.splitlines()) >= 10 * len(decision.ranked)


@pytest.mark.parametrize(
    "command", ["explain", "compare", "models", "models llama-3.1-8b", "clusters", "clusters 8xH100"]
)
def test_a_command(
    command: str,
    decision: Decision,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "plan.json").write_text(decision.design.to_json())
    plans = {"explain": 1, "compare": 2}.get(command, 0)
    said = []
    for width in (NARROW, WIDE):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main([*command.split(), *[str(tmp_path / "plan.json")] * plans]) == 0
        said.append(capsys.readouterr().out.replace(str(tmp_path), ""))
    _unbroken(*said)


@pytest.mark.parametrize("columns", ["1", "7"])
def test_no_line_is_too_narrow_for_words(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "llama-2m" in shown
    assert max(map(len, shown.splitlines())) == LEAST_COLUMNS


def test_scores_of_published_runs() -> None:
    view = terminal_validation.validation(replay.validate(ROOT / "examples" / "published.csv"))
    narrow = _shown(view, NARROW)
    assert max(map(len, narrow.splitlines())) <= NARROW
    assert "…" not in narrow
    assert "one factor" in narrow
    assert "regret@3" in narrow
