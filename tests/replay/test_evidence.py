"""What intervals take to be known is of the shipped table from which their spreads are estimated."""

from __future__ import annotations

from pathlib import Path

from meshwright.cost.uncertainty import EVIDENCE_SOFTWARE, is_replayed
from meshwright.replay.express import Expressed, express
from meshwright.replay.models import InexpressibleError
from meshwright.replay.runs import Run, read_runs

RUNS = Path(__file__).resolve().parents[2] / "benchmarks" / "published" / "runs.csv"


def said(run: Run) -> Expressed | None:
    try:
        return express(run)
    except InexpressibleError:
        return None


def test_software_that_counts_as_replayed_is_that_of_the_shipped_runs() -> None:
    first = {(run.source, run.text("framework"), run.text("zero")): run for run in reversed(read_runs(RUNS))}
    names = {found.design.job.software for run in first.values() if (found := said(run)) is not None}
    assert all(map(is_replayed, names))
    assert {known for known in EVIDENCE_SOFTWARE for name in names if name.startswith(known)} == set(EVIDENCE_SOFTWARE)
