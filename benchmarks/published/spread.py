"""Spreads of cost/uncertainty.py and cost/fitting.py, estimated from published runs with every source left out in turn.

`python benchmarks/published/spread.py [--write] [TABLE]` prints what those two files should hold (and writes it there),
and how many measured steps the intervals hold of a source that had no part in them. Every source weighs alike, and
every group within it. Of memory, printed peaks speak, and verdicts of sources that print runs which died: the others
leave those out.

`--allowances` does so of the causes that no run of runs.csv has alone, as software that is none of theirs: what the
runs that were held out say of those, all other spreads as uncertainty.py holds them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwright import cost
from meshwright.cost.fitting import Held, chance, shares
from meshwright.cost.uncertainty import REACH, SPREADS, Cause, spread, weights
from meshwright.replay.express import Expressed, express
from meshwright.replay.models import InexpressibleError
from meshwright.replay.pricing import Priced, in_alike_parts, priced_all
from meshwright.replay.published import peak_bytes
from meshwright.replay.regimes import Regime, regime
from meshwright.replay.runs import Run, read_runs
from meshwright.spec.errors import ConfigError
from meshwright.spec.plan import Design
from meshwright.spec.report import Report

RUNS = Path(__file__).resolve().parent / "runs.csv"
HELD_OUT = sorted(RUNS.parent.glob("held_out_*.csv"))
COST = RUNS.parent.parent.parent / "src" / "meshwright" / "cost"
PRIOR = 0.15
PRIORS = {Cause.DEVICES: 0.05, Cause.LENGTH: 0.05}  # the others
PRIOR_WIDTH = 1.0  # standard deviation of the logarithm of a spread around its prior
FREEDOM = 5.0  # of Student's t: tails that let a few runs be far off without widening all
INSIDE = 0.9  # of steps whose source was left out
_OWN = {Regime.LAUNCH: Cause.COMPUTE, Regime.PIPELINE: Cause.PIPELINE, Regime.LAYERS: Cause.COLLECTIVES}
_OWN |= {Regime.DATA: Cause.DATA, Regime.COMPUTE: Cause.PRODUCTS}
_ROUNDS = 12
_SEEN = 0.5  # of a source's weight that a regime must have
_WIDEST = 0.4
Floats = npt.NDArray[np.float64]
Names = npt.NDArray[np.str_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Residuals:
    """log(measured / predicted) of every timed run, its causes (runs, causes), its weight, source and regime."""

    error: Floats
    causes: Floats
    weight: Floats
    source: Names
    regime: Names


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Runs whose memory is known: shares (runs, parts) of the fullest rank, log(capacity / predicted), the weight.

    `error` is log(printed / predicted) of those with a printed peak, else not a number; `died` is of the others.
    """

    shares: Floats
    room: Floats
    error: Floats
    died: npt.NDArray[np.bool_]
    weight: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    run: Run
    design: Design
    report: Report


def predicted(runs: Iterable[Run]) -> list[Predicted]:
    """Every run that can be said, with its report."""
    listed, found = list(runs), []
    for part in in_alike_parts(listed):
        known = [(listed[place], one) for place in part if (one := _said(listed[place])) is not None]
        for (run, _), price in zip(known, priced_all([one for _, one in known]), strict=True):
            if isinstance(price, Priced):
                found.append(Predicted(run=run, design=price.design, report=price.report))
    return found


def _said(run: Run) -> Expressed | None:
    try:
        return express(run)
    except (InexpressibleError, ConfigError):
        return None


def priors() -> Floats:
    return np.array([PRIORS.get(cause, PRIOR) for cause in Cause])


def residuals(known: Iterable[Predicted]) -> Residuals:
    """Of every run that was timed."""
    rows: list[tuple[float, list[float], str, str, str]] = []
    for entry in known:
        run, design, report = entry.run, entry.design, entry.report
        if run.seconds is None:
            continue
        table = cost.PlanTable.from_plan(design.plan)
        costs = cost.evaluate(table, model=design.model, cluster=design.cluster, job=design.job, every_rank=True)
        found = weights(costs, table, model=design.model, cluster=design.cluster, job=design.job)
        error = float(np.log(run.seconds / report.step_seconds))
        rows.append((error, [float(found[cause][0]) for cause in Cause], run.source, run.group, regime(report)))
    errors, causes, sources, groups, regimes = zip(*rows, strict=True)
    source = np.array(sources)
    return Residuals(
        error=np.array(errors),
        causes=np.array(causes),
        weight=equal(source, np.array(groups)),
        source=source,
        regime=np.array(regimes),
    )


