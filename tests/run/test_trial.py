"""Plans that the model cannot tell apart are tried, and the one whose steps are fastest is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from meshwright import catalog, search
from meshwright.run import trial
from meshwright.run.choose import choose
from meshwright.run.trial import check_trial, fastest
from meshwright.spec.errors import ConfigError, WorkerFailed

CLUSTER = catalog.local_cluster(cores=2, memory_bytes=16e9, devices=2)
JOB = catalog.load_job(
    None, sets=["sequence_length=64", "batch_tokens=512", "precision=fp32", "constraints.devices=any"]
)
Given = Sequence[Mapping[str, Any]]


def decision() -> search.Decision:
    return search.design(catalog.load_model("llama-2m"), CLUSTER, JOB)


def test_the_fastest_of_those_tried_is_taken_and_the_others_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = decision()
    wanted = before.ranked[2].plan

    def steps(_function: object, given: Given, *, seconds: float) -> list[tuple[float, ...]]:
        assert seconds > 0.0
        return [tuple(0.1 if design.plan == wanted else 0.2 for design in entry["designs"]) for entry in given]

    monkeypatch.setattr(trial, "in_children", steps)
    said: list[str] = []
    after = fastest(before, tries=4, say=said.append)
    assert after.design.plan == wanted
    assert after.report.plan == wanted.digest()
    assert "fastest of 4 tried" in after.why[0]
    assert before.ranked[0].plan.describe() in after.why[0]
    assert said


def test_when_every_trial_fails_the_decision_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_given: object, **_limits: object) -> list[tuple[float, ...]]:
        raise WorkerFailed("no luck")

    monkeypatch.setattr(trial, "in_children", broken)
    said: list[str] = []
    before = decision()
    assert fastest(before, tries=2, say=said.append) == before
    assert any("no luck" in line for line in said)


def test_other_machines_cannot_be_tried() -> None:
    with pytest.raises(ConfigError, match="--try"):
        check_trial(catalog.load_cluster("8xH100"))


def test_a_real_trial_measures_real_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.run.choose.load_cluster", lambda *_args, **_kwargs: CLUSTER)
    monkeypatch.setattr("meshwright.run.choose.check_job", lambda _job: None)
    monkeypatch.setattr(trial, "_SECONDS_EACH", 0.1)
    said: list[str] = []
    chosen = choose("llama-2m", cluster="local:2", job=JOB, measure=False, say=said.append, tries=2)
    assert chosen.decision is not None
    assert "fastest of 2 tried" in chosen.decision.why[0]
    assert not any("left out" in line for line in said)
