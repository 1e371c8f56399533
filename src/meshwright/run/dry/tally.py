"""Tally: what a stretch of a step does to memory, and all that it computes and sends; stretches join end to end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from meshwright.run.dry.events import Event, Kind

Amounts = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Bytes by part at the end (`net`) and at the moment of most (`top`), both against the start; FLOPs by line;
    calls and bytes of collectives by their names. `top` is empty where memory never rises above the start. `host_net`
    and `host_top` are those of the host's memory."""

    net: Amounts = field(default_factory=dict)
    top: Amounts = field(default_factory=dict)
    flops: Amounts = field(default_factory=dict)
    calls: Amounts = field(default_factory=dict)
    bytes: Amounts = field(default_factory=dict)
    host_net: float = 0.0
    host_top: float = 0.0

    @property
    def rise(self) -> float:
        """Bytes at the moment of most, above the start."""
        return sum(self.top.values())

    def times(self, count: int) -> Tally:
        """This stretch `count` times in a row: memory is highest in the first or in the last."""
        if count < 1:
            return Tally()
        last = _sum(_scaled(self.net, count - 1), self.top)
        return Tally(
            net=_scaled(self.net, count),
            top=last if sum(last.values()) > self.rise else self.top,
            flops=_scaled(self.flops, count),
            calls=_scaled(self.calls, count),
            bytes=_scaled(self.bytes, count),
            host_net=count * self.host_net,
            host_top=max(self.host_top, (count - 1) * self.host_net + self.host_top),
        )

    def on(self, base: Amounts) -> dict[str, float]:
        """Bytes by part at the moment of most, where `base` was there at the start."""
        return _sum(base, self.top)


def tally(events: Iterable[Event]) -> Tally:
    """The events as one stretch."""
    net: dict[str, float] = {}
    top: dict[str, float] = {}
    flops: dict[str, float] = {}
    calls: dict[str, float] = {}
    moved: dict[str, float] = {}
    now = most = host = host_top = 0.0
    for event in events:
        if event.kind in (Kind.MEMORY, Kind.RECEIVE):
            net[event.what] = net.get(event.what, 0.0) + event.amount
            now += event.amount
            if now > most:
                most, top = now, dict(net)
        elif event.kind is Kind.HOST:
            host += event.amount
            host_top = max(host_top, host)
        elif event.kind is Kind.FLOPS:
            flops[event.what] = flops.get(event.what, 0.0) + event.amount
        elif event.kind is Kind.COLLECTIVE:
            calls[event.what] = calls.get(event.what, 0.0) + 1.0
            moved[event.what] = moved.get(event.what, 0.0) + event.amount
    return Tally(net=net, top=top, flops=flops, calls=calls, bytes=moved, host_net=host, host_top=host_top)


def joined(stretches: Iterable[Tally]) -> Tally:
    """All of them, one after another."""
    net: dict[str, float] = {}
    flops: dict[str, float] = {}
    calls: dict[str, float] = {}
    moved: dict[str, float] = {}
    top: Amounts = {}
    now = most = host = host_top = 0.0
    for stretch in stretches:
        if now + stretch.rise > most:
            most, top = now + stretch.rise, stretch.on(net)
        host_top = max(host_top, host + stretch.host_top)
        host += stretch.host_net
        now += sum(stretch.net.values())
        for into, amounts in (
            (net, stretch.net),
            (flops, stretch.flops),
            (calls, stretch.calls),
            (moved, stretch.bytes),
        ):
            for name, amount in amounts.items():
                into[name] = into.get(name, 0.0) + amount
    return Tally(net=net, top=top, flops=flops, calls=calls, bytes=moved, host_net=host, host_top=host_top)


def _sum(one: Amounts, other: Amounts) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in dict.fromkeys((*one, *other))}


def _scaled(amounts: Amounts, factor: float) -> dict[str, float]:
    return {name: amount * factor for name, amount in amounts.items()}
