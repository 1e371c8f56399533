"""Goodput: what the wall-clock time of a run went to, through every launch of it, and what each interruption cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

UNTOLD = "it ended without a word"
_ASKED = "it was asked to stop"
_DONE = "it had done the steps it was asked for"


class Spent(StrEnum):
    """What a stretch of time was: every second of a run is of one of these.

    Useful are steps that the present state stands on; undone ones were lost to a kill or a roll-back. Slow is what a
    step took beyond the usual where that is more than once again, as first steps do. Failing is from the last sign of
    life to the end of the workers; down is from there to the next launch, and asleep the same where the end was asked
    for.
    """

    USEFUL = "useful steps"
    DATA = "waiting for data"
    SLOW = "slow steps"
    UNDONE = "undone steps"
    SPOILT = "spoilt steps"
    EVALUATION = "evaluation"
    CHECKPOINT = "checkpoints"
    START = "start-up"
    RESTART = "restarts"
    REPLAN = "re-planning"
    FAILING = "failing"
    DOWN = "down"
    ASLEEP = "asleep"
    END = "shutdown"


class Moment(StrEnum):
    """What a run was at until a mark, since the mark before."""

    LAUNCHED = "launched"
    STARTED = "started"
    STEPS = "steps"
    SPOILT = "spoilt"
    EVALUATED = "evaluated"
    SAVED = "saved"
    ROLLED_BACK = "rolled back"
    REPLANNED = "re-planned"
    REGROUPED = "regrouped"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Until `at`, seconds of the system clock, and since the mark before, the run was at `what`.

    `step` is where it then stands; STEPS are those from `first` on, `data_seconds` and `slow_seconds` of which were
    waited and lost. LAUNCHED is with the digest of `plan`, at the last step in the metrics; STARTED says `why` where it
    is not on from the newest checkpoint; ENDED says `why` where that is a failure, whether it was `asked` for, and
    whether it had `done` its steps; ROLLED_BACK `why` where it is for another reason than a step that was spoilt;
    REGROUPED why ranks changed, and `asked` where none was lost.
    """

    what: Moment
    at: float
    step: int = 0
    first: int = 0
    data_seconds: float = 0.0
    slow_seconds: float = 0.0
    plan: str = ""
    why: str = ""
    asked: bool = False
    done: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A restart, a roll-back or a change of ranks, on from `step`: why, the steps that it undid, and the seconds that
    were lost by it."""

    step: int
    why: str
    undone_steps: int
    seconds: Mapping[Spent, float]

    @property
    def lost_seconds(self) -> float:
        return sum(self.seconds.values())

    @property
    def was_wanted(self) -> bool:
        """Whether the run ended as somebody had asked, and did not fail."""
        return self.why in (_ASKED, _DONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The time of a run from its first launch to its newest mark: `seconds` of all kinds sum to `wall_seconds`.

    `ettr` is the useful share of the time that the run had machines for, which is all but that asleep (effective
    training time ratio; 2509.16293).
    """

    wall_seconds: float
    ettr: float
    steps: int
    launches: int
    failures: int
    seconds: Mapping[Spent, float]
    interruptions: tuple[Interruption, ...] = ()

    @property
    def held_seconds(self) -> float:
        """Those that the run had machines for."""
        return self.wall_seconds - self.seconds.get(Spent.ASLEEP, 0.0)


_SPOILT = "a loss or a norm that is not finite"
_PLAIN = {
    Moment.SPOILT: Spent.SPOILT,
    Moment.EVALUATED: Spent.EVALUATION,
    Moment.SAVED: Spent.CHECKPOINT,
    Moment.REPLANNED: Spent.REPLAN,
}
_OF_STEPS = (Spent.USEFUL, Spent.DATA, Spent.SLOW)


def account(marks: Iterable[Mark]) -> Goodput | None:
    """What the time between the first and the last of `marks` went to; None where there is none."""
    book = Account()
    for mark in marks:
        book.add(mark)
    return book.goodput()


@dataclass(slots=True, kw_only=True)
class _Steps:
    """Steps [first, last] that are not undone, and their seconds by kind."""

    first: int
    last: int
    seconds: dict[Spent, float]


