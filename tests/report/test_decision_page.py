from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import catalog, cost, search
from meshwright.export import Peer, export, version_of
from meshwright.report import decision_page, waterfall, write_page
from meshwright.report.decision_view import DecisionView, decision_view
from meshwright.report.launches import launches
from meshwright.report.plans import plans_view
from meshwright.report.settings import settings
from meshwright.search import Decision
from meshwright.spec import codec
from meshwright.spec.errors import Problem
from meshwright.spec.plan import Design
from meshwright.spec.report import LineName
from meshwright.spec.span import Span
from meshwright.spec.units import format_bytes, format_percent, format_seconds
from tests.report.test_page import outline

TEMPLATES = Path(search.__file__).parent.parent / "report" / "templates"
SCRIPTS = ("tips.js", "words.js", "lanes.js", "compare.js", "decision.js")
NODE = shutil.which("node")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OFF_LINE = ("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")


def made(model: str, cluster: str, *sets: str, top: int) -> Decision:
    return search.design(
        catalog.load_model(model), catalog.load_cluster(cluster), catalog.load_job(None, sets=sets), top=top
    )


@pytest.fixture(scope="module")
def decision() -> Decision:
    sets = ("batch_tokens=256Ki", "sequence_length=1024", "constraints.fix.pipeline=2", "constraints.fix.context=1")
    return made("gpt3-1.3b", "8xA100-80GB", *sets, top=3)


@pytest.fixture(scope="module")
def page(decision: Decision) -> str:
    return decision_page(decision)


SPACE = "\N{NO-BREAK SPACE}"


def embedded(text: str) -> Any:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.S)
    assert len(found) == 1
    return json.loads(found[0])


def test_the_embedded_figures_are_those_of_the_reports(decision: Decision, page: str) -> None:
    data = embedded(page)
    assert data["chosen"] == 1
    assert len(data["plans"]) == len(decision.ranked) == 3
    for plan, entry in zip(data["plans"], decision.ranked, strict=True):
        design = replace(decision.design, plan=entry.plan)
        report = cost.predict(design)
        assert plan["digest"] == entry.plan.digest()
        assert plan["step_seconds"] == report.step_seconds == entry.step_seconds
        assert plan["error_band"] == list(report.error_band)
        assert plan["terms"] == [[bar.name, bar.seconds] for bar in waterfall(report).bars]
        assert sum(seconds for _, seconds in plan["terms"]) == pytest.approx(report.step_seconds)
        tightest = min(report.memory, key=lambda stage: stage.capacity - stage.total)
        assert sum(count for _, count in plan["memory"]["parts"]) == pytest.approx(tightest.total)
        assert plan["memory"]["rank"] == tightest.rank
        assert plan["settings"] == [list(pair) for pair in settings(design)]


def test_the_embedded_step_is_the_timeline(decision: Decision, page: str) -> None:
    for plan, entry in zip(embedded(page)["plans"], decision.ranked, strict=True):
        spans = cost.timeline(replace(decision.design, plan=entry.plan))
        busy = [span for span in spans if span.name != LineName.BUBBLE and span.seconds > 0.0]
        found = unpacked(plan["timeline"])
        assert len(found) == len(busy)
        whole = max(span.start + span.seconds for span in spans)
        ours = sorted((span.rank, span.start, span.name, span.stage, span.microbatch, span.seconds) for span in busy)
        for span, seen in zip(ours, sorted(found), strict=True):
            assert seen[:1] + seen[2:5] == span[:1] + span[2:5]
            assert seen[1] == pytest.approx(span[1], abs=1e-6 * whole)
            assert seen[5] == pytest.approx(span[5], rel=1e-3)


def unpacked(step: Any) -> list[tuple[int, float, str, int, int, float]]:
    found = []
    for rank, (kinds, microbatches, starts) in enumerate(json.loads(zlib.decompress(base64.b64decode(step["rows"])))):
        tick = 0
        for kind, microbatch, more in zip(kinds, microbatches, starts, strict=True):
            tick += more
            name, stage, seconds = step["kinds"][kind]
            start = tick * step["seconds"] / step["ticks"]
            found.append((rank, start, step["names"][name], stage, microbatch, seconds))
    return found


