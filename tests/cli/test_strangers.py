"""Texts of strangers' files are shown and not obeyed: on terminals, in tables, pages and predictions."""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest

from meshwright import replay
from meshwright.cli import main
from meshwright.cli.spelt import SpeltConsole
from meshwright.report import terminal_parts
from meshwright.report.page import decision_page, render
from meshwright.report.run_files import read_run
from tests.report import synthetic

STRANGE = "ev\x1b[2Kil\x07 \u202etxt [red]x[/red] :smile:"
TOLD = "ev\\x1b[2Kil\\x07 \\u202etxt [red]x[/red] :smile:"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]")
ROOT = Path(__file__).resolve().parent.parent.parent


def _shown(width: int, *cells: str) -> str:
    console = SpeltConsole(width=width, color_system=None, highlight=False, file=StringIO())
    rows = terminal_parts.table(columns=[("na\x1bme", "left"), ("n", "right")])
    rows.add_row(*cells)
    console.print(rows)
    console.print(terminal_parts.title(cells[0]), *terminal_parts.bullets([cells[0]]))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [24, 40, 120])
def test_a_table_shows_all_of_a_strange_name_in_its_width(width: int) -> None:
    shown = _shown(width, STRANGE, "12")
    assert not RAW.search(shown)
    assert max(map(len, shown.splitlines())) <= width
    cell = "".join(line[: width - 2] for line in shown.splitlines()[2:]).replace(" ", "")
    assert TOLD.replace(" ", "") in re.sub(r"12", "", cell, count=1)
    assert "na\\x1bme" in shown


def test_a_cell_cuts_words_without_end() -> None:
    shown = _shown(80, "x" * 10_000, "3")
    assert 200 <= shown.partition("\n\n")[0].count("x") < 210
    assert "..." in shown


def test_predictions_hold_no_controls_and_no_formulas_and_name_their_lines(tmp_path: Path) -> None:
    source = (ROOT / "examples" / "published.csv").read_text().splitlines()
    rows = list(csv.DictReader(source))[:3]
    rows[0]["id"], rows[1]["id"], rows[2]["source_id"] = STRANGE, "=cmd()", "@import"
    table, out = tmp_path / "table.csv", tmp_path / "out.csv"
    with table.open("w", newline="") as file:
        written = csv.DictWriter(file, fieldnames=list(rows[0]))
        written.writeheader()
        written.writerows(rows)
    assert main(["validate", str(table), "--predictions", str(out), "--json"]) == 0
    assert not RAW.search(out.read_text().replace("\r\n", "\n"))
    found = list(csv.DictReader(out.open()))
    assert [each["line"] for each in found] == ["2", "3", "4"]
    assert (found[0]["id"], found[1]["id"], found[2]["source_id"]) == (TOLD, "'=cmd()", "'@import")
    assert found[1]["source_id"] == rows[1]["source_id"]
    assert all(float(each["predicted_seconds"]) > 0.0 for each in found)
    assert replay.read_runs(table)[0].id == STRANGE


def test_pages_hold_no_controls_and_escape_the_rest(tmp_path: Path) -> None:
    files = read_run(synthetic.write_run(tmp_path / "novels"))
    model = replace(files.design.model, name=f"<b>{STRANGE}")
    page = render([replace(files, name=f"<i>{STRANGE}", design=replace(files.design, model=model))])
    decision = synthetic.decision(synthetic.design())
    strange = replace(decision, design=replace(decision.design, model=replace(decision.design.model, name=STRANGE)))
    for text in (page, decision_page(strange)):
        assert not RAW.search(text)
        assert "\\u001b" not in text
        assert "ev\\x1b[2Kil\\x07" in text
    assert "<b>ev" not in page
    assert "<i>ev" not in page
    assert "\N{NO-BREAK SPACE}" in page
