"""Faults: what is done to a run on purpose, and when, read from what a person writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from meshwright.spec.codec import nearest
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.units import NotRead, parse_seconds


class FaultKind(StrEnum):
    """What can be done to a run from outside.

    `hang` stops a rank, `slow` stops it part of the time, `corrupt` turns bits of the newest checkpoint and kills a
    rank, `disk-full` lets no file of the run grow, `partition` takes the network away, `preempt` is a scheduler's
    SIGTERM.
    """

    KILL = "kill"
    HANG = "hang"
    SLOW = "slow"
    CORRUPT = "corrupt"
    DISK_FULL = "disk-full"
    PARTITION = "partition"
    PREEMPT = "preempt"


class At(StrEnum):
    """What a fault waits for: nothing, the next save being written, or the next launch being built."""

    ANY = "any"
    SAVE = "save"
    START = "start"


class CheckpointPart(StrEnum):
    """What of a checkpoint is spoilt."""

    TENSORS = "tensors"
    MANIFEST = "manifest"
    MARKER = "marker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """From step `step` and after `seconds` of training undisturbed, when `at` says."""

    step: int = 0
    seconds: float = 0.0
    at: At = At.ANY

    def __str__(self) -> str:
        parts = [] if self.at is At.ANY else [self.at.value]
        parts += [f"step={self.step}"] if self.step else []
        parts += [f"seconds={self.seconds:g}"] if self.seconds or not parts else []
        return ",".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `rank` is the plan's, None all of them and their launcher; `seconds` how long it lasts, None until
    the launch has ended. A slow rank takes `factor` times as long for `steps` steps."""

    kind: FaultKind
    moment: Moment
    rank: int | None = 0
    seconds: float | None = None
    factor: float = 1.5
    steps: int = 20
    part: CheckpointPart = CheckpointPart.TENSORS

    def __str__(self) -> str:
        settings = {name: _WRITERS[name](self) for name in SETTINGS[self.kind]}
        told = ",".join(f"{name}={value}" for name, value in settings.items() if value)
        return f"{self.kind.value} {told}@{self.moment}"


SETTINGS: Mapping[FaultKind, tuple[str, ...]] = {
    FaultKind.KILL: ("rank",),
    FaultKind.HANG: ("rank", "seconds"),
    FaultKind.SLOW: ("rank", "factor", "steps"),
    FaultKind.CORRUPT: ("part",),
    FaultKind.DISK_FULL: ("seconds",),
    FaultKind.PARTITION: ("seconds",),
    FaultKind.PREEMPT: (),
}
LEAST_FACTOR, MOST_FACTOR = 1.1, 20.0
_WRITERS: Mapping[str, Callable[[Fault], str]] = {
    "rank": lambda fault: "all" if fault.rank is None else str(fault.rank),
    "seconds": lambda fault: "" if fault.seconds is None else f"{fault.seconds:g}",
    "factor": lambda fault: f"{fault.factor:g}",
    "steps": lambda fault: str(fault.steps),
    "part": lambda fault: fault.part.value,
}
_EXAMPLES = {
    FaultKind.KILL: "rank=2@step=40",
    FaultKind.HANG: "rank=1,seconds=5@step=40",
    FaultKind.SLOW: "rank=1,factor=1.5,steps=20@step=40",
    FaultKind.CORRUPT: "part=tensors@step=40",
    FaultKind.DISK_FULL: "@save",
    FaultKind.PARTITION: "seconds=5@step=40",
    FaultKind.PREEMPT: "@seconds=30",
}


def read_fault(kind: FaultKind, text: str) -> Fault:
    """The fault that `rank=2@step=40` says of its kind. Raises ConfigError with all that is wrong with it."""
    return _Reader(kind, text).read()


def check_faults(faults: Iterable[Fault], *, ranks: int, steps: int, kept: int, can_cut: str) -> None:
    """Raises ConfigError with every fault that a run of so many ranks and steps, which keeps `kept` checkpoints (0:
    all), cannot have. `can_cut` is why no network can be cut here, "" where it can be."""
    problems = []
    for fault in faults:
        where = f"--{fault}"
        if fault.rank is not None and fault.rank >= ranks:
            what = f"there is no rank {fault.rank} in a plan of {ranks}"
            problems.append(Problem(what=what, where=where, fix=f"0 to {ranks - 1}, or all"))
        if fault.moment.step > steps:
            what = f"the run has {steps:,} steps and ends before step {fault.moment.step:,}"
            problems.append(Problem(what=what, where=where, fix="an earlier step, or a longer run"))
        if fault.kind is FaultKind.CORRUPT and kept == 1:
            what = "the run keeps one checkpoint, and none would be left"
            problems.append(Problem(what=what, where=where, fix="--set job.checkpoint.keep=2"))
        if fault.kind is FaultKind.PARTITION and can_cut:
            problems.append(Problem(what="the network cannot be cut here", where=where, why=can_cut))
    if problems:
        raise ConfigError(problems)


