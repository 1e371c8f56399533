"""Faults simulated: what a run of many devices comes to under a mix of failures, when to save, and how many spares."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from meshwright.catalog.failure_mix import Mix
from meshwright.cost.goodput import RESTART_SECONDS
from meshwright.spec.faults import FaultKind

# A slow node is found after an hour of steps that take half as long again.
SLOW_SECONDS = 3600.0 * (1.0 - 1.0 / 1.5)
# Assumed, as no source says it: a node that was taken out is back after a day.
RETURN_SECONDS = 86400.0
SEEDS = 32
_LOW, _HIGH = 5.0, 95.0
_INTERVALS = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
SHORT = 0.01  # of the time: waits for nodes that more spares would save


class Lost(StrEnum):
    """What time that was not useful went to."""

    UNDONE = "work done again"
    SAVING = "checkpoints"
    FOUND = "until it was found"
    BACK = "restarts"
    WAITING = "waiting for a node"


class GoesOn(StrEnum):
    """Where a run goes on from when it was interrupted."""

    HERE = "where it was"
    SAVED = "a checkpoint of that very step"
    NEWEST = "the newest safe checkpoint"
    BEFORE = "the one before"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """One way to be interrupted: its share of all, and what each costs.

    Nothing useful is done for `found_seconds` and then for `back_seconds`; work since where it `goes_on` from is done
    again. Where it `takes_node`, another node has to be there to go on.
    """

    name: str
    share: float
    found_seconds: float
    back_seconds: float
    goes_on: GoesOn = GoesOn.NEWEST
    takes_node: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """`nodes` that train and `spares` that wait, interrupted every `seconds_between_failures` on average.

    A node that was taken out is back after `return_seconds`. Failures strike while a run is down as they do while it
    trains, unless they are `only_training`, as those of an injector that waits for the run are.
    """

    nodes: int
    seconds_between_failures: float
    spares: int = 0
    return_seconds: float = RETURN_SECONDS
    only_training: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """A checkpoint after every `every_seconds` of work stops it for `stall_seconds`, and is safe `write_seconds` after
    it was begun; one that is asked for before the last is safe waits for it."""

    every_seconds: float
    stall_seconds: float
    write_seconds: float

    @property
    def stopped_seconds(self) -> float:
        return max(self.stall_seconds, self.write_seconds - self.every_seconds)

    @property
    def lag_seconds(self) -> float:
        """From when training goes on until the checkpoint is safe."""
        return max(0.0, self.write_seconds - self.stopped_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Of runs of one fleet, one a seed: the mean useful share of the time, and what nine of ten lie between.

    `lost` are mean shares of the time by what they went to, `by_trouble` by what brought them about; they sum to what
    is not useful, save checkpoints, which no trouble is to blame for.
    """

    fleet: Fleet
    saves: Saves
    ettr: float
    low: float
    high: float
    failures: float
    lost: Mapping[Lost, float]
    by_trouble: Mapping[str, float]
    seeds: int

    @property
    def of_paid(self) -> float:
        """The useful share of the time of all nodes, spares too."""
        return self.ettr * self.fleet.nodes / (self.fleet.nodes + self.fleet.spares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What was tried: numbers of spares at the interval that was asked about, and other intervals with `taken` of
    them. The best spares are those with the highest useful share of all nodes that are paid for."""

    spares: tuple[Simulated, ...]
    intervals: tuple[Simulated, ...]
    taken: int

    @property
    def asked(self) -> Simulated:
        return self.intervals[_INTERVALS.index(1.0)]

    @property
    def best_interval(self) -> Simulated:
        return max(self.intervals, key=lambda one: one.ettr)

    @property
    def best_spares(self) -> Simulated:
        return max(self.spares, key=lambda one: one.of_paid)


def troubles_of(mix: Mix, *, peer_timeout_seconds: float, load_seconds: float) -> tuple[Trouble, ...]:
    """What the causes of a mix cost a run that restarts: found and restarted in RESTART_SECONDS, its state read in
    `load_seconds`; what hangs is noticed when peers have waited for `peer_timeout_seconds`."""
    late = {
        FaultKind.HANG: peer_timeout_seconds,
        FaultKind.PARTITION: peer_timeout_seconds,
        FaultKind.SLOW: SLOW_SECONDS,
    }
    goes_on = {FaultKind.PREEMPT: GoesOn.SAVED, FaultKind.SLOW: GoesOn.SAVED, FaultKind.CORRUPT: GoesOn.BEFORE}
    return tuple(
        Trouble(
            name=cause.name,
            share=mix.share(cause),
            found_seconds=late.get(cause.fault, 0.0),
            back_seconds=RESTART_SECONDS + load_seconds,
            goes_on=goes_on.get(cause.fault, GoesOn.NEWEST),
            takes_node=cause.takes_node,
        )
        for cause in mix.causes
    )


def simulate(
    fleet: Fleet, saves: Saves, troubles: Sequence[Trouble], *, seconds: float, seeds: int = SEEDS, seed: int = 0
) -> Simulated:
    """Runs of `seconds` of wall time, interrupted at random (exponential times between failures, each a trouble drawn
    by its share). The same seeds draw the same failures for any interval and any spares."""
    runs = [_Run(fleet, saves, troubles, np.random.default_rng((seed, number))) for number in range(seeds)]
    for run in runs:
        run.train(seconds)
    shares = np.array([run.useful / seconds for run in runs])
    low, high = np.percentile(shares, (_LOW, _HIGH))
    return Simulated(
        fleet=fleet,
        saves=saves,
        ettr=float(shares.mean()),
        low=float(low),
        high=float(high),
        failures=sum(run.failures for run in runs) / seeds,
        lost={kind: sum(run.lost[kind] for run in runs) / seeds / seconds for kind in Lost},
        by_trouble={
            trouble.name: sum(run.by_trouble[place] for run in runs) / seeds / seconds
            for place, trouble in enumerate(troubles)
        },
        seeds=seeds,
    )


def advise(
    fleet: Fleet,
    saves: Saves,
    troubles: Sequence[Trouble],
    *,
    seconds: float,
    spares: int | None = None,
    seeds: int = SEEDS,
    seed: int = 0,
) -> Advice:
    """Spares tried at the interval of `saves`, then other intervals with `spares`, or with the best of those tried."""

    def tried(nodes: int, every: float) -> Simulated:
        other = replace(saves, every_seconds=every)
        return simulate(replace(fleet, spares=nodes), other, troubles, seconds=seconds, seeds=seeds, seed=seed)

    every = saves.every_seconds
    found = [tried(0, every)]
    if any(trouble.takes_node for trouble in troubles):
        while len(found) < 3 or found[-1].lost[Lost.WAITING] > SHORT or found[-1].of_paid > found[-2].of_paid:
            found.append(tried(max(1, 2 * found[-1].fleet.spares), every))
    if spares is not None and spares not in [one.fleet.spares for one in found]:
        found = sorted([*found, tried(spares, every)], key=lambda one: one.fleet.spares)
    taken = max(found, key=lambda one: one.of_paid).fleet.spares if spares is None else spares
    return Advice(
        spares=tuple(found), intervals=tuple(tried(taken, factor * every) for factor in _INTERVALS), taken=taken
    )


@dataclass(slots=True)
class _Run:
    """One run: its clock, what of the time was useful, and what the rest went to."""

    fleet: Fleet
    saves: Saves
    troubles: Sequence[Trouble]
    random: np.random.Generator
    useful: float = 0.0
    failures: int = 0
    lost: dict[Lost, float] = field(default_factory=lambda: dict.fromkeys(Lost, 0.0))
    by_trouble: list[float] = field(default_factory=list)
    _clock: float = 0.0
    _ran: float = 0.0  # since the run last went on from a checkpoint
    _away: list[float] = field(default_factory=list)

    def train(self, seconds: float) -> None:
        """The run has trained and been interrupted until `seconds`."""
        self.by_trouble = [0.0] * len(self.troubles)
        while self._clock < seconds:
            fails = self._clock + self._gap()
            stop = min(fails, seconds)
            self._ran += stop - self._clock
            self._clock = stop
            if fails < seconds:
                self._interrupt(until=seconds)
        done, saving = self._work()
        self.useful += done
        self.lost[Lost.SAVING] += saving

    def _gap(self) -> float:
        return float(self.random.exponential(self.fleet.seconds_between_failures))

    def _drawn(self) -> int:
        point = self.random.random() * sum(trouble.share for trouble in self.troubles)
        for place, trouble in enumerate(self.troubles):
            point -= trouble.share
            if point < 0.0:
                return place
        return len(self.troubles) - 1

    def _work(self) -> tuple[float, float]:
        """Seconds of work and of saving since the run last went on."""
        cycle = self.saves.every_seconds + self.saves.stopped_seconds
        whole, rest = divmod(self._ran, cycle)
        done = whole * self.saves.every_seconds + min(rest, self.saves.every_seconds)
        return done, self._ran - done

    def _interrupt(self, *, until: float) -> None:
        """A failure undoes what it undoes, and the run is down until it trains again, whatever strikes meanwhile."""
        while True:
            self.failures += 1
            place = self._drawn()
            trouble = self.troubles[place]
            if trouble.goes_on is not GoesOn.HERE:
                self._undo(place)
            down = self._down(trouble)
            strikes = math.inf if self.fleet.only_training else self._gap()
            cut_off = strikes < down[Lost.FOUND] + down[Lost.BACK]
            # Nothing runs that could fail while a node is waited for.
            waited = down[Lost.WAITING] if strikes > down[Lost.FOUND] else 0.0
            lasted = min(strikes + waited if cut_off else sum(down.values()), until - self._clock)
            self._lose(down, lasted, place)
            self._clock += lasted
            if not cut_off or self._clock >= until:
                return

    def _undo(self, place: int) -> None:
        every, stopped = self.saves.every_seconds, self.saves.stopped_seconds
        goes_on = self.troubles[place].goes_on
        done, saving = self._work()
        kept = every * max(0, math.floor((self._ran - self.saves.lag_seconds) / (every + stopped)))
        if goes_on is GoesOn.SAVED:
            kept = done
        elif goes_on is GoesOn.BEFORE:
            kept = max(kept - every, -self.useful)
        self.useful += kept
        self.lost[Lost.SAVING] += saving
        self.lost[Lost.UNDONE] += done - kept
        self.by_trouble[place] += done - kept
        self._ran = 0.0

    def _down(self, trouble: Trouble) -> dict[Lost, float]:
        """Seconds until the run trains again, in order; a node that is needed is taken of the spares, or waited for."""
        while self._away and self._away[0] <= self._clock:
            heapq.heappop(self._away)
        found = self._clock + trouble.found_seconds
        if trouble.takes_node:
            heapq.heappush(self._away, found + self.fleet.return_seconds)
        short = len(self._away) - self.fleet.spares
        waiting = max(0.0, heapq.nsmallest(short, self._away)[-1] - found) if short > 0 else 0.0
        return {Lost.FOUND: trouble.found_seconds, Lost.WAITING: waiting, Lost.BACK: trouble.back_seconds}

    def _lose(self, down: Mapping[Lost, float], lasted: float, place: int) -> None:
        for kind, each in down.items():
            part = min(each, lasted)
            self.lost[kind] += part
            self.by_trouble[place] += part
            lasted -= part
