"""A real run in which a learner stops for a while: the others go on, and it comes back to them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.parallel.outer import Met, Round
from meshwright.run.audit import audit
from meshwright.run.train import train
from meshwright.spec.job import CheckpointSpec, EvaluationSpec, JobSpec
from meshwright.spec.synchronize import GradientSync, Rounds, SynchronizeSpec, SyncKind
from meshwright.train.events import Ending
from meshwright.train.known import Known
from meshwright.train.observe.collective_log import CollectiveLog
from meshwright.train.rounds import meet, needs_all
from tests.run.runs import after_steps, design, losses, worker_of
from tests.support.designs import Layout

GRACE = 0.2
BY_TWO = Rounds(every=5, learning_rate=0.7, momentum=0.9, quorum=2, grace_seconds=GRACE)


def rounds_of(run: Path, learner: int) -> dict[int, Round]:
    lines = (run / "rounds" / f"learner-{learner:05d}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [entry.pop("step") for entry in found] == [5 * entry["round"] for entry in found]
    return {entry["round"]: Round.of(entry) for entry in found}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_learner_that_stops_is_gone_on_without_and_comes_back(tmp_path: Path) -> None:
    """Its sequences are dropped and counted, all are there for evaluations and saves, and the run ends as any."""
    steps, rows = 60, 4
    made = design(
        tmp_path,
        Layout(batch=3 * rows, replicate=3),
        steps=steps,
        synchronize=SynchronizeSpec(kinds=(SyncKind.DILOCO,)),
        evaluation=EvaluationSpec(every_steps=30, tokens=512),
        checkpoint=CheckpointSpec(every_steps=40),
    )
    made = replace(made, plan=replace(made.plan, gradients=GradientSync(kind=SyncKind.DILOCO, rounds=BY_TWO)))
    run = tmp_path / "run"

    def stop_a_while() -> None:
        learner = worker_of(1)
        learner.suspend()
        time.sleep(2.0)
        learner.resume()

    strikes = after_steps(run, 6, stop_a_while)
    said: list[str] = []
    outcome = train(made, run_dir=run, say=said.append)
    strikes.join()
    assert outcome.ended.ending is Ending.FINISHED
    assert sorted(losses(run)) == list(range(1, steps + 1)), "the first learner was never waited for by itself"
    first, stopped = rounds_of(run, 0), rounds_of(run, 1)
    assert sorted(first) == list(range(1, steps // 5 + 1))
    missed = [number for number, entry in first.items() if 1 not in entry.arrivals]
    assert missed
    assert sorted(stopped) == [number for number in first if number not in missed]
    back = stopped[max(missed) + 1]
    assert back.late(1) >= 1
    assert not {6, 8, 12} & set(missed), "evaluations, saves and the end are of all"
    found = audit(run, cache=tmp_path / "cache")
    assert (found.read, found.problems) == (steps * 3 * rows, ())
    assert found.dropped == rows * sum(
        steps - sum(entry.arrivals[each].steps for entry in first.values() if each in entry.arrivals)
        for each in range(3)
    )


def test_all_are_needed_where_something_of_all_comes_before_the_next_round(tmp_path: Path) -> None:
    made = design(
        tmp_path, steps=57, evaluation=EvaluationSpec(every_steps=30), checkpoint=CheckpointSpec(every_steps=20)
    )
    needed = needs_all(made, pause_at=33)
    assert [first for first in range(5, 60, 5) if needed(first, first + 4)] == [20, 30, 40, 55]


def test_who_waits_for_other_learners_is_not_taken_for_a_slow_rank() -> None:
    log = CollectiveLog(None, rank=0)
    log.begin_step(5)
    found = Round(number=1, arrivals={})
    outer: Any = SimpleNamespace(
        quorum=SimpleNamespace(waited_seconds=7.0), after_step=lambda *_, **__: Met(round=found)
    )
    run: Any = SimpleNamespace(
        log=log, dropped_in_a_row=0, design=SimpleNamespace(job=JobSpec()), asked=False, changing=False, observer=None
    )
    assert meet(run, outer, 5, known=Known(loss=1.0, norm=1.0, num_targets=1)) == Met(round=found)
    assert log.step_seconds()[1] == pytest.approx(7.0, abs=0.1)


def test_rounds_of_another_length_are_said_and_kept() -> None:
    said: list[str] = []
    kept: list[tuple[int, dict[str, int]]] = []
    observer = SimpleNamespace(say=said.append, note=lambda values, *, step: kept.append((step, values)))
    longer = Met(changed=Rounds(every=16))
    outer: Any = SimpleNamespace(quorum=None, after_step=lambda *_, **__: longer)
    job = SimpleNamespace(job=JobSpec())
    run: Any = SimpleNamespace(log=None, dropped_in_a_row=0, design=job, asked=False, changing=False, observer=observer)
    meet(run, outer, 24, known=Known(loss=1.0, norm=1.0, num_targets=1))
    assert said == ["learners meet every 16 steps from here on, as what they send takes now"]
    assert kept == [(24, {"round_steps": 16})]
