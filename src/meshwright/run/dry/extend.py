"""From a stretch of a step in two probes, one two repetitions of a model's layers longer, to that of any length.

Nothing is fitted: the events that a repetition adds are found, in their order, and have to be the same twice.
"""

from __future__ import annotations

from meshwright.run.dry.events import Event, Events, Kind
from meshwright.run.dry.tally import Tally, joined, tally

LONGER = 2  # repetitions that the longer probe has more
_TRIES = 1000  # places where a repetition may begin or end that are looked at


class NotSteady(Exception):
    """What a repetition adds differs from one to the next: the whole has to be traced."""


def extended(short: Events, long: Events, more: int) -> Tally:
    """The stretch with `more` repetitions than `short`, where `long` has LONGER more.

    Raises NotSteady where `long` does not have the same events twice in every place where it has more of them, or
    where an amount of the others does not grow evenly.
    """
    pieces = _pieces(short, long, more, tries=[_TRIES])
    if pieces is None:
        raise NotSteady("layers differ")
    return joined(pieces)


def grown(short: Tally, long: Tally, more: int) -> Tally:
    """As `extended` of stretches in which the order of events says nothing: what is held when a step begins."""
    one, other = (
        [
            *(Event(Kind.MEMORY, part, amount) for part, amount in sorted(each.net.items())),
            Event(Kind.HOST, "", each.host_net),
        ]
        for each in (short, long)
    )
    found = _grown(one, other, more)
    if found is None:
        raise NotSteady("what is held differs")
    return tally(found)


def left(short: Tally, long: Tally | None = None, *, more: int) -> dict[str, float]:
    """Bytes by part that a step leaves or takes, as `more` repetitions on; `long` is None where nothing is missing."""
    parts = {**short.net, **(long.net if long else {})}
    growth = {part: (long.net.get(part, 0.0) - short.net.get(part, 0.0)) / LONGER if long else 0.0 for part in parts}
    found = {part: short.net.get(part, 0.0) + more * growth[part] for part in parts}
    return {part: amount for part, amount in found.items() if amount}


def _pieces(short: Events, long: Events, more: int, *, tries: list[int]) -> list[Tally] | None:
    """Stretches that make up the extended one: what both probes share, then what each repetition adds, and so on."""
    added = len(long) - len(short)
    if added < 0 or added % LONGER or tries[0] <= 0:
        return None
    tries[0] -= 1
    same = _shared(short, long)
    head, short, long = [tally(short[:same])], tuple(short[same:]), tuple(long[same:])
    if added == 0:
        found = _grown(short, long, more)
        return None if found is None else [*head, tally(found)]
    for length in range(1, added // LONGER + 1):
        unit = long[:length]
        if short and not _alike(short[0], long[LONGER * length]):
            continue
        if any(long[length * place : length * (place + 1)] != unit for place in range(1, LONGER)):
            continue
        after = _pieces(short, long[LONGER * length :], more, tries=tries)
        if after is not None:
            return [*head, tally(unit).times(more), *after]
    first = _grown(short[:1], long[:1], more)
    if not first:
        return None
    after = _pieces(short[1:], long[1:], more, tries=tries)
    return None if after is None else [*head, tally(first), *after]


def _shared(short: Events, long: Events) -> int:
    """How many events both probes begin with."""
    place = 0
    for one, other in zip(short, long, strict=False):
        if one != other:
            break
        place += 1
    return place


def _alike(one: Event, other: Event) -> bool:
    """The same but for the amount, whose sign counts."""
    return one.kind is other.kind and one.what == other.what and (one.amount < 0.0) == (other.amount < 0.0)


def _grown(short: Events, long: Events, more: int) -> list[Event] | None:
    """Events whose amounts grow by as much with every repetition, as they are `more` of them on; None if not."""
    if len(short) != len(long):
        return None
    found = []
    for one, other in zip(short, long, strict=True):
        each, odd = divmod(other.amount - one.amount, LONGER)
        if not _alike(one, other) or odd:
            return None
        found.append(Event(one.kind, one.what, one.amount + more * each))
    return found
