"""How good predictions of published runs are: error, bias, order, regret, memory and interval, source by source."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from statistics import fmean, median

from meshwright.replay.pairs import TIE, Order, Told, order
from meshwright.replay.regimes import Regime
from meshwright.replay.runs import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run that was predicted: seconds of a step, between which nine of ten should lie, and the memory it needs.

    `memory_bytes` is None where the run did not run, or its source prints no peak. `doubts` are those of the report,
    launches apart from other compute.
    """

    run: Run
    predicted_seconds: float
    low_seconds: float
    high_seconds: float
    fits: bool
    predicted_bytes: float
    memory_bytes: float | None
    fit_probability: float | None = None
    regime: Regime = Regime.COMPUTE
    doubts: Mapping[str, float] = field(default_factory=dict)

    @property
    def inside(self) -> bool:
        """Whether the measured step lies in the interval of the prediction."""
        return self.low_seconds <= (self.run.seconds or 0.0) <= self.high_seconds

    @property
    def error(self) -> float | None:
        """log(predicted / measured)."""
        seconds = self.run.seconds
        return math.log(self.predicted_seconds / seconds) if seconds else None

    @property
    def pace(self) -> float:
        """Seconds of a step for one token on one device as measured; what may be compared in a group."""
        seconds, tokens, devices = self.run.seconds, self.run.tokens, self.run.number("n_gpus")
        assert seconds is not None
        assert tokens is not None
        assert devices is not None
        return seconds * devices / tokens

    @property
    def predicted_pace(self) -> float:
        seconds = self.run.seconds
        assert seconds is not None
        return self.pace * self.predicted_seconds / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """Runs that died of memory or ran, and whether the prediction accepts or refuses them."""

    died_refused: int
    died_accepted: int
    ran_refused: int
    ran_accepted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Percent throughout; None where a source has nothing to score. Errors are averaged in groups, then over them.

    `mape_one_factor` allows one factor for each (software, device, precision), fitted without the group it is used
    on; `mape_calibrated` what ten runs of the source tell of its others (replay/learned.py). `pairwise_accuracy` and
    `kendall_tau` are over pairs of a group that differ by more than the noise, `pairwise_ceiling` is the most that any
    prediction made from plans can reach, where one plan was measured several times.
    `regret_at_k`: how much slower than the best of a group is the best of the k that are predicted fastest.
    `interval_coverage`: measured steps inside the interval that should hold nine of ten.
    """

    rows: int
    predicted: int
    inexpressible: int
    mape_zero_shot: float | None
    mape_one_factor: float | None
    mape_calibrated: float | None
    bias: float | None
    pairwise_accuracy: float | None
    pairwise_ceiling: float | None
    kendall_tau: float | None
    regret_at_1: float | None
    regret_at_3: float | None
    oom: OutOfMemory
    memory_mape: float | None
    interval_coverage: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RegimeScores:
    """Timed runs of one regime, and in percent their mean error, bias and how many lie inside the interval.

    Every point weighs as in the mean of sources: a source with few of its runs here says little.
    """

    runs: int
    sources: int
    mape: float
    bias: float
    interval_coverage: float


def score(
    points: Sequence[Point], *, rows: int, factors: Mapping[int, float], told: Mapping[int, float] | None = None
) -> Scores:
    """Scores of one source; `factors` is the logarithm of every row's factor by its line, `told` that of what measured
    runs tell of each of the others.
    """
    timed = [point for point in points if point.run.seconds is not None]
    ranked = [found for found in _groups(p for p in timed if p.run.ranks_strategies) if len(found) > 1]
    orders = [found for found in map(_order, ranked) if found is not None]

    others = [point for point in timed if point.run.line in (told or {})]

    def by_group(value: Callable[[Point], float], members: Sequence[Point] = timed) -> float | None:
        return _mean([fmean(map(value, found)) for found in _groups(members)])

    accuracy, most = _mean([found.right for found in orders]), _mean([found.most for found in orders])
    measured = [point for point in points if point.memory_bytes]
    return Scores(
        rows=rows,
        predicted=len(points),
        inexpressible=rows - len(points),
        mape_zero_shot=by_group(lambda p: 100.0 * abs(math.expm1(_error(p)))),
        mape_one_factor=by_group(lambda p: 100.0 * abs(math.expm1(_error(p) + factors[p.run.line]))),
        mape_calibrated=by_group(lambda p: 100.0 * abs(math.expm1(_error(p) + (told or {})[p.run.line])), others),
        bias=by_group(lambda p: 100.0 * math.expm1(_error(p))),
        pairwise_accuracy=None if accuracy is None else 100.0 * accuracy,
        pairwise_ceiling=None if most is None else 100.0 * most,
        kendall_tau=None if accuracy is None else 100.0 * (2.0 * accuracy - 1.0),
        regret_at_1=_mean([100.0 * _regret(found, 1) for found in ranked]),
        regret_at_3=_mean([100.0 * _regret(found, 3) for found in ranked]),
        oom=_out_of_memory(points),
        memory_mape=_mean([fmean(map(_memory_error, found)) for found in _groups(measured)]),
        interval_coverage=by_group(lambda p: 100.0 * p.inside),
    )


def overall(sources: Iterable[Scores]) -> Scores:
    """The mean over sources of every score, so that no large table decides; counts are added."""
    found = tuple(sources)

    def mean(name: str) -> float | None:
        return _mean([value for value in (getattr(source, name) for source in found) if value is not None])

    def total(name: str) -> int:
        return sum(getattr(source.oom, name) for source in found)

    return Scores(
        rows=sum(source.rows for source in found),
        predicted=sum(source.predicted for source in found),
        inexpressible=sum(source.inexpressible for source in found),
        mape_zero_shot=mean("mape_zero_shot"),
        mape_one_factor=mean("mape_one_factor"),
        mape_calibrated=mean("mape_calibrated"),
        bias=mean("bias"),
        pairwise_accuracy=mean("pairwise_accuracy"),
        pairwise_ceiling=mean("pairwise_ceiling"),
        kendall_tau=mean("kendall_tau"),
        regret_at_1=mean("regret_at_1"),
        regret_at_3=mean("regret_at_3"),
        oom=OutOfMemory(
            died_refused=total("died_refused"),
            died_accepted=total("died_accepted"),
            ran_refused=total("ran_refused"),
            ran_accepted=total("ran_accepted"),
        ),
        memory_mape=mean("memory_mape"),
        interval_coverage=mean("interval_coverage"),
    )


def by_regime(points: Sequence[Point]) -> dict[str, RegimeScores]:
    """Scores of the timed runs of every regime that has some."""
    timed = [point for point in points if point.run.seconds is not None]
    weights = _weights(timed)

    def mean(members: Sequence[Point], value: Callable[[Point], float]) -> float:
        return sum(weights[p.run.line] * value(p) for p in members) / sum(weights[p.run.line] for p in members)

    found: dict[Regime, list[Point]] = {name: [p for p in timed if p.regime is name] for name in Regime}
    return {
        name.value: RegimeScores(
            runs=len(members),
            sources=len({point.run.source for point in members}),
            mape=mean(members, lambda p: 100.0 * abs(math.expm1(_error(p)))),
            bias=mean(members, lambda p: 100.0 * math.expm1(_error(p))),
            interval_coverage=mean(members, lambda p: 100.0 * p.inside),
        )
        for name, members in found.items()
        if members
    }


def _weights(points: Sequence[Point]) -> dict[int, float]:
    """What each point counts, by line: sources are alike, groups of a source, and points of a group."""
    sources: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        sources[point.run.source].append(point)
    return {
        point.run.line: 1.0 / (len(groups) * len(group))
        for groups in map(_groups, sources.values())
        for group in groups
        for point in group
    }


def leave_one_group_out(points: Sequence[Point]) -> dict[int, float]:
    """Minus the median error of all other groups of the same stack, by line; 0 where there is no other group."""
    stacks: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        if point.error is not None:
            stacks[point.run.stack][point.run.group].append(point.error)
    medians = {stack: {group: median(errors) for group, errors in groups.items()} for stack, groups in stacks.items()}

    @cache
    def factor(stack: tuple[str, str, str], group: str) -> float:
        others = [value for other, value in medians.get(stack, {}).items() if other != group]
        return -median(others) if others else 0.0

    return {point.run.line: factor(point.run.stack, point.run.group) for point in points}


def _error(point: Point) -> float:
    assert point.error is not None
    return point.error


def _memory_error(point: Point) -> float:
    return 100.0 * abs(point.predicted_bytes / (point.memory_bytes or 1.0) - 1.0)


def _groups(points: Iterable[Point]) -> list[list[Point]]:
    found: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        found[point.run.group].append(point)
    return list(found.values())


def _order(points: Sequence[Point]) -> Order | None:
    return order([Told(pace=each.pace, predicted=each.predicted_pace, noise=each.run.noise) for each in points])


def _regret(points: Sequence[Point], first: int) -> float:
    """In the mean over all choices among those whose predictions tie."""
    tries = min(first, len(points))
    last = sorted(point.predicted_pace for point in points)[tries - 1]
    sure = [point.pace for point in points if point.predicted_pace < last * (1.0 - TIE)]
    tied = [point.pace for point in points if abs(point.predicted_pace / last - 1.0) <= TIE]
    best = fmean(min(*sure, *some, math.inf) for some in combinations(tied, tries - len(sure)))
    return best / min(point.pace for point in points) - 1.0


def _out_of_memory(points: Sequence[Point]) -> OutOfMemory:
    def count(*, died: bool, fits: bool) -> int:
        return sum((p.run.died if died else p.run.ran) and p.fits is fits for p in points)

    return OutOfMemory(
        died_refused=count(died=True, fits=False),
        died_accepted=count(died=True, fits=True),
        ran_refused=count(died=False, fits=False),
        ran_accepted=count(died=False, fits=True),
    )


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