class _Reader:
    """Reads one fault and gathers what is wrong with it."""

    def __init__(self, kind: FaultKind, text: str) -> None:
        self._kind, self._where = kind, f"--{kind.value} {text}"
        self._before, self._told, self._after = text.partition("@")
        self._problems: list[Problem] = []

    def read(self) -> Fault:
        given = self._pairs(self._before, known=SETTINGS[self._kind], alone=())
        when = self._pairs(self._after, known=("step", "seconds"), alone=(At.SAVE.value, At.START.value))
        if not when and not self._problems:
            self._wrong("it does not say when", fix=f"for example {_EXAMPLES[self._kind]}")
        fault = Fault(
            kind=self._kind,
            moment=self._moment(when),
            rank=self._rank(given.get("rank")),
            seconds=self._seconds(given.get("seconds")),
            factor=self._number(given.get("factor"), least=LEAST_FACTOR, most=MOST_FACTOR, plain=1.5),
            steps=self._count(given.get("steps"), name="steps", plain=20),
            part=self._part(given.get("part")),
        )
        self._check(fault)
        if self._problems:
            raise ConfigError(self._problems)
        return fault

    def _pairs(self, text: str, *, known: tuple[str, ...], alone: tuple[str, ...]) -> dict[str, str]:
        found: dict[str, str] = {}
        for word in (part.strip() for part in text.split(",")):
            name, equals, value = (part.strip() for part in word.partition("="))
            if not word:
                continue
            if name not in (alone if not equals else known):
                names = (*known, *alone)
                fix = nearest(name, names) if names else "it takes none: write @ and when"
                self._wrong(f"{word!r} is not a setting of it", fix=fix)
            elif name in found:
                self._wrong(f"{name} is said twice")
            else:
                found[name] = value
        return found

    def _moment(self, when: Mapping[str, str]) -> Moment:
        at = [each for each in (At.SAVE, At.START) if each.value in when]
        if len(at) > 1:
            self._wrong("a fault comes at a save or at a start, not at both")
        return Moment(
            step=self._count(when.get("step"), name="step", plain=0),
            seconds=self._seconds(when.get("seconds")) or 0.0,
            at=at[0] if at else At.ANY,
        )

    def _check(self, fault: Fault) -> None:
        endless = fault.seconds is None
        if fault.kind is FaultKind.HANG and fault.rank is None and endless:
            self._wrong("all ranks and their launcher would hang for ever", fix="seconds=5 says how long")
        if fault.kind is FaultKind.PARTITION and endless:
            self._wrong("it does not say how long", fix=f"for example {_EXAMPLES[self._kind]}")

    def _rank(self, text: str | None) -> int | None:
        if text is None:
            return 0
        if text == "all":
            return None
        return self._count(text, name="rank", plain=0, least=0)

    def _count(self, text: str | None, *, name: str, plain: int, least: int = 1) -> int:
        if text is None:
            return plain
        if text.isdecimal() and len(text) < 10 and int(text) >= least:
            return int(text)
        self._wrong(f"{text!r} is not a {name.removesuffix('s')}" + (", nor all" if name == "rank" else ""))
        return plain

    def _number(self, text: str | None, *, least: float, most: float, plain: float) -> float:
        if text is None:
            return plain
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if least <= value <= most:
            return value
        self._wrong(f"{text!r} is not a factor from {least:g} to {most:g}")
        return plain

    def _seconds(self, text: str | None) -> float | None:
        if text is None:
            return None
        try:
            value = parse_seconds(text)
        except NotRead as error:
            self._wrong(error.what, fix=error.fix)
            return 1.0
        if 0.0 < value < 1e7:
            return value
        self._wrong(f"{text!r} is not a time above zero")
        return 1.0

    def _part(self, text: str | None) -> CheckpointPart:
        names = [part.value for part in CheckpointPart]
        if text is not None and text not in names:
            self._wrong(f"{text!r} is no part of a checkpoint", fix=nearest(text, names))
        return CheckpointPart(text) if text in names else CheckpointPart.TENSORS

    def _wrong(self, what: str, *, fix: str = "") -> None:
        self._problems.append(Problem(what=what, where=self._where, fix=fix))
