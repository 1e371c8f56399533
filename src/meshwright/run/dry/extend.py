"""From a stretch of a step in three probes, each one repetition of a model's layers longer, to that of any length.

Nothing is fitted: the events that a repetition adds are found, in their order, and have to be the same both times.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.run.dry.events import Event, Kind
from meshwright.run.dry.tally import Tally, joined, tally

Events = Sequence[Event]
Probes = tuple[Events, Events, Events]

_TRIES = 1000  # places where a repetition may begin or end that are looked at


class NotSteady(Exception):
    """What a repetition adds differs from one to the next: the whole has to be traced."""


def extended(probes: Probes, more: int) -> Tally:
    """The stretch with `more` repetitions than the shortest of `probes`, each of which has one more than the last.

    Raises NotSteady where a repetition does not add the same events in the same places both times, or where an amount
    of the others does not grow by as much each time.
    """
    pieces = _pieces(probes, more, tries=[_TRIES])
    if pieces is None:
        raise NotSteady("layers differ")
    return joined(pieces)


def grown(probes: tuple[Tally, Tally, Tally], more: int) -> Tally:
    """As `extended` of stretches in which the order of events says nothing: what is held when a step begins."""
    one, two, three = (
        [
            *(Event(Kind.MEMORY, part, amount) for part, amount in sorted(each.net.items())),
            Event(Kind.HOST, "", each.host_net),
        ]
        for each in probes
    )
    found = _grown((one, two, three), more) if len(one) == len(two) == len(three) else None
    if found is None:
        raise NotSteady("what is held differs")
    return tally(found)


def _pieces(probes: Probes, more: int, *, tries: list[int]) -> list[Tally] | None:
    """Stretches that make up the extended one: what all probes share, then what each repetition adds, and so on."""
    short, middle, long = probes
    added = len(middle) - len(short)
    if added < 0 or len(long) - len(middle) != added or tries[0] <= 0:
        return None
    tries[0] -= 1
    same = _shared(probes)
    head, rest = [tally(short[:same])], tuple(events[same:] for events in probes)
    short, middle, long = rest
    if added == 0:
        found = _grown((short, middle, long), more)
        return None if found is None else [*head, tally(found)]
    for length in range(1, added + 1):
        unit = middle[:length]
        if short and not _alike(short[0], middle[length]):
            continue
        if long[:length] != unit or long[length : 2 * length] != unit:
            continue
        after = _pieces((short, middle[length:], long[2 * length :]), more, tries=tries)
        if after is not None:
            return [*head, tally(unit).times(more), *after]
    first = _grown((short[:1], middle[:1], long[:1]), more)
    if not first:
        return None
    after = _pieces((short[1:], middle[1:], long[1:]), more, tries=tries)
    return None if after is None else [*head, tally(first), *after]


def _shared(probes: Probes) -> int:
    """How many events all probes begin with."""
    place = 0
    for one, two, three in zip(*probes, strict=False):
        if not one == two == three:
            break
        place += 1
    return place


def _alike(one: Event, other: Event) -> bool:
    """The same but for the amount, whose sign counts."""
    return one.kind is other.kind and one.what == other.what and (one.amount < 0.0) == (other.amount < 0.0)


def _grown(probes: Probes, more: int) -> list[Event] | None:
    """Events whose amounts grow by as much from probe to probe, as they are `more` repetitions on; None if not."""
    if len({len(events) for events in probes}) > 1:
        return None
    found = []
    for one, two, three in zip(*probes, strict=True):
        if not _alike(one, two) or not _alike(two, three) or two.amount - one.amount != three.amount - two.amount:
            return None
        found.append(Event(one.kind, one.what, one.amount + more * (two.amount - one.amount)))
    return found
