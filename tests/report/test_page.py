from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.report.page import render, write_page
from meshwright.report.run_files import read_run
from meshwright.report.trace import write_trace
from meshwright.spec.errors import ConfigError
from tests.report import synthetic

VOID = {"meta", "br", "link", "img", "input", "hr"}
LIMIT = 300_000


class Outline(HTMLParser):
    """Checks that every element is closed in order, and keeps tags, ids and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert found.open == []
    return found


def page_of(*folders: Path) -> str:
    runs = [read_run(folder) for folder in folders]
    return render(runs, timelines=[synthetic.spans(files.design) for files in runs])


def test_one_run_is_one_whole_page_by_itself(run_dir: Path) -> None:
    text = page_of(run_dir)
    found = outline(text)
    assert len(text.encode()) < LIMIT
    assert found.addresses == []
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text


def test_every_chart_is_also_a_table(run_dir: Path) -> None:
    text = page_of(run_dir)
    assert text.count("<figure") == 5
    assert text.count("As a table") == 5
    for title in ("Loss", "Throughput", "Timeline of one step", "Where the step goes", "Memory at the peak"):
        assert f"<h3>{title}</h3>" in text


def test_key_figures_and_words_are_there(run_dir: Path) -> None:
    text = page_of(run_dir)
    for said in (
        "4 devices: pipeline 2 x shard 2 (zero3, fp32), 1f1b, 8 microbatches of 2",
        "The step took 347 ms, 13.0 % longer than the 307 ms predicted.",
        "<strong>5,902</strong>",
        "<strong>N/A</strong>",
        "<strong>1.348</strong>",
        "4,321 legal plans were priced",
        "tensor 3 does not divide 4 heads",
        "2.13.0",
    ):
        assert said in text.replace("\N{NO-BREAK SPACE}", " "), said


def test_numbers_stay_on_a_line_with_their_units(run_dir: Path) -> None:
    prose = re.findall(r"<(?:p|li)[ >].*?</(?:p|li)>", page_of(run_dir), flags=re.DOTALL)
    assert any("347\N{NO-BREAK SPACE}ms" in each for each in prose)
    assert not [each for each in prose if re.search(r"[0-9] (?:ms|MiB|GiB|%)", each)]


def test_text_from_files_is_escaped(run_dir: Path) -> None:
    text = page_of(run_dir)
    assert "It was the best of &lt;mills&gt;,\nthe river &amp; its wheel." in text


def test_the_plan_that_runs_is_marked(run_dir: Path) -> None:
    rows = re.findall(r'<tr class="chosen">.*?</tr>', page_of(run_dir), flags=re.S)
    assert len(rows) == 1
    assert "1f1b" in rows[0]


def test_several_runs_are_compared(run_dir: Path, tmp_path: Path) -> None:
    text = page_of(run_dir, synthetic.write_run(tmp_path / "slow", slower=1.4))
    outline(text)
    assert "2 runs compared" in text
    assert "Side by side" in text
    assert text.count('<details class="one"') == 2
    assert len(text.encode()) < LIMIT


def test_a_long_run_of_a_large_plan_stays_under_the_limit(tmp_path: Path) -> None:
    design = synthetic.design(pipeline=4, shard=1, microbatches=320)
    folder = synthetic.write_run(tmp_path / "long", steps=6000, chosen=design)
    assert len(page_of(folder).encode()) < LIMIT


def test_a_plan_file_has_a_page(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(synthetic.design().to_json())
    out = write_page([path], tmp_path / "pages" / "plan.html")
    text = out.read_text()
    outline(text)
    assert "time to train" in text
    assert "Predicted; nothing is measured yet." in text
    assert "<h3>Loss</h3>" not in text


def test_a_run_that_only_began_has_a_page(run_dir: Path) -> None:
    for name in ("measured.json", "predicted.json", "decision.json", "environment.json", "metrics.jsonl", "sample.txt"):
        (run_dir / name).unlink()
    for path in (run_dir / "spans").iterdir():
        path.unlink()
    text = render([read_run(run_dir)], timelines=[()])
    outline(text)
    assert "not measured" in text
    assert "not evaluated" in text


def test_the_same_files_give_the_same_page(run_dir: Path) -> None:
    assert page_of(run_dir) == page_of(run_dir)


def test_no_run_and_no_place_are_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run is named"):
        render([])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_page([run_dir], tmp_path / "file" / "page.html")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_trace(run_dir, tmp_path / "file" / "trace.json")


def test_a_page_needs_no_torch(run_dir: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from meshwright import report\n"
        f"report.write_page([{str(run_dir)!r}], {str(tmp_path / 'page.html')!r})\n"
        f"report.write_trace({str(run_dir)!r}, {str(tmp_path / 'trace.json')!r})\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "page.html").stat().st_size < LIMIT


def test_a_run_with_experts_shows_how_they_are_loaded(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "run", steps=4)
    assert "expert load" not in render([read_run(folder)])
    rows = [{**row, "expert_load": 1.25} for row in synthetic.metrics(steps=4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = render([read_run(folder)])
    assert "expert load" in text
    assert "1.25" in text
