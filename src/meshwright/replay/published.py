"""Replay: a prediction for every published run that a plan of ours can say, and a reason for every other."""

from __future__ import annotations

import csv
import io
import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from meshwright.cost.uncertainty import SPREADS, Cause
from meshwright.replay.express import Expressed, express
from meshwright.replay.learned import learned
from meshwright.replay.models import InexpressibleError
from meshwright.replay.pricing import Priced, in_alike_parts, priced_all, taken
from meshwright.replay.regimes import launch_share, regime
from meshwright.replay.remarks import remarks
from meshwright.replay.runs import Run, read_runs
from meshwright.replay.scores import Point, RegimeScores, Scores, by_regime, leave_one_group_out, overall, score
from meshwright.spec.errors import ConfigError, Problem, spelt_out
from meshwright.spec.paths import expanded
from meshwright.spec.report import Report, StageMemory
from meshwright.spec.written import unwritten, write_whole

_ROWS_EACH = 200  # for fewer a process costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One row: its prediction and what was assumed of it, or `reason` why there is none."""

    run: Run
    point: Point | None = None
    assumed: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """Scores over all sources, of each and by regime, every row, and how often each reason kept a row out.

    `remarks` are what the table says and nothing reads, each with its rows.
    """

    overall: Scores
    sources: Mapping[str, Scores]
    regimes: Mapping[str, RegimeScores]
    rows: tuple[Replayed, ...]
    reasons: Mapping[str, int]
    remarks: Mapping[str, int]


