"""Which of all drawn plans are those of every test run.

python -m tests.parallel.fixing      writes drawn.jsonl, after rules or draws have changed
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tests.parallel import drawing
from tests.parallel.cover import covering
from tests.parallel.draws import Draw

FILE = Path(__file__).with_name("drawn.jsonl")
COUNT, FIXED_COUNT = 400, 80
ANEW = "write them anew: python -m tests.parallel.fixing"


@cache
def every() -> list[Draw]:
    """All that the parity machine draws, by ranks: half a minute where none was drawn yet."""
    return drawing.legal(COUNT, seed=4)


def fixed() -> list[Draw]:
    """Of these the few that meet the most choices of them."""
    return covering(every(), count=FIXED_COUNT)


if __name__ == "__main__":
    FILE.write_text("".join(f"{draw}\n" for draw in fixed()), encoding="utf-8")
