"""What the scripts of a page need of it, and what they write, read from their text: no browser is needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright import report
from meshwright.report.figure import colour
from meshwright.report.waterfall import COMPUTE, IDEAL, KERNELS, UNEVEN, UNEXPLAINED
from meshwright.spec.goodput import Spent
from meshwright.spec.report import LineName, MemoryPart
from meshwright.spec.units import LEAST_SHARE, format_bytes, format_seconds

TEMPLATES = Path(report.__file__).parent / "templates"
PAGE = (TEMPLATES / "decision.html").read_text()
SCRIPTS = ("tips.js", "words.js", "lanes.js", "compare.js", "decision.js")
FUNCTIONS = r"^const (\w+) = |^class (\w+) "


def script(name: str) -> str:
    return (TEMPLATES / name).read_text()


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "words.js"])
def test_what_a_script_looks_up_is_in_the_page(name: str) -> None:
    text = script(name)
    places = re.findall(r'getElementById\("([^"]+)"\)', text)
    classes = re.findall(r'(?:document|figure)\.querySelector(?:All)?\("\.([\w-]+)"\)', text)
    assert places or classes
    for found in places:
        assert f'id="{found}"' in PAGE, found
    for found in classes:
        assert re.search(rf'class="[^"]*\b{found}\b', PAGE), found


def test_scripts_are_in_the_page_in_the_order_in_which_they_use_each_other() -> None:
    assert tuple(re.findall(r'asset\("(\w+\.js)"\)', PAGE)) == SCRIPTS
    known: set[str] = set()
    for name in SCRIPTS:
        own = {first or second for first, second in re.findall(FUNCTIONS, script(name), flags=re.M)}
        assert not own & known, "two scripts of one page have one scope"
        known |= own
    for name in ("unpacked", "Lanes", "compare", "formatSeconds", "formatBytes", "formatPercent", "signed"):
        assert name in known


def test_scripts_show_no_less_of_a_share_than_python_does() -> None:
    assert f"const leastShare = {LEAST_SHARE};" in script("words.js")


def test_scripts_change_units_where_python_does() -> None:
    text = script("words.js")
    limits = {float(word) for word in re.findall(r"seconds < ([\d.e-]+)", text)} - {0.0}
    assert limits == {0.9995e-3, 0.9995, 119.5, 7199.5, 172770.0}
    for limit in limits:
        below, at = (format_seconds(value).split()[1] for value in (limit * (1.0 - 1e-9), limit))
        assert below != at, limit
        assert {f'"{at}"' in text or f'" {at}"' in text, f'"{below}"' in text or f'" {below}"' in text} == {True}
    (listed,) = re.findall(r"names = \[(.*?)\]", text)
    names = re.findall(r'"(\w+)"', listed)
    assert names == [format_bytes(1024.0**power).split()[1] for power in range(len(names))]
    assert format_bytes(1024.0 ** len(names)).split()[1] == names[-1], "neither goes beyond the last"
    assert "0.9995 * 1024" in text
    assert format_bytes(0.9995 * 1024 * 1024).endswith("MiB")
    assert format_bytes(0.9994 * 1024 * 1024).endswith("KiB")


@pytest.mark.parametrize("name", [*LineName, *MemoryPart, *Spent, IDEAL, UNEVEN, KERNELS, COMPUTE, UNEXPLAINED])
def test_every_bar_has_a_colour(name: str) -> None:
    assert re.search(rf"\.{colour(name)}\b[^{{]*{{", script("style.css")), name
