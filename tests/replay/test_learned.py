"""Ten measured runs: what they tell of others, and which they are."""

from __future__ import annotations

import itertools
import math

import pytest

from meshwright.replay.learned import COUNT, learned
from meshwright.replay.runs import Run
from meshwright.replay.scores import Point, score

SIZES = list(itertools.product((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4)))


def points(*, all_by=0.0, traffic_by=0.0, launches_by=0.0):
    """Runs of a made-up machine, slower than predicted by so much, and by so much of their traffic and launches."""
    found = []
    for line, (tensor, microbatch, pipeline) in enumerate(SIZES):
        traffic, launches = 0.1 * math.log2(2 * tensor), 0.4 / microbatch
        columns = {
            "status": "ok",
            "tp": str(tensor),
            "pp": str(pipeline),
            "mbs": str(microbatch),
            "iter_s": str(math.exp(all_by + traffic_by * traffic + launches_by * launches)),
            "group": f"{pipeline}",
            "gbs": "64",
            "seq": "1024",
            "n_gpus": "8",
        }
        doubts = {"traffic": 0.15 * traffic, "launches": 0.12 * launches, "software": 0.1}
        run = Run(line=line, columns=columns)
        found.append(
            Point(
                run=run,
                predicted_seconds=1.0,
                low_seconds=0.5,
                high_seconds=2.0,
                fits=True,
                predicted_bytes=1.0,
                memory_bytes=None,
                doubts=doubts,
            )
        )
    return found


@pytest.mark.parametrize("off", [{"all_by": 0.2}, {"traffic_by": 0.5}, {"launches_by": 0.3, "all_by": 0.1}])
def test_errors_of_causes_are_told_to_runs_that_were_not_measured(off):
    runs = points(**off)
    found = learned(runs)
    assert len(found.measured) == COUNT
    others = [point for point in runs if point.run.line not in found.measured]
    before = sum(abs(point.error) for point in others)
    after = sum(abs(point.error + found.error[point.run.line]) for point in others)
    assert after < 0.35 * before


def test_no_measured_time_decides_which_runs_are_measured():
    assert learned(points(all_by=0.2)).measured == learned(points(traffic_by=1.0, launches_by=-3.0)).measured


def test_right_predictions_stay_as_they_are():
    assert set(learned(points()).error.values()) == {0.0}


def test_where_no_more_were_timed_there_is_nothing_to_tell():
    assert learned(points(all_by=0.1)[:COUNT]) is None


def test_scores_count_the_others_alone():
    runs = points(all_by=0.1)
    zero = dict.fromkeys(range(len(runs)), 0.0)
    told = {point.run.line: 0.1 for point in runs[:5]}
    found = score(runs, rows=len(runs), factors=zero, told=told)
    assert found.mape_calibrated == pytest.approx(0.0, abs=1e-9)
    assert score(runs, rows=len(runs), factors=zero).mape_calibrated is None