def validate(path: Path | str, *, progress: Callable[[int, int], None] | None = None, processes: int = 1) -> Validation:
    """Every row of `path` predicted with nothing fitted, and scored.

    `progress` is told rows done and rows in all. So many `processes` share a long table; more than one needs a caller
    that spawned processes may import. Raises ConfigError where the file is no such table; a row is never an error.
    """
    runs = read_runs(path)
    placed: dict[int, Replayed] = {}
    for part in _replayed(runs, min(processes, 1 + len(runs) // _ROWS_EACH)):
        placed.update(part)
        if progress is not None:
            progress(len(placed), len(runs))
    rows = [placed[place] for place in range(len(runs))]
    points = [row.point for row in rows if row.point is not None]
    factors = leave_one_group_out(points)
    by_source: dict[str, list[Replayed]] = defaultdict(list)
    for row in rows:
        by_source[row.run.source].append(row)
    sources = {name: _score(found, factors=factors) for name, found in by_source.items()}
    reasons = Counter(row.reason for row in rows if row.reason)
    return Validation(
        overall=overall(sources.values()),
        sources=sources,
        regimes=by_regime(points),
        rows=tuple(rows),
        reasons=dict(reasons.most_common()),
        remarks=remarks(runs),
    )


def _score(rows: Sequence[Replayed], *, factors: Mapping[int, float]) -> Scores:
    """Of the rows of one source."""
    points = [row.point for row in rows if row.point is not None]
    found = learned([point for point in points if point.run.seconds is not None])
    told = {line: error for line, error in found.error.items() if line not in found.measured} if found else {}
    return score(points, rows=len(rows), factors=factors, told=told)


def _replayed(runs: Sequence[Run], processes: int) -> Iterator[Sequence[tuple[int, Replayed]]]:
    """The rows of `runs` with their places, part by part."""
    places = in_alike_parts(runs, processes)
    parts = [[runs[place] for place in part] for part in places]
    if processes == 1:
        for part, found in zip(places, map(replay_all, parts), strict=True):
            yield list(zip(part, found, strict=True))
        return
    ignore = (signal.SIGINT, signal.SIG_IGN)
    spawn = get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=signal.signal, initargs=ignore) as pool:
        for part, found in zip(places, pool.map(replay_all, parts), strict=True):
            yield list(zip(part, found, strict=True))


def replay(run: Run) -> Replayed:
    """The prediction of one row, or why there is none."""
    return replay_all([run])[0]


def replay_all(runs: Sequence[Run]) -> list[Replayed]:
    """As `replay` of each; rows that are alike are priced together."""
    said = [_said(run) for run in runs]
    prices = iter(priced_all([one for one in said if isinstance(one, Expressed)]))
    return [
        _found(run, one, next(prices)) if isinstance(one, Expressed) else Replayed(run=run, reason=_line(one))
        for run, one in zip(runs, said, strict=True)
    ]


def _said(run: Run) -> Expressed | Exception:
    try:
        return express(run)
    except (InexpressibleError, ConfigError) as error:
        return error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _found(run: Run, expressed: Expressed, price: Priced | ConfigError) -> Replayed:
    if isinstance(price, ConfigError):
        return Replayed(run=run, reason=_line(price))
    report = price.report
    low, high = report.error_band
    printed = run.number("mem_gb")
    point = Point(
        run=run,
        predicted_seconds=report.step_seconds,
        low_seconds=low * report.step_seconds,
        high_seconds=high * report.step_seconds,
        fits=report.fits,
        fit_probability=report.fit_probability,
        regime=regime(report),
        doubts=_doubts(report),
        predicted_bytes=peak_bytes(report, run),
        memory_bytes=printed * 1e9 if printed and run.ran else None,
    )
    return Replayed(run=run, point=point, assumed=(*expressed.assumed, *taken(expressed, price.design)))


def _doubts(report: Report) -> dict[str, float]:
    """Those of the report; launches are a cause of their own, as uncertain as other compute."""
    compute = report.doubts.get(Cause.COMPUTE, 0.0)
    launches = min(SPREADS[Cause.COMPUTE] * launch_share(report), compute)
    return {**report.doubts, Cause.COMPUTE: compute - launches, "launches": launches}


def peak_bytes(report: Report, run: Run) -> float:
    """What the source's own measure of memory would see.

    An allocator does not see the context and libraries; what it reserved has its fragments; the driver sees all.
    """
    kind = run.text("mem_kind")
    return max(_seen(stage, kind) for stage in report.memory)


def _seen(stage: StageMemory, kind: str) -> float:
    if "allocated" in kind:
        return stage.allocated
    context = stage.total - stage.allocated
    if "reserved" in kind:
        return stage.reserved
    return stage.reserved + context if "nvidia-smi" in kind else stage.total


def check_writable(path: Path, *, beside: Path) -> None:
    """Raises ConfigError where predictions would replace the table itself, or cannot be written."""
    place = expanded(path)
    if place.exists() and expanded(beside).exists() and place.samefile(expanded(beside)):
        raise ConfigError(
            Problem(what="predictions would replace the table", where=str(place), fix="name another file")
        )
    if place.is_dir() or not os.access(place if place.exists() else place.absolute().parent, os.W_OK):
        raise ConfigError(Problem(what="predictions cannot be written", where=str(place)))


def write_predictions(found: Validation, path: Path | str) -> None:
    """Every row as CSV: what was measured and predicted, the interval, its regime, what was assumed, or why not, and
    the line of the table that it is of.

    Texts of the table are as they are there, but that control characters are spelt out, and one that a spreadsheet
    would take for a formula has a ' before it. Raises ConfigError where the file cannot be written, and
    EnvironmentUnfit where the disk is full.
    """
    place, text = expanded(path), io.StringIO(newline="")
    table = csv.writer(text)
    table.writerow(_WRITTEN)
    table.writerows([*map(_told, _written(row)), row.run.line] for row in found.rows)
    try:
        write_whole(place, text.getvalue())
    except OSError as error:
        raise unwritten(error, where=place, what="predictions cannot be written") from None


_WRITTEN = (
    "id",
    "source_id",
    "status",
    "measured_seconds",
    "predicted_seconds",
    "low_seconds",
    "high_seconds",
    "fits",
    "fit_probability",
    "regime",
    "measured_bytes",
    "predicted_bytes",
    "assumed",
    "reason",
    "line",
)
_FORMULA = ("=", "+", "-", "@")  # as spreadsheets take them to begin


def _told(value: object) -> object:
    """A cell that shows what it says wherever it is opened, and does nothing there."""
    if not isinstance(value, str):
        return value
    return spelt_out(f"'{value}" if value.startswith(_FORMULA) else value)


def _written(row: Replayed) -> list[object]:
    run, point = row.run, row.point
    first: list[object] = [run.id, run.source, run.text("status"), run.seconds]
    if point is None:
        return [*first, None, None, None, None, None, None, None, None, "", row.reason]
    return [
        *first,
        point.predicted_seconds,
        point.low_seconds,
        point.high_seconds,
        point.fits,
        point.fit_probability,
        point.regime,
        point.memory_bytes,
        point.predicted_bytes,
        "; ".join(row.assumed),
        "",
    ]
