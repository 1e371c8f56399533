"""Slow ranks, waits for data and slow communication, told from the seconds that every rank says of every step.

An all-reduce makes the steps of all ranks equally long, so that what tells a slow rank is its own work: the step less
what it waited (C4D: HPCA 2025; MegaScale: 2402.15627). Pure: the same on every rank that is given the same numbers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from meshwright.spec.plan import AxisName, Design
from meshwright.train.observe.samples import coordinates

FloatArray = npt.NDArray[np.float64]

WINDOW = 16  # steps that a judgement stands on
STRIDE = 3  # steps from one judgement to the next
HELD = 2  # judgements in a row that say so before it is told
SLOW = math.log(1.2)
WELL = math.log(1.1)
RISEN = math.log(1.15)  # what has risen is only a reason to probe links
WAITING, NOT_WAITING = 0.2, 0.1  # of the step
ERRORS = 5.0  # standard errors that a judgement is above what it is held against
PAST = 32  # steps that say what is usual
WINDOWS = 24  # judgements apart that say how much they vary
_FORGETTING = 1.0 / 256.0  # of what is usual, a step
_MATTERS = 0.02  # of a step: less of it is not worth a word
_FELT = 0.05  # of a step, that more communication has to take
_DEVIATIONS = 1.4826  # standard deviations in a median absolute deviation of normal noise
_TINY = 1e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Of `ranks`, that something begins or ends: they are, or were, `ratio` times what they should be."""

    begins: bool
    ranks: tuple[int, ...]
    ratio: float


def peers_of(design: Design) -> tuple[int, ...]:
    """A label for every rank of the design: ranks of one label have the same work on the same kind of
    device, those of one stage that hold the same experts and the same part of every sequence."""
    plan = design.plan
    labels: dict[tuple[int, ...], int] = {}
    found = []
    starts = np.cumsum([group.num_devices for group in design.cluster.groups])
    for rank in range(plan.world_size):
        place = coordinates(plan, rank=rank)
        stage, context = place.get(AxisName.PIPELINE, 0), place.get(AxisName.CONTEXT, 0)
        device = rank if plan.placement is None else plan.placement[rank]
        machine = int(np.searchsorted(starts, device, side="right"))
        inside = 0
        if plan.experts is not None:
            for axis in plan.axes:
                if axis.name is not AxisName.PIPELINE:
                    inside = inside * axis.size + place[axis.name]
            inside = inside // plan.experts.tensor % plan.experts.expert
        found.append(labels.setdefault((stage, context, machine, inside), len(labels)))
    return tuple(found)