def test_the_page_is_whole_and_by_itself(page: str) -> None:
    found = outline(page)
    assert {address.partition("-")[0] for address in found.addresses} == {"#plan"}
    for outside in ("url(", "@import", "http://", "https://"):
        assert outside not in page
    assert "prefers-color-scheme: dark" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_every_ranked_plan_can_be_picked(decision: Decision, page: str) -> None:
    for number, entry in enumerate(decision.ranked, 1):
        assert f'id="plan-{number}"' in page
        assert page.count(f'href="#plan-{number}"') == 3, "in the plot, in the table, in the list"
        assert page.count(entry.plan.describe()) >= 4
    assert page.count('class="panel first"') == 1
    assert page.count('<div class="still">') == 1
    assert page.count("<h3>Timeline of one step</h3>") == 3


def test_what_was_decided_is_in_the_page(decision: Decision, page: str) -> None:
    report = decision.report
    text = html.unescape(page).replace(SPACE, " ")
    for said in (
        f"{decision.considered:,} legal plans were priced in {format_seconds(decision.seconds)}",
        f", {decision.fitting:,} fit in memory",
        f"What binds: {report.bottleneck}.",
        f"<strong>{format_seconds(report.step_seconds)}</strong>",
        *decision.why,
        *(entry.rule for entry in decision.rejected if entry.count),
    ):
        assert said in text, said


def test_the_probability_of_fitting_is_in_the_table_and_in_the_tiles(decision: Decision) -> None:
    view = decision_view(decision)
    column = view.headers.index("fits")
    for row, entry in zip(view.rows, decision.ranked, strict=True):
        assert entry.fit_probability is not None
        assert row.cells[column].text == format_percent(entry.fit_probability)
        assert row.cells[column].value == entry.fit_probability
    (tile,) = (tile for tile in view.panels[0].tiles if tile.label == "peak memory")
    assert tile.note.endswith(f"fits with {row_words(view, column)}")
    kept = plans_view(decision, chosen="")
    assert kept is not None
    assert kept.ranked.rows[0][kept.ranked.headers.index("fits")] == row_words(view, column)


def row_words(view: DecisionView, column: int) -> str:
    return view.rows[0].cells[column].text


def test_the_page_has_the_launch_of_every_trainer_or_why_there_is_none() -> None:
    sets = ("batch_tokens=512Ki", "constraints.fix.pipeline=1", "constraints.fix.zero=zero1", "constraints.fix.cp=1")
    found = made("gpt3-1.3b", "8xA100-80GB", *sets, top=1)
    text = decision_page(found)
    said, refused = (
        [launch for launch in launches(found.design) if bool(launch.text) is has_words] for has_words in (True, False)
    )
    assert said
    assert refused
    for launch in said:
        assert f"<summary>{launch.name}</summary><pre>" in text
        assert launch.text.rstrip() in html.unescape(text)
    for launch in refused:
        assert f"<summary>{launch.name}: has no words for it</summary>" in text
        assert all(reason in html.unescape(text).replace(SPACE, " ") for reason in launch.refused)
    assert [launch.text for launch in said] == [
        export(found.design, to=peer).text for peer in Peer if version_of(peer) not in [entry.name for entry in refused]
    ]


def test_plans_that_were_not_priced_are_told_apart(decision: Decision) -> None:
    view = decision_view(replace(decision, considered=1_000_000, ranked=decision.ranked[:1]))
    assert "1,000,000 legal plans were searched" in view.summary
    assert f"{decision.priced:,} that could be best were priced" in view.summary


def test_a_plan_that_is_not_chosen_says_how_it_stands(decision: Decision) -> None:
    view = decision_view(decision)
    slower = view.panels[-1]
    change = decision.ranked[-1].step_seconds / decision.ranked[0].step_seconds - 1.0
    assert f"It takes {format_percent(change)} more time than plan 1" in slower.sentences[1]
    own = dict(settings(decision.design))
    assert slower.differs
    assert all(own[name] != value for name, value in slower.settings if name in slower.differs)
    assert not view.panels[0].differs


def test_names_are_escaped_and_cannot_end_the_script(decision: Decision) -> None:
    odd = "</script><b>odd</b>&"
    design = replace(decision.design, model=replace(decision.design.model, name=odd))
    text = decision_page(
        replace(
            decision,
            design=design,
            predicts_only=(Problem(what=odd),),
            why=(f"{odd} is best",),
            ranked=ranked_as(odd, decision),
        )
    )
    outline(text)
    assert "<b>odd" not in text
    assert "&lt;b&gt;odd" in text
    assert text.count("</script>") == 6
    embedded(text)


def ranked_as(name: str, decision: Decision) -> Any:
    return tuple(replace(entry, plan=replace(entry.plan, model=name)) for entry in decision.ranked)


