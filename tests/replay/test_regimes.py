"""Regimes of reports, and scores by regime."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.published import spread

from meshwright.cost.fitting import Held
from meshwright.cost.uncertainty import Cause
from meshwright.replay.regimes import Regime, regime
from meshwright.replay.runs import Run, read_runs
from meshwright.replay.scores import Point, by_regime
from meshwright.spec.report import Line, LineName, Report

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "published.csv"


def report(host: float = 0.0, **seconds: float) -> Report:
    lines = [
        Line(
            name=LineName[name.upper()],
            seconds=value,
            lines=(Line(name="host", seconds=host),) if name == "forward" else (),
        )
        for name, value in seconds.items()
    ]
    step = Line(name=LineName.STEP, seconds=sum(seconds.values()), lines=tuple(lines))
    return Report(plan="p", step=step, memory=(), tokens_per_step=1, devices=1, model_flops=1.0, peak_flops=None)


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (report(forward=90.0, gradients=10.0), Regime.COMPUTE),
        (report(forward=80.0, host=30.0, gradients=20.0), Regime.LAUNCH),
        (report(forward=70.0, recompute=30.0), Regime.RECOMPUTE),
        (report(forward=70.0, bubble=10.0, transfer=10.0, tensor=10.0), Regime.PIPELINE),
        (report(forward=70.0, tensor=10.0, experts=10.0, context=10.0), Regime.LAYERS),
        (report(forward=70.0, gradients=10.0, parameters=10.0, bubble=10.0), Regime.DATA),
    ],
)
def test_the_largest_share_names_the_regime(found: Report, named: Regime) -> None:
    assert regime(found) is named


def point(line: int, source: str, group: str, *, ratio: float, named: Regime) -> Point:
    columns = {"source_id": source, "group": group, "iter_s": "1.0", "status": "ok"}
    return Point(
        run=Run(line=line, columns=columns),
        predicted_seconds=ratio,
        low_seconds=0.8 * ratio,
        high_seconds=1.2 * ratio,
        fits=True,
        predicted_bytes=1.0,
        memory_bytes=None,
        regime=named,
    )


def test_a_source_counts_in_a_regime_by_what_of_it_is_there() -> None:
    points = [
        point(2, "A", "one", ratio=1.1, named=Regime.COMPUTE),
        point(3, "A", "one", ratio=1.1, named=Regime.PIPELINE),
        point(4, "B", "two", ratio=0.5, named=Regime.PIPELINE),
    ]
    found = by_regime(points)
    assert set(found) == {"compute", "pipeline"}
    assert found["compute"].interval_coverage == 100.0
    assert found["pipeline"].interval_coverage == pytest.approx(100.0 / 3.0)
    assert found["pipeline"].mape == pytest.approx((0.5 * 10.0 + 50.0) / 1.5)
    assert (found["pipeline"].runs, found["pipeline"].sources) == (2, 2)


def test_spreads_are_found_again() -> None:
    """Errors drawn of known spreads: the estimate finds them, and the interval holds nine of ten."""
    random = np.random.default_rng(3)
    count = 6000
    shares = random.dirichlet([0.5] * 3, count)
    causes = np.zeros((count, len(Cause)))
    causes[:, :3] = shares
    true = np.array([0.05, 0.3, 0.6])
    error = random.standard_t(spread.FREEDOM, count) * np.sqrt((np.square(shares) * np.square(true)).sum(axis=1))
    error *= np.sqrt((spread.FREEDOM - 2.0) / spread.FREEDOM)
    names = np.array([f"source {index % 6}" for index in range(count)])
    data = spread.Residuals(
        error=error, causes=causes, weight=np.ones(count), source=names, regime=np.full(count, "compute")
    )
    found = spread.estimate(data, np.ones(count, dtype=np.bool_))
    assert found[:3] == pytest.approx(true, rel=0.15)
    assert found[3:] == pytest.approx(spread.priors()[3:], rel=0.02)
    apart = spread.deviations(data, found)
    reach = spread.quantile(np.abs(apart), data.weight, spread.INSIDE)
    assert float(np.mean(np.abs(apart) <= reach)) == pytest.approx(spread.INSIDE, abs=0.01)
    assert 1.4 < reach < 1.9


def test_what_one_table_does_not_speak_of_is_found_in_another() -> None:
    """Of two causes the spread of one is known: that of the other is found, and the known one stays."""
    random = np.random.default_rng(5)
    count, known, other = 4000, list(Cause).index(Cause.PRODUCTS), list(Cause).index(Cause.STACK)
    causes = np.zeros((count, len(Cause)))
    causes[:, known], causes[::2, other] = 1.0, 1.0
    error = random.standard_t(spread.FREEDOM, count) * np.sqrt((spread.FREEDOM - 2.0) / spread.FREEDOM)
    error *= np.sqrt(0.1**2 + causes[:, other] * 0.3**2)
    names = np.full(count, "source")
    data = spread.Residuals(error=error, causes=causes, weight=np.ones(count), source=names, regime=names)
    told, free = spread.priors(), np.arange(len(Cause)) == other
    told[known] = 0.1
    found = spread.completed(told, data, np.ones(count, dtype=np.bool_), free=free)
    assert found[other] == pytest.approx(0.3, rel=0.1)
    assert found[~free].tolist() == told[~free].tolist()


def test_every_source_weighs_alike_and_every_group_of_it() -> None:
    source, group = np.array(["A", "A", "A", "B"]), np.array(["one", "one", "two", "three"])
    assert spread.equal(source, group).tolist() == [0.25, 0.25, 0.5, 1.0]


def test_residuals_of_the_example() -> None:
    known = spread.predicted(read_runs(EXAMPLE))
    data = spread.residuals(known)
    assert len(data.error) == len(data.regime) > 5
    assert np.allclose(data.causes[:, :6].sum(axis=1), 1.0)
    apart = spread.left_out(data)
    assert np.isfinite(apart).all()


def test_estimates_are_written_where_they_are_held() -> None:
    known = spread.predicted(read_runs(EXAMPLE))
    held = spread.assignments(known, np.full(len(Cause), 0.777), np.full(len(Held), 0.777), reach=9.25)
    for name, lines in held.items():
        found = spread.rewritten((spread.COST / name).read_text(), lines)
        assert found.count(": 0.777,") == len([line for line in lines if ": " in line])
        assert ("REACH = 9.25" in found) is (name == "uncertainty.py")
    with pytest.raises(AssertionError, match="found 0 times"):
        spread.rewritten("nothing", ["Cause.NOTHING: 0.1"])