@dataclass(slots=True)
class Account:
    """Adds marks up one by one, each in constant time."""

    began: float | None = None
    at: float = 0.0
    launches: int = 0
    failures: int = 0
    seconds: dict[Spent, float] = field(default_factory=lambda: dict.fromkeys(Spent, 0.0))
    interruptions: list[Interruption] = field(default_factory=list)
    _lasting: list[_Steps] = field(default_factory=list)
    _ended: Mark | None = None
    _plan: str = ""
    _launched: str = ""
    _reached: int = 0
    _lost: dict[Spent, float] = field(default_factory=dict)
    _why: str = ""

    def add(self, mark: Mark) -> None:
        """The time since the mark before is of the kind that `mark` says; a clock that went back stood still."""
        if self.began is None:
            self.began = self.at = mark.at
        seconds, self.at = max(mark.at - self.at, 0.0), max(mark.at, self.at)
        if mark.what is Moment.LAUNCHED:
            self._launch(mark, seconds)
        elif mark.what is Moment.STARTED:
            self._start(mark, seconds)
        elif mark.what is Moment.STEPS:
            self._step(mark, seconds)
        elif mark.what is Moment.ROLLED_BACK:
            self._why = mark.why or _SPOILT
            self._lose(Spent.RESTART, seconds)
            self._interrupt(mark.step)
        elif mark.what is Moment.REGROUPED:
            self._why = mark.why
            self.failures += not mark.asked
            self._lose(Spent.REPLAN, seconds)
            self._interrupt(mark.step)
        elif mark.what is Moment.ENDED:
            self._end(mark, seconds)
        else:
            self.seconds[_PLAIN[mark.what]] += seconds
            if mark.what is Moment.SPOILT:
                self._lost[Spent.SPOILT] = self._lost.get(Spent.SPOILT, 0.0) + seconds

    def ettr(self, *, useful: float = 0.0, more: float = 0.0) -> float:
        """As Goodput has it, with `more` seconds that no mark tells of yet, of which so many were `useful`."""
        held = self.at - (self.began or 0.0) - self.seconds[Spent.ASLEEP] + more
        return (self.seconds[Spent.USEFUL] + useful) / held if held > 0 else 0.0

    def goodput(self) -> Goodput | None:
        """All that was added; None where nothing was."""
        if self.began is None:
            return None
        return Goodput(
            wall_seconds=self.at - self.began,
            ettr=self.ettr(),
            steps=sum(group.last - group.first + 1 for group in self._lasting),
            launches=self.launches,
            failures=self.failures,
            seconds=dict(self.seconds),
            interruptions=tuple(self.interruptions),
        )

    def _launch(self, mark: Mark, seconds: float) -> None:
        self._launched, self._reached = mark.plan, mark.step
        self.launches += 1
        if self.launches == 1:
            return
        asked = self._ended is not None and self._ended.asked
        if asked:
            self.seconds[Spent.ASLEEP] += seconds
        else:
            self._lose(Spent.DOWN, seconds)
        if self._ended is None:
            self.failures += 1
        self._why = UNTOLD
        if self._ended is not None:
            self._why = _DONE if self._ended.done else _ASKED if asked else self._ended.why or UNTOLD
        self._ended = None

    def _start(self, mark: Mark, seconds: float) -> None:
        another = bool(self._plan) and self._launched != self._plan
        self._plan = self._launched
        if self.launches <= 1:
            self.seconds[Spent.START] += seconds
            return
        self._lose(Spent.REPLAN if another else Spent.RESTART, seconds)
        self._why = "; ".join(why for why in (self._why, mark.why) if why)
        self._interrupt(mark.step)

    def _step(self, mark: Mark, seconds: float) -> None:
        data = min(mark.data_seconds, seconds)
        slow = min(mark.slow_seconds, seconds - data)
        parts = {Spent.USEFUL: seconds - data - slow, Spent.DATA: data, Spent.SLOW: slow}
        for kind, part in parts.items():
            self.seconds[kind] += part
        self._lasting.append(_Steps(first=mark.first, last=mark.step, seconds=parts))
        self._lost.clear()

    def _end(self, mark: Mark, seconds: float) -> None:
        if mark.why:
            self._lose(Spent.FAILING, seconds)
            self.failures += self._ended is None or not self._ended.why
        else:
            self.seconds[Spent.END] += seconds
        self._ended = mark

    def _lose(self, kind: Spent, seconds: float) -> None:
        self.seconds[kind] += seconds
        self._lost[kind] = self._lost.get(kind, 0.0) + seconds

    def _interrupt(self, step: int) -> None:
        """The run stands at `step` again: what came after it is undone, and the interruption is told.

        Steps that were done after the last mark are counted; what they took is in what was lost until the next one.
        """
        marked = max(step, self._lasting[-1].last if self._lasting else 0)
        steps, undone = max(self._reached - marked, 0), 0.0
        self._reached = 0
        while self._lasting and self._lasting[-1].last > step:
            group = self._lasting.pop()
            count = group.last - group.first + 1
            gone = min(count, group.last - step)
            for kind in _OF_STEPS:
                part = group.seconds[kind] * gone / count
                self.seconds[kind] -= part
                group.seconds[kind] -= part
                undone += part
            steps += gone
            if gone < count:
                self._lasting.append(_Steps(first=group.first, last=step, seconds=group.seconds))
        self.seconds[Spent.UNDONE] += undone
        lost = {**({Spent.UNDONE: undone} if steps else {}), **self._lost}
        self.interruptions.append(Interruption(step=step, why=self._why, undone_steps=steps, seconds=lost))
        self._lost = {}
