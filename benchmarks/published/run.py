"""Every published run of runs.csv predicted with nothing measured or fitted: `meshwright validate`, and its targets.

runs.csv holds figures of public repositories and papers, each row with its own reference in `source_ref`.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import record
from meshwright import replay
from meshwright.replay import Scores
from meshwright.spec import codec

RUNS = Path(__file__).resolve().parent / "runs.csv"
TABLE_1, TABLE_5 = "S03-megatron-2104.04473", "S03d-recompute-2205.05198"
VTRAIN, LAYOUTS, BIGSCIENCE = "S12-vtrain-multi", "S13-alephalpha-layouts", "S04-bigscience-a100"
ONE_NODE = "S12-vtrain-single"


def at_most(name: str, value: float | None, limit: float) -> record.Row:
    shown = "none" if value is None else f"{value:.1f} %"
    return record.Row(name=name, target=f"<= {limit:g} %", measured=shown, holds=value is not None and value <= limit)


def at_least(name: str, value: float | None, limit: float) -> record.Row:
    shown = "none" if value is None else f"{value:.1f} %"
    return record.Row(name=name, target=f">= {limit:g} %", measured=shown, holds=value is not None and value >= limit)


def table_1(found: replay.Validation) -> list[record.Row]:
    """The ten rows of the paper's table; ten more of that source are of the README of three months before."""
    own = [row.point for row in found.rows if row.run.text("source_id") == TABLE_1 and row.point is not None]
    errors = [
        100.0 * abs(point.predicted_seconds / point.run.seconds - 1.0)
        for point in own
        if point.run.seconds and "Table 1" in point.run.text("source_ref")
    ]
    assert len(errors) == 10
    return [
        at_most("2104.04473 table 1: error of the step", statistics.fmean(errors), 3.5),
        at_most("2104.04473 table 1: largest", max(errors), 8),
    ]


def memory(scores: Scores) -> list[record.Row]:
    """Right answers of all, and runs that died among those that are accepted."""
    oom = scores.oom
    count = oom.died_refused + oom.died_accepted + oom.ran_refused + oom.ran_accepted
    accepted = oom.died_accepted + oom.ran_accepted
    return [
        at_least("out of memory: right of all", 100.0 * (oom.died_refused + oom.ran_accepted) / max(count, 1), 95),
        at_most("out of memory: accepted plans that died", 100.0 * oom.died_accepted / max(accepted, 1), 2),
    ]


def between(name: str, value: float | None) -> record.Row:
    """An interval of 90 % that holds much more than nine of ten is as wrong as one that holds fewer."""
    shown = "none" if value is None else f"{value:.1f} %"
    return record.Row(name=name, target="86 to 94 %", measured=shown, holds=value is not None and 86.0 <= value <= 94.0)


def main() -> None:
    found = replay.validate(RUNS)
    sources, whole = found.sources, found.overall
    rows = [
        at_most("mean of sources, nothing fitted: error of the step", whole.mape_zero_shot, 15),
        at_most("mean of sources, one factor a stack: error of the step", whole.mape_one_factor, 8),
        *table_1(found),
        at_most("2205.05198 table 5: error of the step", sources[TABLE_5].mape_zero_shot, 2.5),
        at_most("vTrain, several nodes: error of the step", sources[VTRAIN].mape_zero_shot, 7),
        at_most("vTrain, one node, ten designed runs measured: the others", sources[ONE_NODE].mape_calibrated, 6),
        at_least("pairs in order: 2311.05610 layouts", sources[LAYOUTS].pairwise_accuracy, 93),
        at_least("pairs in order: vTrain, several nodes", sources[VTRAIN].pairwise_accuracy, 92),
        at_least("pairs in order: bigscience", sources[BIGSCIENCE].pairwise_accuracy, 85),
        at_least("pairs in order: mean of sources", whole.pairwise_accuracy, 92),
        at_most("the pick is slower than the best by", whole.regret_at_1, 2),
        at_most("the best of three picks is slower by", whole.regret_at_3, 0.3),
        *memory(whole),
        at_most("memory of B200 runs", sources["S26-simumax-b200"].memory_mape, 0.5),
    ]
    rows.append(between("steps in the interval of nine in ten: mean of sources", whole.interval_coverage))
    rows += [between(f"the same, regime: {name}", own.interval_coverage) for name, own in found.regimes.items()]
    raw = {"overall": found.overall, "sources": found.sources, "regimes": found.regimes, "reasons": found.reasons}
    record.finish("published", rows, codec.encode(raw))


if __name__ == "__main__":
    main()
