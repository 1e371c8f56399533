"""Pages on a narrow screen, measured in a browser: what is read there is read without moving it sideways."""

from __future__ import annotations

import html
import re
import subprocess
from pathlib import Path

import pytest

from meshwright.cost import predict
from meshwright.report.page import render
from meshwright.report.run_files import RunFiles
from meshwright.spec.synchronize import SyncKind
from tests.cost.test_rounds import met
from tests.report.test_decision_page import CHROMIUM, OFF_LINE

NARROW = 400


@pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium; the text is checked without")
@pytest.mark.parametrize("kind", [SyncKind.EVERY_STEP, SyncKind.STREAMING])
def test_the_table_of_ways_is_as_wide_as_a_narrow_screen(kind: SyncKind, tmp_path: Path) -> None:
    design = met(kind)
    files = RunFiles(path=Path("plan.json"), name="plan", is_plan=True, design=design, predicted=predict(design))
    text = render([files], timelines=[()])
    assert "<h3>Ways to meet</h3>" in text
    measure = (
        'onload = () => { const page = document.querySelector("iframe").contentDocument;'
        'const found = page.querySelector(".ways").parentElement;'
        "document.body.dataset.table = found.scrollWidth; document.body.dataset.room = found.clientWidth;"
        "document.body.dataset.page = page.documentElement.scrollWidth; };"
    )
    frame = f'<iframe width="{NARROW}" height="900" style="border: 0" srcdoc="{html.escape(text)}"></iframe>'
    path = tmp_path / "frame.html"
    path.write_text(f"<!doctype html><body><script>{measure}</script>{frame}</body>")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *OFF_LINE, f"--user-data-dir={tmp_path / 'user'}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"file://{path}"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    widths = {name: int(width) for name, width in re.findall(r'data-(table|room|page)="(\d+)"', shown)}
    assert widths["table"] == widths["room"]
    assert widths["page"] <= NARROW
