"""How rows of a schedule are put together: runs of actions, each with its place in the row."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from meshwright.schedule.program import BACKWARD, INPUT, WEIGHT, Ids


def run(work: npt.ArrayLike, stage: npt.ArrayLike, microbatch: npt.ArrayLike, part: npt.ArrayLike = 0) -> Ids:
    """A row of actions of one kind; arguments broadcast to one length."""
    return np.stack(np.broadcast_arrays(work, stage, microbatch, part), axis=-1).astype(np.int64)


def one_for_one(forwards: Ids, backwards: Ids, *, warm_up: int) -> Ids:
    """`warm_up` forwards, then a forward and a backward in turn while there are forwards, then the other backwards."""
    index = np.arange(len(forwards))
    warm_up = min(warm_up, len(forwards))
    ahead = np.where(index < warm_up, index, 2 * index - warm_up)
    behind = warm_up + 2 * np.arange(len(backwards)) + 1
    order = np.argsort(np.concatenate([ahead, behind]), kind="stable")
    return np.concatenate([forwards, backwards])[order]


def with_weights(row: Ids, *, lag: int) -> Ids:
    """The row with a WEIGHT for each INPUT: the first follows INPUT number `lag`, one follows each later INPUT."""
    places = np.flatnonzero(row[:, 0] == INPUT)
    weights = row[places].copy()
    weights[:, 0] = WEIGHT
    after = np.concatenate([places[lag:], np.full(min(lag, len(places)), len(row))])
    order = np.argsort(np.concatenate([np.arange(len(row)), after + 0.5]), kind="stable")
    return np.concatenate([row, weights])[order]


def counted(steps: list[tuple[str, int]], *, stages: tuple[int, int], microbatches: int) -> Ids:
    """A row from phases, each a pattern and how often it is repeated: `F0 I1 W1` is a forward of the rank's first
    stage, then both halves of a backward of its second.

    Microbatches of each stage go in order; a `W` without a number is the oldest INPUT that waits. What is beyond
    `microbatches` is left out, which is legal as no microbatch waits for another.
    """
    names = [name for pattern, count in steps if count > 0 for name in pattern.split() * count]
    codes = np.array(["FBIW".index(name[0]) for name in names], dtype=np.int64)
    chunk = np.array([int(name[1:] or -1) for name in names], dtype=np.int64)
    halves = np.flatnonzero(codes == INPUT)
    waiting = np.flatnonzero((codes == WEIGHT) & (chunk < 0))
    if waiting.size:
        chunk[waiting] = chunk[halves[: len(waiting)]]
    microbatch = np.zeros(len(codes), dtype=np.int64)
    for which in (0, 1):
        own = chunk == which
        back = own & ((codes == BACKWARD) | (codes == INPUT))
        for places in (np.flatnonzero(own & (codes == 0)), np.flatnonzero(back)):
            microbatch[places] = np.arange(len(places))
        weights = np.flatnonzero(own & (codes == WEIGHT))
        microbatch[weights] = microbatch[np.flatnonzero(own & (codes == INPUT))]
    row = run(codes, np.array(stages)[chunk], microbatch)
    return row[microbatch < microbatches]
