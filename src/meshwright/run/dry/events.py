"""Events: what operators of a step do, one after another; plain values that processes send each other."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.report import LineName


class Kind(StrEnum):
    """What an event tells: bytes of the device's memory taken or given back, or of the host's, FLOPs done, a
    collective, the end of a pass."""

    MEMORY = "memory"
    HOST = "host"
    RECEIVE = "receive"
    FLOPS = "flops"
    COLLECTIVE = "collective"
    MARK = "mark"


@dataclass(frozen=True, slots=True)
class Event:
    """`what` is a MemoryPart, a report line, `line|operation|axes` of a collective, or the name of a mark; `amount`
    its bytes (negative where memory is given back) or FLOPs. RECEIVE is memory taken for what a peer sends."""

    kind: Kind
    what: str
    amount: float = 0.0


Events = Sequence[Event]


@dataclass(frozen=True, slots=True)
class Packed:
    """Events as those that differ, most of which come again and again, and their order: to be sent to a process."""

    different: tuple[Event, ...]
    order: array[int]

    @classmethod
    def of(cls, events: Events) -> Packed:
        numbers: dict[Event, int] = {}
        order = array("L", [numbers.setdefault(event, len(numbers)) for event in events])
        return cls(tuple(numbers), order)

    def events(self) -> Events:
        return tuple(self.different[number] for number in self.order)


def is_receive(event: Event) -> bool:
    """Whether the event is room made for what another stage sends, or that it is received."""
    return event.kind is Kind.RECEIVE or (
        event.kind is Kind.COLLECTIVE and event.what.startswith(f"{LineName.TRANSFER.value}|recv|")
    )


@dataclass(frozen=True, slots=True)
class Stretch:
    """Events up to a mark, whose name it has."""

    name: str
    events: Events


def stretches(events: Events) -> tuple[Stretch, ...]:
    """The events cut at their marks; raises ValueError where some come after the last."""
    found, begun = [], 0
    for place, event in enumerate(events):
        if event.kind is Kind.MARK:
            found.append(Stretch(name=event.what, events=events[begun:place]))
            begun = place + 1
    if any(event.kind not in (Kind.MEMORY, Kind.HOST) for event in events[begun:]):
        raise ValueError("events after the last mark")
    return tuple(found)
