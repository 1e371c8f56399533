"""List scheduling: each rank takes the best operation that it can start, and fills gaps with weight gradients."""

from __future__ import annotations

import random
from dataclasses import dataclass
from heapq import heappop, heappush

from meshwright.schedule.timing import Timing
from meshwright.schedule.workload import Rows, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How ranks choose. `caps[rank]`: forwards ahead of weight gradients, in microbatches of all its stages, before
    backwards go first; `patience`: the share of a weight gradient's seconds that a rank rather waits; `forward_first`:
    forwards below the cap go before backwards; `reserve`: a microbatch starts on a rank only where there is room for
    it on all of the rank's stages at once; `deep`: of two forwards the later stage's;
    `clear`: a rank without room for a forward makes room before it does anything else; `noise`: the share of choices
    that are left to chance, by `seed`.
    """

    caps: tuple[float, ...]
    patience: float = 0.0
    forward_first: bool = False
    reserve: bool = True
    deep: bool = True
    clear: bool = False
    noise: float = 0.0
    seed: int = 0


class ListSchedule:
    """One pass over a workload; `rows` is the outcome of `run`, None where it came to a dead end."""

    def __init__(self, work: Workload, timing: Timing, manner: Manner) -> None:
        self._work, self._timing, self._manner = work, timing, manner
        self._counts = [[0] * work.stages for _ in range(3)]
        self._ends: dict[int, float] = {}
        self._held = [0.0] * work.ranks
        self._rows: Rows = [[] for _ in range(work.ranks)]
        self._chance = random.Random(manner.seed)

    def run(self) -> Rows | None:
        """Rows of every operation in the order in which ranks choose them as they come free."""
        free = [(0.0, rank) for rank in range(self._work.ranks)]
        left = 3 * self._work.stages * self._work.microbatches
        asleep: set[int] = set()
        while free:
            clock, rank = heappop(free)
            chosen, start = self._choose(rank, clock)
            if chosen < 0:
                if start > clock:
                    heappush(free, (start, rank))
                else:
                    asleep.add(rank)
                continue
            end = start + self._timing.seconds[chosen]
            self._do(rank, chosen, end)
            left -= 1
            heappush(free, (end, rank))
            other = self._next_rank(chosen)
            if other in asleep:
                asleep.remove(other)
                heappush(free, (clock, other))
        return self._rows if left == 0 else None

    def _next_rank(self, operation: int) -> int:
        """The rank that waits for an operation; -1 where none does."""
        kind, stage, _ = self._work.parts(operation)
        following = (stage + 1, stage - 1, -1)[kind]
        return self._work.placement[following] if 0 <= following < self._work.stages else -1

    def _do(self, rank: int, chosen: int, end: float) -> None:
        kind, stage, _ = self._work.parts(chosen)
        self._counts[kind][stage] += 1
        self._ends[chosen] = end
        self._rows[rank].append(chosen)
        if kind != 1:
            size = self._work.activation_bytes[stage]
            self._held[rank] += size if kind == 0 else -size

    def _choose(self, rank: int, clock: float) -> tuple[int, float]:
        """An operation and its start; or -1 and when to look again, `clock` where only others can change anything."""
        best, later, filler, full = None, float("inf"), -1, False
        stray = self._manner.noise > 0.0 and self._chance.random() < self._manner.noise
        for stage in self._work.own[rank]:
            for kind in (0, 1, 2):
                operation, arrived = self._next(kind, stage)
                if operation < 0:
                    continue
                if kind == 0 and not self._room(rank, stage):
                    full = True
                    continue
                if kind == 2:
                    filler = operation if filler < 0 else filler
                elif arrived > clock + 1e-12:
                    later = min(later, arrived)
                else:
                    key = (self._chance.random(),) if stray else self._key(rank, kind, stage, operation)
                    best = min(best, (key, operation)) if best else (key, operation)
        if filler >= 0 and ((full and self._manner.clear) or (stray and self._chance.random() < 0.5)):
            return filler, clock
        if best:
            return best[1], clock
        if filler >= 0:
            gap = later - clock
            if gap >= self._manner.patience * self._timing.seconds[filler] or gap == float("inf"):
                return filler, clock
        return -1, later if later < float("inf") else clock

    def _next(self, kind: int, stage: int) -> tuple[int, float]:
        """The stage's next operation of a kind and when what it needs arrives; -1 where that is not known."""
        count = self._counts[kind][stage]
        if count == self._work.microbatches:
            return -1, 0.0
        operation = self._work.operation(kind, stage, count)
        needed = self._timing.needs[operation]
        if needed < 0:
            return operation, 0.0
        if needed not in self._ends:
            return -1, 0.0
        return operation, self._ends[needed] + self._timing.delay[operation]

    def _room(self, rank: int, stage: int) -> bool:
        """Whether a forward leaves room for the microbatches that the rank has begun, one after the other: the oldest
        can go forward on all of the rank's stages, and each next one when those before it are done and gone. As all
        ranks take microbatches in one order, none then waits for ever.
        """
        work, own = self._work, self._work.own[rank]
        limit = work.limit_bytes[rank] * (1.0 + 1e-9)
        held = self._held[rank] + work.activation_bytes[stage]
        if held > limit:
            return False
        forwards, weights = self._counts[0], self._counts[2]
        if self._manner.reserve:
            begun = forwards[own[0]] + (stage == own[0])
            return held + sum(work.activation_bytes[s] * (begun - forwards[s] - (s == stage)) for s in own) <= limit
        for microbatch in range(min(weights[s] for s in own), forwards[own[0]] + (stage == own[0])):
            done = [s for s in own if forwards[s] + (s == stage) > microbatch]
            missing = sum(work.activation_bytes[s] for s in own if s not in done)
            if held + missing > limit:
                return False
            held -= sum(work.activation_bytes[s] for s in done if weights[s] <= microbatch)
        return True

    def _key(self, rank: int, kind: int, stage: int, operation: int) -> tuple[float, ...]:
        """Smaller goes first."""
        microbatch = operation // 3 % self._work.microbatches
        own = self._work.own[rank]
        ahead = sum(self._counts[0][s] - self._counts[2][s] for s in own) / len(own)
        if kind == 1:
            return (1.0, microbatch, -stage)
        hungry = ahead < self._manner.caps[rank]
        first = 0.0 if hungry and self._manner.forward_first else 2.0 if hungry else 3.0
        return (first, -stage if self._manner.deep else stage, microbatch)
