"""The drawn plans of every test run, as drawn.jsonl keeps them: to draw them anew takes longer than to run some."""

from __future__ import annotations

from functools import cache

from tests.parallel.draws import Draw, read
from tests.parallel.fixing import FILE, every

FIXED = [read(line) for line in FILE.read_text(encoding="utf-8").splitlines()]


@cache
def rest() -> list[Draw]:
    """All other draws of the parity machine."""
    return [draw for draw in every() if draw not in FIXED]
