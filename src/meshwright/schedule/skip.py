"""SkipPipe (2502.19913): paths of microbatches that leave out stages, and an order in which they do not collide.

Every microbatch leaves out as many stages, never the first or the last, and each other stage is left out equally
often. Ranks take the oldest backward that has come, else the oldest forward, with as many microbatches under way as
1F1B has or a few more. Which microbatch leaves out what, and which pass two stages the other way round, local search
finds: it times the whole step, so that microbatches that would meet at a stage or wait for a slow link go elsewhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

import numpy as np

from meshwright.schedule.paths import Path, Paths, around
from meshwright.schedule.program import BACKWARD, FORWARD, Ids, Program
from meshwright.schedule.rows import run
from meshwright.spec.skip import Swap

MOST_SWAPPED = 0.25  # of the microbatches: the paper keeps changes of places few
MOST_PASSES = 60_000  # that are timed in all; about a third of a second
MOST_TRIES = 300
_Item = tuple[int, int]  # a microbatch, and whether it goes backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Stages in a row, one a rank: seconds of a microbatch forward and backward, and of its way to the next stage."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    transfer: tuple[float, ...]

    @property
    def stages(self) -> int:
        return len(self.forward)

    def way(self, one: int, other: int) -> float:
        """Seconds between two stages: those of the slowest link between them."""
        return max(self.transfer[min(one, other) : max(one, other)], default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipping:
    """A legal schedule of microbatches with paths, of `seconds`; no order of passes on them takes less than `bound`."""

    program: Program
    seconds: float
    bound: float


def skipping(
    line: Line, *, microbatches: int, skipped: int, ahead: int = 0, swap: Swap = Swap.NONE, seed: int = 0
) -> Skipping:
    """The shortest step found of `microbatches` that leave out `skipped` stages each; the same for the same arguments.

    Ranks hold at most `ahead` microbatches more than under 1F1B.

    There are stages besides the first and the last that some microbatch does not leave out, and enough microbatches
    that each of them is on some path.
    """
    inner = line.stages - 2
    assert 0 <= skipped < inner, f"{skipped} of {inner} stages cannot be left out"
    assert microbatches * (inner - skipped) >= inner, "a stage that no microbatch passes"
    best = dealt(line.stages, microbatches=microbatches, skipped=skipped)
    found = _timed(line, best, ahead=ahead)
    assert found is not None, "microbatches that pass stages in turn never wait for each other"
    generator, passes = random.Random(seed), 2 * microbatches * (line.stages - skipped)
    for _ in range(min(MOST_TRIES, MOST_PASSES // passes)):
        tried = _changed(best, generator, swap=swap)
        timed = None if tried == best else _timed(line, tried, ahead=ahead)
        if timed is not None and timed[0] <= found[0]:
            best, found = tried, timed
    return _told(line, best, *found)


def along(line: Line, paths: Paths, *, ahead: int = 0) -> Skipping | None:
    """The schedule of microbatches on `paths`, numbered anew in the order in which they come to the last stage; None
    where ranks would wait for each other for ever, as where two stages are passed in both orders."""
    found = _timed(line, paths, ahead=ahead)
    return None if found is None else _told(line, paths, *found)


def _told(line: Line, paths: Paths, seconds: float, rows: list[list[_Item]]) -> Skipping:
    return Skipping(program=_program(rows, paths), seconds=seconds, bound=_bound(line, paths))


def dealt(stages: int, *, microbatches: int, skipped: int) -> Paths:
    """Paths that leave out the stages between the first and the last in turn: how often differs by one at the most."""
    inner = stages - 2
    gaps = [{1 + (index * skipped + more) % inner for more in range(skipped)} for index in range(microbatches)]
    return tuple(tuple(stage for stage in range(stages) if stage not in gap) for gap in gaps)


def _changed(paths: Paths, generator: random.Random, *, swap: Swap) -> Paths:
    """Two microbatches change paths, or one stage that either leaves out; or one changes places of two stages."""
    one, other = generator.randrange(len(paths)), generator.randrange(len(paths))
    made = list(paths)
    chance = generator.random()
    if swap is Swap.NEIGHBOURS and chance < 0.3:
        made[one] = _turned(paths[one], generator)
        turned = sum(path != tuple(sorted(path)) for path in made)
        return tuple(made) if turned <= MOST_SWAPPED * len(made) else paths
    if chance < 0.65:
        made[one], made[other] = paths[other], paths[one]
        return tuple(made)
    mine, theirs = (sorted(set(paths[a]) - set(paths[b])) for a, b in ((one, other), (other, one)))
    if mine:
        given, taken = generator.choice(mine), generator.choice(theirs)
        made[one], made[other] = _exchanged(paths[one], given, taken), _exchanged(paths[other], taken, given)
    return tuple(made)


def _exchanged(path: Path, given: int, taken: int) -> Path:
    return tuple(sorted((*(stage for stage in path if stage != given), taken)))


def _turned(path: Path, generator: random.Random) -> Path:
    """With two neighbours between the ends in each other's place; in order again where some were not."""
    if path != tuple(sorted(path)) or len(path) < 4:
        return tuple(sorted(path))
    place = generator.randrange(1, len(path) - 2)
    return (*path[:place], path[place + 1], path[place], *path[place + 2 :])