def test_a_drawing_that_is_not_as_long_as_the_step_says_so(decision: Decision, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any("It ends" in panel.timeline.caption for panel in decision_view(decision).panels if panel.timeline)
    whole = cost.timeline

    def shortened(design: Design) -> tuple[Span, ...]:
        return tuple(replace(span, start=span.start / 2, seconds=span.seconds / 2) for span in whole(design))

    monkeypatch.setattr(cost, "timeline", shortened)
    panel = decision_view(decision).panels[0]
    assert panel.timeline is not None
    assert "before the predicted step does" in panel.timeline.caption


def test_one_plan_alone_has_nothing_to_compare(decision: Decision) -> None:
    text = decision_page(replace(decision, ranked=decision.ranked[:1], considered=1, priced=1, fitting=1))
    outline(text)
    assert "1 legal plan was priced" in text
    assert "1 fit in memory" in text
    assert 'id="compare"' not in text


def test_a_page_of_a_long_pipeline_is_small() -> None:
    sets = ("batch_tokens=6291456", "constraints.fix.pipeline=64", 'constraints.fix.schedule="1f1b"')
    text = decision_page(made("gpt-1t", "selene:3072", *sets, top=2))
    assert len(text.encode()) < 400_000
    steps = [plan["timeline"] for plan in embedded(text)["plans"]]
    drawn, whole = steps[0]["microbatches"]
    assert drawn < whole
    assert f"Drawn are {drawn:,} of {whole:,} microbatches" in text
    assert {span[0] for span in unpacked(steps[0])} == set(range(64))
    assert "each of 64 pipeline ranks" in text


def test_a_kept_decision_has_the_same_page(decision: Decision, page: str, tmp_path: Path) -> None:
    design = tmp_path / "plan.json"
    design.write_text(decision.design.to_json())
    search.decision_path(design).write_text(json.dumps(codec.encode(decision)))
    assert write_page([design], tmp_path / "plan.html").read_text() == page
    both = write_page([design, design], tmp_path / "both.html").read_text()
    assert "2 runs compared" in both


@pytest.mark.skipif(not NODE, reason="needs Node.js: apt-get install nodejs; the text is checked without")
def test_scripts_write_numbers_as_python_does(tmp_path: Path) -> None:
    numbers = [0.0, 3.2e-7, 9.996e-4, 0.0123, 0.99951, 1.0, 9.994, 77.34, 119.9, 3661.0, 7300.5, 200_000.0, 4.2e7]
    counts = [0.0, 12.0, 1023.9, 4096.0, 5.5e6, 7.97e10, 2.0**50 * 3.3]
    script = (TEMPLATES / "words.js").read_text() + (
        f"console.log(JSON.stringify([{json.dumps(numbers)}.map(formatSeconds),"
        f"{json.dumps(counts)}.map(formatBytes), {json.dumps(numbers[:8])}.map(formatPercent)]));"
    )
    (tmp_path / "words.js").write_text(script)
    said = subprocess.run([str(NODE), str(tmp_path / "words.js")], check=True, capture_output=True, text=True).stdout
    assert json.loads(said) == [
        [format_seconds(value) for value in numbers],
        [format_bytes(value) for value in counts],
        [format_percent(value) for value in numbers[:8]],
    ]


@pytest.mark.skipif(not CHROMIUM, reason="needs a browser: apt-get install chromium; the text is checked without")
def test_a_browser_shows_the_plan_that_the_address_names(page: str, decision: Decision, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    trap = "<script>addEventListener('error', (event) => document.body.dataset.fault = event.message);</script>"
    path.write_text(page.replace("<main>", f"{trap}<main>"))
    command = [str(CHROMIUM), "--headless", "--no-sandbox", *OFF_LINE, f"--user-data-dir={tmp_path / 'user'}"]
    command += ["--virtual-time-budget=4000", "--dump-dom", f"file://{path}#plan-3"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert "data-fault" not in shown
    hidden = re.findall(r'<article class="panel[^>]*id="plan-(\d)"[^>]*hidden', shown)
    assert hidden == ["1", "2"]
    assert shown.count("<canvas") == 1
    assert shown.count('<th aria-sort="ascending"') == 1
    third = decision.ranked[2]
    change = third.step_seconds / decision.ranked[0].step_seconds - 1.0
    assert f"Plan 3 takes {format_percent(abs(change))} {'more' if change > 0 else 'less'} time" in shown
