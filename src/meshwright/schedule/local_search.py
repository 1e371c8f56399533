"""Local search over the order of operations: moves within the runs of the longest path that stay on one rank.

Only such moves can shorten a schedule (the block theorem of job shops: Grabowski, Nowicki and Smutnicki).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from time import monotonic

from meshwright.schedule.timing import Timing
from meshwright.schedule.workload import Rows, Workload


@dataclass(slots=True, kw_only=True)
class Budget:
    """Schedules that may still be timed, and the clock at which to stop whatever is left."""

    tries: int
    until: float

    def spend(self) -> bool:
        """Whether there was one left."""
        self.tries -= 1
        return self.tries >= 0 and (self.tries % 16 > 0 or monotonic() < self.until)


def improve(
    rows: Rows, *, work: Workload, timing: Timing, bound: float, heat: float, budget: Budget, seed: int
) -> Rows:
    """The best order found from `rows`, never slower; anneals from `heat`, a share of the step, to nothing."""
    generator = random.Random(seed)
    current = best = [list(row) for row in rows]
    ends = timing.ends(current)
    assert ends is not None, "a search starts from a schedule that reaches its end"
    length = shortest = max(ends)
    first, tries = heat * length, max(budget.tries, 1)
    blocks = timing.blocks(current, ends)
    while shortest > bound * (1.0 + 1e-9) and budget.spend():
        moved = _moved(current, blocks, generator)
        if moved is None:
            break
        rank, row = moved
        if not work.fits(rank, row):
            continue
        trial = [*current[:rank], row, *current[rank + 1 :]]
        found = timing.ends(trial)
        if found is None:
            continue
        warmth = first * budget.tries / tries
        slower = max(found) - length
        if slower <= 1e-12 or (warmth > 0.0 and generator.random() < math.exp(-slower / warmth)):
            current, length = trial, max(found)
            blocks = timing.blocks(current, found)
            if length < shortest - 1e-12:
                best, shortest = current, length
    return best


def _moved(rows: Rows, blocks: list[tuple[int, int, int]], generator: random.Random) -> tuple[int, list[int]] | None:
    """A rank and its row with one operation of a run of the longest path elsewhere in the run, or just beyond it."""
    wide = [block for block in blocks if block[2] > block[1]]
    if not wide:
        return None
    rank, first, last = generator.choice(wide)
    row = list(rows[rank])
    place = generator.randint(first, last)
    low, high = max(first - 2, 0), min(last + 2, len(row) - 1)
    if generator.random() < 0.5:
        low, high = max(low, place - 3), min(high, place + 3)
    target = generator.randint(low, high)
    row.insert(target, row.pop(place))
    return rank, row
