"""Words for the devices that ranks lie on."""

from __future__ import annotations

PLACES = 4  # runs of devices that a placement is told by


def placement_words(placement: tuple[int, ...]) -> str:
    """The devices of the ranks in order, as runs of even steps: `16 to 31, 0 to 15`, `15 down to 0`,
    `0 to 14 by 2, 1 to 15 by 2`; of many runs the first PLACES and how many ranks are left."""
    words: list[str] = []
    start = 0
    while start < len(placement) and len(words) < PLACES:
        stop = _run_stop(placement, start)
        words.append(_run_words(placement[start:stop]))
        start = stop
    left = len(placement) - start
    return ", ".join([*words, *([f"and {left:,} ranks elsewhere"] if left else [])])


def _run_stop(placement: tuple[int, ...], start: int) -> int:
    """The end of the run of even steps from `start`: two devices make one where they are neighbours, else three."""
    stop = start + 1
    while stop < len(placement) and placement[stop] - placement[stop - 1] == placement[start + 1] - placement[start]:
        stop += 1
    neighbours = stop > start + 1 and abs(placement[start + 1] - placement[start]) == 1
    return stop if neighbours or stop > start + 2 else start + 1


def _run_words(run: tuple[int, ...]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    by = f" by {abs(step)}" if abs(step) > 1 else ""
    return f"{run[0]} {'to' if step > 0 else 'down to'} {run[-1]}{by}"