class SlowRanks:
    """Ranks whose own work takes longer than that of their peers, in `peers` those of the same label.

    A rank is slow where the middle half of its last WINDOW steps is above the median of its peers in the same steps by
    more than a fifth and by more than ERRORS standard errors, at HELD judgements in a row, and well again where it is
    above by less than a tenth. A rank without a peer is held against its own past and that of all others: what is
    uneven by design is usual there. The error is that which steps scatter by, or judgements of the past vary by where
    that is more: what comes in stretches is then no surprise.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        labels = np.asarray(peers)
        alike = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        self._alike = [members for members in alike if len(members) > 1]
        self._alone = np.array([int(members[0]) for members in alike if len(members) == 1], dtype=np.int64)
        self._own: deque[FloatArray] = deque(maxlen=WINDOW)
        self._first: list[FloatArray] = []
        self._usual: FloatArray | None = None
        self._noise = Noise()
        self._held = np.zeros(len(labels), dtype=np.int64)
        self._seen = 0
        self.slow = np.zeros(len(labels), dtype=np.bool_)
        self.suspected = False

    def see(self, own: Sequence[float], *, step_seconds: float) -> tuple[Finding, ...]:
        """The findings of a step in which every rank worked so many seconds."""
        row = np.maximum(np.asarray(own, dtype=np.float64), _TINY)
        self._own.append(row)
        self._seen += 1
        if self._usual is None:
            self._first.append(np.log(row))
            if len(self._first) == PAST:
                self._usual, self._first = np.median(self._first, axis=0), []
        if len(row) < 2 or len(self._own) < WINDOW or self._seen % STRIDE:
            return ()
        return self._judge(step_seconds)

    def _judge(self, step_seconds: float) -> tuple[Finding, ...]:
        own = np.stack(list(self._own))
        logs = np.log(own)
        middle, error = settled(self._scores(logs))
        noise = self._noise.of(middle, error, at=self._seen, usual=not self.slow.any())
        limit = max(SLOW, ERRORS * noise)
        over = middle > limit
        if over.any():
            over &= np.median(own, axis=0) * -np.expm1(-middle) > _MATTERS * step_seconds
        self.suspected = bool(self.slow.any() or (middle > WELL).any())
        wanted = np.where(self.slow, middle < WELL, over)
        self._held = np.where(wanted, self._held + 1, 0)
        turned = self._held >= HELD
        self.slow ^= turned
        self._held[turned] = 0
        if self._usual is not None:
            kept = np.where(self.slow | (middle > WELL), 0.0, STRIDE * _FORGETTING)
            self._usual = self._usual + kept * (logs[-STRIDE:].mean(axis=0) - self._usual)
        return tuple(
            Finding(begins=bool(self.slow[rank]), ranks=(int(rank),), ratio=float(np.exp(middle[rank])))
            for rank in np.flatnonzero(turned)
        )

    def _scores(self, logs: FloatArray) -> FloatArray:
        """log(own / that of the peers), shape (steps, ranks); 0 where nothing is known to hold a rank against."""
        scores = np.zeros_like(logs)
        for members in self._alike:
            scores[:, members] = logs[:, members] - median_of_others(logs[:, members])
        if len(self._alone) and self._usual is not None:
            gone = logs - self._usual
            scores[:, self._alone] = (gone - median_of_others(gone))[:, self._alone]
        return scores


class DataWaits:
    """Ranks that wait for data through more than a fifth of their steps, in the median of the last WINDOW."""

    def __init__(self) -> None:
        self._shares: deque[FloatArray] = deque(maxlen=WINDOW)
        self._most: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0
        self._held = 0
        self.waiting = False

    def see(self, waits: Sequence[float], *, step_seconds: float) -> tuple[Finding, ...]:
        """The finding of a step in which every rank waited so many seconds; its ratio is the largest share."""
        whole = max(step_seconds, _TINY)
        self._shares.append(np.asarray(waits, dtype=np.float64) / whole)
        self._most.append(max(waits) / whole)
        self._seen += 1
        few = sum(share > WAITING for share in self._most) < WINDOW // 2
        if len(self._most) < WINDOW or self._seen % STRIDE or (few and not self.waiting):
            return ()
        shares = np.median(np.stack(list(self._shares)), axis=0)
        turns = bool(shares.max() < NOT_WAITING if self.waiting else shares.max() > WAITING)
        self._held = self._held + 1 if turns else 0
        if self._held < HELD:
            return ()
        self.waiting, self._held = not self.waiting, 0
        ranks = tuple(int(rank) for rank in np.flatnonzero(shares > WAITING)) if self.waiting else ()
        return (Finding(begins=self.waiting, ranks=ranks, ratio=float(shares.max())),)


class Communication:
    """What every rank waits in collectives, whoever it waits for: the least that any of them waited.

    It has risen where the middle half of the last WINDOW steps is above the past, which they are `ratio` times, by more
    than RISEN, by ERRORS standard errors and by a twentieth of the step. Where a rank is slow the others wait for it
    and that one does not, so that this tells the network from a rank.
    """

    def __init__(self) -> None:
        self._least: deque[float] = deque(maxlen=WINDOW)
        self._first: list[float] = []
        self._usual: float | None = None
        self._noise = Noise()
        self._seen = 0
        self._held = 0
        self.ratio = 1.0
        self.risen = False

    def see(self, waited: Sequence[float], *, step_seconds: float) -> tuple[Finding, ...]:
        """The finding of a step in which every rank was held so many seconds."""
        self._least.append(min(waited))
        self._seen += 1
        if self._usual is None:
            self._first.append(min(waited))
            if len(self._first) == PAST:
                self._usual, self._first = float(np.median(self._first)), []
            return ()
        if self._seen % STRIDE:
            return ()
        return self._judge(step_seconds)

    def _judge(self, step_seconds: float) -> tuple[Finding, ...]:
        assert self._usual is not None, "judged against the past"
        floor = _MATTERS * step_seconds + _TINY
        scores = np.log((np.array(self._least) + floor) / (self._usual + floor))[:, None]
        middle, error = settled(scores)
        rise = float(middle[0])
        self.ratio = math.exp(rise)
        limit = max(RISEN, ERRORS * self._noise.of(middle, error, at=self._seen, usual=not self.risen))
        felt = float(np.median(self._least)) - self._usual > _FELT * step_seconds
        turns = rise < WELL if self.risen else rise > limit and felt
        self._held = self._held + 1 if turns else 0
        if abs(rise) < WELL:
            self._usual += STRIDE * _FORGETTING * (float(np.median(self._least)) - self._usual)
        if self._held < HELD:
            return ()
        self.risen, self._held = not self.risen, 0
        return (Finding(begins=self.risen, ranks=(), ratio=self.ratio),)


class Noise:
    """How much judgements vary: by the scatter of their steps, or from window to window where that is more.

    A window counts once the one after it has passed and nothing unusual was told in either.
    """

    def __init__(self) -> None:
        self._windows: deque[FloatArray] = deque(maxlen=WINDOWS)
        self._last: FloatArray | None = None
        self._last_at = 0
        self._varies = 0.0

    def of(self, middle: FloatArray, error: float, *, at: int, usual: bool) -> float:
        """The standard error at step `at`; windows that are kept share no step with each other."""
        found = max(error, self._varies)
        if not usual:
            self._last, self._last_at = None, at
        elif at - self._last_at >= WINDOW:
            if self._last is not None:
                self._windows.append(self._last)
            self._last, self._last_at = middle, at
            if len(self._windows) >= WINDOWS // 4:
                _, scatter = _spread(np.stack(list(self._windows)))
                self._varies = _DEVIATIONS * scatter
        return found


def settled(scores: FloatArray) -> tuple[FloatArray, float]:
    """The mean of the middle half of (steps, ranks) by rank, shape (ranks,), and its standard error, of the median
    rank: steps that stutter, up to a quarter of them, do not move the one nor a slow rank the other."""
    steps = len(scores)
    ordered, scatter = _spread(scores)
    middle = ordered[steps // 4 : steps - steps // 4].mean(axis=0)
    # The mean of the middle half of normal noise is 1.1 times as uncertain as the mean of all.
    return middle, 1.1 * _DEVIATIONS * scatter / math.sqrt(steps)


def _spread(scores: FloatArray) -> tuple[FloatArray, float]:
    """(steps, ranks) in ascending order by rank, and the median absolute deviation of the median rank."""
    ordered = np.sort(scores, axis=0)
    apart = np.sort(np.abs(scores - _middle(ordered)), axis=0)
    return ordered, float(_middle(np.sort(_middle(apart))))


def _middle(ordered: FloatArray) -> FloatArray:
    """The median along the first axis of what is in ascending order there; numpy's own takes ten times as long."""
    count = len(ordered)
    middle: FloatArray = 0.5 * (ordered[(count - 1) // 2] + ordered[count // 2])
    return middle


def median_of_others(values: FloatArray) -> FloatArray:
    """For each of (..., ranks) the median of the others; two ranks or more."""
    count = values.shape[-1]
    order = np.argsort(values, axis=-1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=-1)
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.broadcast_to(np.arange(count), order.shape), axis=-1)

    def other(index: int) -> FloatArray:
        """The value at `index` of the others in ascending order."""
        return np.take_along_axis(ordered, np.where(places > index, index, index + 1), axis=-1)

    rest = count - 1
    return 0.5 * (other((rest - 1) // 2) + other(rest // 2))
