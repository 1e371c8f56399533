"""The drawn plans of every test run, kept in drawn.jsonl: to draw them anew takes longer than to run some of them.

python -m tests.parallel.drawn      writes the file, after rules or draws have changed
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.parallel import drawing
from tests.parallel.cover import covering
from tests.parallel.draws import Draw, read

FILE = Path(__file__).with_suffix(".jsonl")
COUNT, FIXED_COUNT = 400, 80
FIXED = [read(line) for line in FILE.read_text(encoding="utf-8").splitlines()] if FILE.exists() else []


@cache
def every() -> list[Draw]:
    """All that the parity machine draws, by ranks: half a minute where none was drawn yet."""
    return drawing.legal(COUNT, seed=4)


def fixed() -> list[Draw]:
    """Of these the few that meet the most choices of them: what FIXED is where the file is up to date."""
    return covering(every(), count=FIXED_COUNT)


@cache
def rest() -> list[Draw]:
    """The others."""
    return [draw for draw in every() if draw not in FIXED]


if __name__ == "__main__":
    FILE.write_text("".join(f"{draw}\n" for draw in fixed()), encoding="utf-8")