def peaks(known: Iterable[Predicted]) -> Peaks:
    """Of every printed peak, and every verdict of a source that prints runs which died."""
    known = list(known)
    honest = {entry.run.source for entry in known if entry.run.died}
    rows: list[tuple[list[float], float, float, bool, str, str]] = []
    for entry in known:
        run, printed = entry.run, entry.run.number("mem_gb")
        told = bool(printed) and run.ran
        if not (told or (run.source in honest and (run.ran or run.died))):
            continue
        fullest = max(entry.report.memory, key=lambda stage: stage.total / stage.capacity)
        parts = shares({name: np.array([value]) for name, value in fullest.parts.items()})
        error = float(np.log((printed or 1.0) * 1e9 / peak_bytes(entry.report, run))) if told else np.nan
        room = float(np.log(fullest.capacity / fullest.total))
        rows.append(([float(parts[part][0]) for part in Held], room, error, run.died, run.source, run.group))
    held, rooms, errors, died, sources, groups = zip(*rows, strict=True)
    return Peaks(
        shares=np.array(held),
        room=np.array(rooms),
        error=np.array(errors),
        died=np.array(died),
        weight=equal(np.array(sources), np.array(groups)),
    )


def equal(source: Names, group: Names) -> Floats:
    """Weights that are one in sum for every source, and alike for every group of it."""
    found = np.zeros(len(source))
    for name in np.unique(source):
        inside = source == name
        groups = np.unique(group[inside])
        for each in groups:
            rows = inside & (group == each)
            found[rows] = 1.0 / (len(groups) * np.count_nonzero(rows))
    return found


def estimate(data: Residuals, rows: npt.NDArray[np.bool_]) -> Floats:
    """The spreads most likely after the runs in `rows`: Student's t of their errors, a broad prior on each spread."""
    return completed(priors(), data, rows, free=np.ones(len(Cause), dtype=np.bool_))


def completed(spreads: Floats, data: Residuals, rows: npt.NDArray[np.bool_], *, free: npt.NDArray[np.bool_]) -> Floats:
    """`spreads` with those that are `free` as `estimate` has them, the others as they are."""
    causes, error, weight = np.square(data.causes[rows]), np.square(data.error[rows]), data.weight[rows]
    fixed = causes[:, ~free] @ np.square(spreads[~free])

    def unlikely(found: Floats) -> float:
        variance = fixed + causes[:, free] @ np.square(found)
        tails = 0.5 * (FREEDOM + 1.0) * np.log1p(error / variance / (FREEDOM - 2.0))
        return float(weight @ (0.5 * np.log(variance) + tails))

    made = spreads.copy()
    made[free] = least(unlikely, priors()[free])
    return made


def evened(data: Residuals, rows: npt.NDArray[np.bool_]) -> Floats:
    """`estimate`, then the spread of each regime's own cause so that the interval holds as many of every regime.

    Most runs are of few regimes, and likelihood alone serves those.
    """
    spreads = estimate(data, rows)
    for _ in range(_ROUNDS):
        for name, cause in _OWN.items():
            apart = np.abs(deviations(data, spreads))
            own = rows & (data.regime == name)
            if float(data.weight[own].sum()) < _SEEN:
                continue
            reach, reached = (quantile(apart[each], data.weight[each], INSIDE) for each in (rows, own))
            index = list(Cause).index(cause)
            spreads[index] = min(spreads[index] * (reached / reach) ** 0.5, _WIDEST)
    return spreads


def estimate_memory(data: Peaks) -> Floats:
    """As `estimate`, of parts of memory: logistic errors of printed peaks, and of verdicts where none is printed."""
    squares, told = np.square(data.shares), np.isfinite(data.error)
    slope = np.pi / np.sqrt(3.0)

    def unlikely(spreads: Floats) -> float:
        scale = np.sqrt(squares @ np.square(spreads))
        off = np.where(told, data.error, 0.0) / scale
        density = np.log(scale) + slope * np.abs(off) + 2.0 * np.log1p(np.exp(-slope * np.abs(off)))
        fits = chance(data.room / scale)
        verdict = -np.log(np.maximum(np.where(data.died, 1.0 - fits, fits), 1e-12))
        return float(data.weight @ np.where(told, density, verdict))

    return least(unlikely, np.full(len(Held), PRIOR))


def least(unlikely: Callable[[Floats], float], prior: Floats) -> Floats:
    """The spreads that minimise `unlikely` and, of the logarithm of each, half its square distance from the prior."""
    start = np.log(prior)

    def loss(logs: Floats) -> float:
        return unlikely(np.exp(logs)) + 0.5 * float(np.sum(np.square((logs - start) / PRIOR_WIDTH)))

    logs, best, step = start.copy(), loss(start), 0.5
    while step > 0.005:
        tried = [logs + change * unit for unit in np.eye(len(logs)) for change in (step, -step)]
        losses = [loss(one) for one in tried]
        if min(losses) < best - 1e-9:
            best, logs = min(losses), tried[int(np.argmin(losses))]
        else:
            step /= 2.0
    return np.asarray(np.exp(logs))


def deviations(data: Residuals, spreads: Floats) -> Floats:
    """Errors in standard deviations."""
    by_cause = dict(zip(Cause, data.causes.T, strict=True))
    return data.error / spread(by_cause, spreads=dict(zip(Cause, spreads.tolist(), strict=True)))


def quantile(values: Floats, weight: Floats, share: float) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weight[order])
    return float(values[order][np.searchsorted(reached, share * reached[-1])])


