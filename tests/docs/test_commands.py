"""Every command of the README and the docs runs.

A fenced block marked `console` is a session: its lines that begin with `$ ` run one after another, in one directory
per page, with the project's `examples/` beside them. A block marked `text` is for reading only.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
SET_UP = ("git clone", "make ", "cd ", "pip install")


def commands(page: Path) -> list[str]:
    lines = [line for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    asked = [line[2:].split("  #")[0].strip() for line in lines if line.startswith("$ ")]
    return [command for command in asked if not command.startswith(SET_UP)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all pages: this machine is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_run(page: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "MESHWRIGHT_CACHE": str(cache)}
    for command in commands(page):
        result = subprocess.run(
            shlex.split(command), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, f"{page.name}: {command}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}"


def test_the_readme_shows_how_to_start() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    assert len(commands(ROOT / "README.md")) >= 5
