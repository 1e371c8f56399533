"""Every command of the README and the docs runs: `make pages`.

A fenced block marked `console` is a session: its lines that begin with `$ ` run one after another, in one directory
per page, with the project's `examples/` beside them. A block marked `text` is for reading only. Every line of the
README is a process as a shell starts it; on other pages what plans, explains and shows has its rooms read already.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support import commands as children

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
SET_UP = ("git clone", "make ", "cd ", "pip install")
WITH_WORKERS = ("train", "dryrun", "lab", "cluster")


def commands(page: Path) -> list[str]:
    lines = [line for block in BLOCK.findall(page.read_text()) for line in block.splitlines()]
    asked = [line[2:].split("  #")[0].strip() for line in lines if line.startswith("$ ")]
    return [command for command in asked if not command.startswith(SET_UP)]


def run(command: Sequence[str], *, cwd: Path, page: Path) -> None:
    tools = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    if page.stem != "README" and command[0] == "meshwright" and command[1] not in WITH_WORKERS:
        finished = children.run(command[1:], cwd=cwd, environment=environment)
        code, printed = finished.code, finished.printed
    else:
        shell = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
        code, printed = shell.returncode, shell.stdout[-2000:] + shell.stderr
    assert code == 0, f"{shlex.join(command)}\n{printed[-4000:]}"


@pytest.mark.pages
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.stem)
def test_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands(page):
        run(shlex.split(command), cwd=tmp_path, page=page)


def test_the_readme_shows_how_to_start() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text
    assert len(commands(ROOT / "README.md")) >= 5