def left_out(data: Residuals) -> Floats:
    """Errors in standard deviations that were estimated without the run's own source."""
    found = np.zeros(len(data.error))
    for name in np.unique(data.source):
        own = data.source == name
        found[own] = deviations(data, evened(data, ~own))[own]
    return found


def coverage(inside: npt.NDArray[np.bool_], weight: Floats, names: Names) -> Mapping[str, tuple[float, int]]:
    """Percent of weight inside, and runs, by name."""
    return {
        str(name): (100.0 * float(weight[rows] @ inside[rows]) / float(weight[rows].sum()), int(np.count_nonzero(rows)))
        for name in np.unique(names)
        for rows in [names == name]
    }


def calibration(data: Peaks, spreads: Floats) -> list[str]:
    """How many runs ran among those of like probability to fit: honest where the two agree."""
    known = ~np.isfinite(data.error)
    said = chance(data.room / np.sqrt(np.square(data.shares) @ np.square(spreads)))
    lines = []
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.0)):
        rows = known & (said >= low) & (said <= high)
        if rows.any():
            mean, ran = 100.0 * said[rows].mean(), 100.0 * np.mean(~data.died[rows])
            lines.append(
                f"  {low:.1f} to {high:.1f}: said {mean:5.1f} %, ran {ran:5.1f} %  of {np.count_nonzero(rows)}"
            )
    return lines


def assignments(known: list[Predicted], spreads: Floats, of_memory: Floats, *, reach: float) -> dict[str, list[str]]:
    """The lines that each file of the cost room should hold."""
    timed = [entry.design.plan for entry in known if entry.run.seconds]
    return {
        "uncertainty.py": [
            *(f"Cause.{cause.name}: {value:.3f}" for cause, value in zip(Cause, spreads, strict=True)),
            f"REACH = {reach:.2f}",
            f"EVIDENCE_DEVICES = {max(plan.world_size for plan in timed)}",
            f"EVIDENCE_LENGTH = {max(plan.sequence_length for plan in timed)}",
        ],
        "fitting.py": [f"Held.{part.name}: {value:.3f}" for part, value in zip(Held, of_memory, strict=True)],
    }


def write_allowances() -> None:
    """Prints, and with `--write` writes, the spreads of causes that no run of runs.csv has."""
    never = ~(residuals(predicted(read_runs(RUNS))).causes > 0.0).any(axis=0)
    data = residuals(predicted(run for path in HELD_OUT for run in read_runs(path)))
    known = np.array([SPREADS[cause] for cause in Cause])
    spreads = completed(known, data, np.ones(len(data.error), dtype=np.bool_), free=never)
    lines = [f"Cause.{cause.name}: {spreads[index]:.3f}" for index, cause in enumerate(Cause) if never[index]]
    print("uncertainty.py:", *lines, sep="\n  ")
    if "--write" in sys.argv:
        (COST / "uncertainty.py").write_text(rewritten((COST / "uncertainty.py").read_text(), lines))
    for title, names in (("source", data.source), ("regime", data.regime), ("", np.full(len(data.error), "all"))):
        print(f"\nmeasured steps inside, of runs that were held out{f', by {title}' if title else ''}")
        for name, (percent, count) in coverage(np.abs(deviations(data, spreads)) <= REACH, data.weight, names).items():
            print(f"  {name:36s} {percent:5.1f} %  of {count}")


def rewritten(text: str, lines: Iterable[str]) -> str:
    """`text` with the number of every line, `name: number` or `name = number`, that it holds once."""
    for line in lines:
        name = re.match(r"[\w.]+(?:: | = )", line)
        assert name is not None
        text, count = re.subn(rf"(?m)^(\s*){re.escape(name[0])}[\d.]+", rf"\g<1>{line}", text)
        assert count == 1, f"{line}: found {count} times"
    return text


def main() -> None:
    if "--allowances" in sys.argv:
        write_allowances()
        return
    paths = [Path(argument) for argument in sys.argv[1:] if argument != "--write"]
    known = predicted(read_runs(paths[0] if paths else RUNS))
    data, memory = residuals(known), peaks(known)
    spreads = evened(data, np.ones(len(data.error), dtype=np.bool_))
    apart, of_memory = left_out(data), estimate_memory(memory)
    reach = quantile(np.abs(apart), data.weight, INSIDE)
    for name, lines in assignments(known, spreads, of_memory, reach=reach).items():
        print(f"{name}:", *lines, sep="\n  ")
        if "--write" in sys.argv:
            (COST / name).write_text(rewritten((COST / name).read_text(), lines))
    inside = np.abs(apart) <= reach
    for title, names in (("source, itself left out", data.source), ("regime, sources left out", data.regime)):
        print(f"\nmeasured steps inside, by {title}")
        for name, (percent, count) in coverage(inside, data.weight, names).items():
            print(f"  {name:36s} {percent:5.1f} %  of {count}")
    half = reach * np.abs(data.error / deviations(data, spreads))
    print(f"\nupper end of the interval over the step: {np.exp(quantile(half, data.weight, 0.5)):.2f} in the median")
    print("\nprobability of fitting, verdicts of sources that print deaths")
    print("\n".join(calibration(memory, of_memory)))


if __name__ == "__main__":
    main()
