"""Soak: random faults of a mix, the same for the same seed, at random moments of training, of saves and of starts."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import accumulate

from meshwright.catalog.failure_mix import Cause, Mix
from meshwright.spec.errors import ConfigError, Problem
from meshwright.spec.faults import At, CheckpointPart, Fault, FaultKind, Moment

_AT_SAVE, _AT_START = 0.25, 0.15
_SHORT_SECONDS = (0.5, 3.0)
_ENDING = (FaultKind.KILL, FaultKind.CORRUPT, FaultKind.PREEMPT)  # after these the run starts again at once


def draw(
    mix: Mix,
    *,
    faults: int,
    seed: int,
    ranks: int,
    every_seconds: float,
    patience_seconds: float,
    can_cut: bool,
) -> tuple[Fault, ...]:
    """`faults` faults, on average `every_seconds` of undisturbed training apart (exponentially distributed).

    A quarter of them waits for the next save, and some that follow one after which the run starts again at once come
    while it starts. Half of the hangs and of the cuts in the network are over before peers have waited for
    `patience_seconds`. Where the network cannot be cut, a cut is a rank that hangs as long. Raises ConfigError for a
    number of faults or seconds that is none, and for a seed below 0, which draws as its opposite does.
    """
    if seed < 0:
        raise ConfigError(Problem(what=f"{seed} is below 0", where="--seed", fix="0, or more"))
    if faults < 1 or not 0 < every_seconds < math.inf:
        fix = "at least one fault, and a time above zero between them"
        raise ConfigError(Problem(what=f"{faults} faults every {every_seconds:g} s", where="--faults", fix=fix))
    numbers = random.Random(seed)
    gaps = [numbers.expovariate(1.0 / every_seconds) for _ in range(faults)]
    causes = numbers.choices(mix.causes, weights=[cause.count for cause in mix.causes], k=faults)
    found: list[Fault] = []
    for cause, at in zip(causes, accumulate(gaps), strict=True):
        moment = Moment(seconds=max(at, 1e-3), at=_place(numbers))
        if moment.at is At.START:
            # One that waits for a start which nothing brings about would never come.
            starts = bool(found) and found[-1].kind in _ENDING and found[-1].moment.at is not At.START
            moment = replace(found[-1].moment, at=At.START) if starts else replace(moment, at=At.ANY)
        found.append(_fault(cause, moment, numbers, ranks=ranks, patience=patience_seconds, can_cut=can_cut))
    return tuple(found)


def _place(numbers: random.Random) -> At:
    point = numbers.random()
    return At.SAVE if point < _AT_SAVE else At.START if point < _AT_SAVE + _AT_START else At.ANY


def _fault(
    cause: Cause, moment: Moment, numbers: random.Random, *, ranks: int, patience: float, can_cut: bool
) -> Fault:
    kind = cause.fault
    rank = None if cause.whole_host else numbers.randrange(ranks)
    short = numbers.uniform(*_SHORT_SECONDS) if numbers.random() < 0.5 else None
    if kind is FaultKind.HANG and rank is None:
        return Fault(kind=kind, moment=moment, rank=None, seconds=short or patience)
    if kind is FaultKind.PARTITION and can_cut:
        return Fault(kind=kind, moment=moment, seconds=short or patience + _SHORT_SECONDS[1])
    if kind in (FaultKind.HANG, FaultKind.PARTITION):
        return Fault(kind=FaultKind.HANG, moment=moment, rank=rank, seconds=short)
    if kind is FaultKind.SLOW:
        return Fault(kind=kind, moment=moment, rank=rank, factor=round(numbers.uniform(1.3, 3.0), 2), steps=20)
    if kind is FaultKind.CORRUPT:
        # A checkpoint is spoilt where it lies: nothing waits for it to be written.
        part, at = numbers.choice(list(CheckpointPart)), Moment(seconds=moment.seconds)
        return Fault(kind=kind, moment=at, part=part)
    if kind is FaultKind.KILL:
        return Fault(kind=kind, moment=moment, rank=rank)
    return Fault(kind=kind, moment=moment)
