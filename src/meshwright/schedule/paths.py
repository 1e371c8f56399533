"""Paths: the stages that each microbatch passes, and in which order, where not all pass every stage in turn (SkipPipe,
2502.19913)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from meshwright.spec.errors import Problem

Ids = npt.NDArray[np.int64]
Path = tuple[int, ...]
Paths = tuple[Path, ...]  # of every microbatch; () where all pass every stage in turn

_WHERE = "schedule.paths"


def write(paths: Paths) -> tuple[str, ...]:
    """One line a microbatch, `0 2 1 3`; `read` of them gives the paths back."""
    return tuple(" ".join(map(str, path)) for path in paths)


def read(lines: Sequence[str]) -> Paths:
    """The paths that lines tell. Raises ValueError for one that tells none."""
    return tuple(tuple(int(word) for word in line.split()) for line in lines)


def problems(lines: Sequence[str], *, stages: int, microbatches: int) -> tuple[Problem, ...]:
    """Every reason why these are no paths of so many microbatches through so many stages; () where they are, or where
    there are none."""
    if not lines:
        return ()
    try:
        paths = read(lines)
    except ValueError:
        return (Problem(what="a path that cannot be read", where=_WHERE, fix="write stages by number, as 0 1 3"),)
    found = [problem for index, path in enumerate(paths) for problem in _wrong(path, index, stages=stages)]
    if len(paths) != microbatches:
        fix = "write one a microbatch"
        found.append(Problem(what=f"{len(paths)} paths of {microbatches} microbatches", where=_WHERE, fix=fix))
    missed = sorted(set(range(stages)) - {stage for path in paths for stage in path})
    if missed and not found:
        fix = "let one microbatch or more pass each stage"
        found.append(Problem(what=f"stage {missed[0]} is on no path", where=_WHERE, fix=fix))
    return tuple(found)


def _wrong(path: Path, index: int, *, stages: int) -> Iterator[Problem]:
    where = f"{_WHERE}[{index}]"
    if not path or path[0] != 0 or path[-1] != stages - 1:
        what = "a path that leaves out the embedding or the head"
        yield Problem(what=what, where=where, fix=f"begin at stage 0 and end at stage {stages - 1}")
    for stage, times in Counter(path).items():
        if times > 1:
            yield Problem(what=f"stage {stage} is passed {times} times", where=where, fix="pass it once")
        if not 0 <= stage < stages:
            yield Problem(what=f"stage {stage} does not exist", where=where, fix=f"stages are 0 to {stages - 1}")


def visits(paths: Paths, *, stages: int) -> tuple[int, ...]:
    """How many microbatches pass each stage."""
    counts = Counter(stage for path in paths for stage in path)
    return tuple(counts[stage] for stage in range(stages))


def around(path: Path | None, stage: int, *, stages: int) -> tuple[int, int]:
    """The stage before `stage` on a path and the one after it, -1 and `stages` where there is none; of no path, those
    next to it."""
    if path is None:
        return stage - 1, stage + 1
    place = path.index(stage)
    return (path[place - 1] if place else -1), (path[place + 1] if place + 1 < len(path) else stages)


def neighbours(paths: Paths, *, stages: int, microbatches: int) -> tuple[Ids, Ids]:
    """As `around` of every stage and microbatch, shape (stages, microbatches); -1 and `stages` too off the path."""
    every = np.arange(stages)[:, None] + np.zeros(microbatches, dtype=np.int64)
    if not paths:
        return every - 1, every + 1
    before, after = np.full_like(every, -1), np.full_like(every, stages)
    for index, path in enumerate(paths):
        before[list(path[1:]), index], after[list(path[:-1]), index] = path[:-1], path[1:]
    return before, after
