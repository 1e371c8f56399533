"""What ways of meeting cost in loss: found between two runs after as many tokens and as long, and told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from meshwright.catalog.loss_gaps import MEASURED, nearest_gaps
from meshwright.report import compare
from meshwright.report.explain import explain
from meshwright.report.loss_gap import loss_gap, twin
from meshwright.report.run_files import read_run
from meshwright.spec.codec import encode
from meshwright.spec.compression import PowerSgd
from meshwright.spec.plan import Axis, AxisName
from meshwright.spec.report import Origin
from meshwright.spec.synchronize import MEETINGS, GradientSync, Rounds, SyncKind
from tests.report import synthetic

EVERY_STEP = GradientSync()
EAGER = GradientSync(kind=SyncKind.EAGER, rounds=Rounds(every=4, delay=4))


def write(
    place: Path, *, gradients: GradientSync, seconds: float, loss: dict[int, float], seed: int = 0, batch: int = 1
) -> Path:
    """A run of two replicas whose steps take so long, with its validation loss after some of them; 4 tokens a step."""
    made = synthetic.design(pipeline=1, shard=1)
    axes = (Axis(name=AxisName.REPLICATE, size=2),)
    plan = replace(made.plan, axes=axes, gradients=gradients)
    job = replace(made.job, seed=seed, batch_tokens=batch * plan.batch_tokens)
    place.mkdir()
    (place / "design.json").write_text(json.dumps(encode(replace(made, plan=plan, job=job))))
    predicted = synthetic.report(synthetic.PREDICTED, origin=Origin.ANALYTIC, pipeline=1)
    (place / "predicted.json").write_text(json.dumps(encode(predicted)))
    rows: list[dict[str, float]] = []
    for step in range(1, max(loss) + 1):
        rows.append({"step": step, "tokens": 4 * step, "loss": 5.0, "seconds": seconds})
        if step in loss:
            rows.append({"step": step, "tokens": 4 * step, "validation_loss": loss[step]})
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return place


def test_a_gap_is_told_after_as_many_tokens_and_after_as_long(tmp_path: Path) -> None:
    slow = write(tmp_path / "slow", gradients=EVERY_STEP, seconds=1.0, loss={10: 4.0, 20: 3.0, 30: 2.5})
    fast = write(tmp_path / "fast", gradients=EAGER, seconds=0.25, loss={10: 4.2, 20: 3.1, 40: 2.1})
    found = loss_gap(read_run(fast), read_run(slow))
    assert found is not None
    assert (found.run, found.reference, found.tokens, found.seconds) == ("fast", "slow", 120.0, 10.0)
    assert found.at_tokens == pytest.approx((3.1 + 2.1) / 2 - 2.5)
    assert found.at_seconds == pytest.approx(2.1 - 4.0)
    assert found.words == "0.100 nats above it after 120 tokens, and 1.900 nats below it after 10.0 s of steps"
    assert any(
        f"beside slow, whose ranks meet whole in every step: the validation loss lies {found.words}" in sentence
        for sentence in explain(fast).sentences
    )
    assert explain(slow).loss_gap is None
    turned = compare(slow, fast).loss_gap
    assert turned == found


def test_steps_that_were_done_again_count_once_and_curves_that_never_meet_have_no_gap(tmp_path: Path) -> None:
    one = write(tmp_path / "one", gradients=EVERY_STEP, seconds=1.0, loss={4: 3.0, 8: 2.0})
    again = write(tmp_path / "again", gradients=EAGER, seconds=1.0, loss={4: 3.5, 8: 2.5})
    rows = (again / "metrics.jsonl").read_text()
    (again / "metrics.jsonl").write_text(rows.replace("2.5", "9.5") + rows)
    found = loss_gap(read_run(again), read_run(one))
    assert found is not None
    assert (found.tokens, found.at_tokens, found.at_seconds) == (32.0, 0.5, 0.5)
    late = write(tmp_path / "late", gradients=EAGER, seconds=9.0, loss={9: 2.0})
    assert loss_gap(read_run(late), read_run(one)) is None
    assert loss_gap(read_run(one), read_run(synthetic.write_run(tmp_path / "other"))) is None


def test_the_run_to_compare_with_is_found_beside_it(tmp_path: Path) -> None:
    eager = write(tmp_path / "eager", gradients=EAGER, seconds=1.0, loss={8: 2.0}, seed=1)
    assert twin(read_run(eager)) is None
    assert any("is not measured: no run in the same folder" in sentence for sentence in explain(eager).sentences)
    write(tmp_path / "a-larger", gradients=EVERY_STEP, seconds=1.0, loss={8: 2.0}, batch=2)
    write(tmp_path / "b-compressed", gradients=GradientSync(compression=PowerSgd()), seconds=1.0, loss={8: 2.0})
    (tmp_path / "c-broken").mkdir()
    (tmp_path / "c-broken" / "design.json").write_text("{")
    far = write(tmp_path / "d-far", gradients=EVERY_STEP, seconds=1.0, loss={8: 2.0, 9: 1.0})
    found = twin(read_run(eager))
    assert found is not None
    assert found.path == far
    same = write(tmp_path / "e-same-seed", gradients=EVERY_STEP, seconds=1.0, loss={8: 2.0}, seed=1)
    found = twin(read_run(eager))
    assert found is not None
    assert found.path == same
    assert twin(read_run(same)) is None


def test_measured_gaps_name_ways_of_meeting_and_the_nearest_model_is_told() -> None:
    assert {gap.word for gap in MEASURED} <= set(MEETINGS)
    large, small = (nearest_gaps({"diloco": 30}, parameters=count)[0].parameters for count in (9e9, 4e9))
    assert (large, small) == (10e9, 4e9)
    assert nearest_gaps({"every_step": 0}, parameters=1e9) == ()
    short, long = (nearest_gaps({"streaming": every}, parameters=1e7)[0].every for every in (3, 100))
    assert (short, long) == (4, 22)
    assert "diloco -0.004 nats (4 B parameters, 2 ranks, every 30 steps; " in MEASURED[0].words
