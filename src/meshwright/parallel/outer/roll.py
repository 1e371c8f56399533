"""Roll: who has come to the open round, agreed upon in one value of the store in which ranks found each other.

A learner changes the value only by comparing and setting it, so that all of them see one order of what happened, and
nobody waits in a collective for a learner that has not come.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch.distributed as dist

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks of a learner that has come and waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What a learner comes with: it has done `steps` steps since it met in round `base`, after which all went on from
    what has this `fingerprint`. Some step of it was `spoilt`, or it was asked to `stop`."""

    steps: int
    base: int
    fingerprint: int
    stop: bool = False
    spoilt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Who came to round `number`, the first being 1, by learner."""

    number: int
    arrivals: Mapping[int, Arrival]

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(sorted(self.arrivals))

    def late(self, learner: int) -> int:
        """How many rounds have ended without `learner` since it met."""
        return self.number - 1 - self.arrivals[learner].base

    @property
    def donor(self) -> int:
        """The first of those that have what all go from; a round has one, or it does not end."""
        return next(learner for learner in self.members if not self.late(learner))

    def scale(self, learner: int) -> float:
        """What `learner` multiplies its own by, so that the plain mean over those that came counts each by its
        steps, in which all read as much (2604.21428), and less the more rounds it is late: by one over the root of one
        more than those (FedBuff, 2106.06639)."""
        counts = {each: entry.steps * (1.0 + self.late(each)) ** -0.5 for each, entry in self.arrivals.items()}
        return counts[learner] * len(counts) / sum(counts.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"round": self.number, "learners": {str(each): asdict(self.arrivals[each]) for each in self.members}}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Round:
        """The one that `to_dict` gave."""
        arrivals = {int(each): Arrival(**entry) for each, entry in told["learners"].items()}
        return cls(number=int(told["round"]), arrivals=arrivals)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A round of `learners` ends when all of them have come, or `grace_seconds` after `quorum` had; a learner that has
    come waits no longer than `patience_seconds`."""

    learners: int
    quorum: int
    grace_seconds: float
    patience_seconds: float

    def is_called(self, open_: Round) -> bool:
        """Enough have come, and one of them has what all go from."""
        fresh = any(not open_.late(learner) for learner in open_.arrivals)
        return fresh and len(open_.arrivals) >= self.quorum


class Roll:
    """The value `name` of `store`, from round `first` on; the same terms on every learner."""

    def __init__(self, store: dist.Store, *, name: str, terms: Terms, first: int) -> None:
        self._store, self._name, self._terms = store, name, terms
        self._change(None, _State(open=Round(number=first, arrivals={})))

    def open(self) -> Round:
        """The round that has not ended, and who has come to it."""
        return self._read().open

    def come(self, learner: int, arrival: Arrival, *, with_all: Callable[[int], bool]) -> Round:
        """The round that `learner` came to, once it has ended; it ends with all learners where `with_all` says so of
        its number, and where one of them was asked to stop or had a spoilt step.

        Raises RuntimeError where it does not end.
        """
        state = self._read()
        while True:
            came = replace(state.open, arrivals={**state.open.arrivals, learner: arrival})
            state = self._change(state, replace(state, open=came))
            if learner in state.open.arrivals:
                return self._ended(state.open.number, with_all=with_all)

    def closed(self) -> Round:
        """The round that has ended last."""
        found = self._read().closed
        assert found is not None, "a round has ended"
        return found

    def _ended(self, number: int, *, with_all: Callable[[int], bool]) -> Round:
        began, called, pause = time.monotonic(), None, _FIRST_PAUSE
        while (state := self._read()).open.number == number:
            now = time.monotonic()
            if called is None and self._terms.is_called(state.open):
                called = now
            came = state.open.arrivals
            together = with_all(number) or any(entry.stop or entry.spoilt for entry in came.values())
            in_time = called is not None and not together and now - called >= self._terms.grace_seconds
            if called is not None and (in_time or len(came) == self._terms.learners):
                follows = Round(number=number + 1, arrivals={})
                state = self._change(state, _State(open=follows, closed=state.open))
                continue
            if now - began > self._terms.patience_seconds:
                raise RuntimeError(self._missing(state.open))
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)
        assert state.closed is not None
        assert state.closed.number == number, "no round ends before those that came to the one before have met"
        return state.closed

    def _missing(self, open_: Round) -> str:
        missing = [str(each) for each in range(self._terms.learners) if each not in open_.arrivals]
        names = f"learner{'s' * (len(missing) > 1)} {', '.join(missing)}"
        return f"timed out waiting for {names} in round {open_.number} ({self._terms.patience_seconds:g} s)"

    def _read(self) -> _State:
        return _State.of(self._store.get(self._name))

    def _change(self, before: _State | None, after: _State) -> _State:
        """The state is `after` where it was `before`; what it is then."""
        text = "" if before is None else before.text
        return _State.of(self._store.compare_set(self._name, text, after.text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """The value: the round that is open, and the one before it."""

    open: Round
    closed: Round | None = None

    @property
    def text(self) -> str:
        told = [self.open.to_dict(), None if self.closed is None else self.closed.to_dict()]
        return json.dumps(told, separators=(",", ":"))

    @classmethod
    def of(cls, text: bytes) -> _State:
        opened, closed = json.loads(text)
        return cls(open=Round.of(opened), closed=None if closed is None else Round.of(closed))