def _timed(line: Line, paths: Paths, *, ahead: int) -> tuple[float, list[list[_Item]]] | None:
    """When the last pass of the step ends, and what every rank does in order; None where ranks wait for ever."""
    stages = line.stages
    rows: list[list[_Item]] = [[] for _ in range(stages)]
    ready: list[list[tuple[float, int, int]]] = [[] for _ in range(stages)]  # arrival, 0 backward or 1, microbatch
    held, free, left = [0] * stages, [0.0] * stages, 2 * sum(map(len, paths))
    ready[0] = [(0.0, 1, index) for index in range(len(paths))]
    events = [(0.0, 0)]
    last = 0.0
    while events:
        clock, rank = heappop(events)
        if clock < free[rank]:
            continue
        here = [item for item in ready[rank] if item[0] <= clock]
        able = [item for item in here if item[1] == 0 or held[rank] < stages - rank + ahead]
        if not able:
            continue
        item = min(able, key=lambda each: each[1:])
        ready[rank].remove(item)
        forward, index = item[1] == 1, item[2]
        end = clock + (line.forward if forward else line.backward)[rank]
        held[rank] += 1 if forward else -1
        rows[rank].append((index, 0 if forward else 1))
        left, last, free[rank] = left - 1, max(last, end), end
        heappush(events, (end, rank))
        before, after = around(paths[index], rank, stages=stages)
        to, kind = (after, 1) if forward else (before, 0)
        if to == stages:
            to, kind = rank, 0
        if to >= 0:
            arrival = end + line.way(rank, to)
            ready[to].append((arrival, kind, index))
            heappush(events, (max(arrival, free[to]), to))
    return None if left else (last, rows)


def _bound(line: Line, paths: Paths) -> float:
    """Seconds of the rank with most work, with the least that comes before its first forward and after its last
    backward."""
    found = 0.0
    for rank in range(line.stages):
        ways = [path[: path.index(rank) + 1] for path in paths if rank in path]
        moved = [sum(line.way(one, other) for one, other in pairwise(way)) for way in ways]
        ends = 0.0
        for seconds in (line.forward, line.backward):
            ends += min(sum(seconds[s] for s in way[:-1]) + more for way, more in zip(ways, moved, strict=True))
        found = max(found, ends + len(ways) * (line.forward[rank] + line.backward[rank]))
    return found


def _program(rows: list[list[_Item]], paths: Paths) -> Program:
    """The rows with microbatches numbered in the order in which they come to the last stage."""
    order = [index for index, backward in rows[-1] if not backward]
    number = {index: place for place, index in enumerate(order)}
    made: list[Ids] = []
    for rank, row in enumerate(rows):
        work = np.array([BACKWARD if backward else FORWARD for _, backward in row])
        made.append(run(work, rank, np.array([number[index] for index, _ in row])))
    ways = tuple(paths[index] for index in order)
    return Program.of(made, stages=len(rows), microbatches=len(paths), paths=ways)
