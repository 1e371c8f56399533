"""Choosing a design for this machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshwright import cost, search
from meshwright.catalog.failure_mix import EVEN
from meshwright.cost.foresee import foresee
from meshwright.run import choose
from meshwright.run.detect import calibration_file
from meshwright.run.measure import save_cluster
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.errors import ConfigError, NoPlanFits, Problem
from meshwright.spec.job import DataSpec, JobSpec, Source
from meshwright.train.interval import predicted_costs

TEXT = DataSpec(sources=(Source(path=__file__),))
JOB = JobSpec(data=TEXT, sequence_length=64, batch_tokens=512, total_tokens=5120)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cache of this test's own, and the machines that were measured."""
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    calls: list[str] = []

    def measure(cluster: ClusterSpec, *, seconds_budget: float, **_: object) -> None:
        calls.append(f"{cluster.num_devices} devices for {seconds_budget:.0f} s")
        save_cluster(cluster, path=calibration_file())

    monkeypatch.setattr("meshwright.run.measure.measure", measure)
    return calls


def test_this_machine_is_measured_once_and_again_when_asked(measured: list[str]) -> None:
    said: list[str] = []
    once = f"2 devices for {choose.MEASURE_SECONDS:.0f} s"
    assert choose.load_cluster("local:2", measure=False, say=said.append).num_devices == 2
    assert measured == [once]
    assert "measuring this machine" in said[0]
    choose.load_cluster("local:2", measure=False, say=said.append)
    assert measured == [once]
    choose.load_cluster("local:2", measure=True, say=said.append)
    assert measured == [once, once]


def test_another_cluster_is_never_measured(measured: list[str]) -> None:
    choose.load_cluster("8xH100", measure=False, say=print)
    with pytest.raises(ConfigError, match="--measure: only this machine is measured here"):
        choose.load_cluster("8xH100", measure=True, say=print)
    assert measured == []


@pytest.mark.usefixtures("measured")
def test_a_design_that_can_be_trained_is_taken_and_says_why() -> None:
    chosen = choose.choose("llama-5m", cluster="local:2", job=JOB, measure=False, say=str)
    assert chosen.decision is not None
    assert chosen.decision.why
    assert chosen.design.plan.batch_tokens == 512


@pytest.mark.usefixtures("measured")
def test_the_fix_for_devices_that_nobody_says_fail_is_one_that_can_be_set() -> None:
    """In place of a plan, where one is designed, and in the file of one."""
    chosen = choose.choose("llama-5m", cluster="local:2", job=JOB, measure=False, say=str)
    with pytest.raises(ConfigError) as unknown:
        predicted_costs(cost.predict(chosen.design))
    with pytest.raises(ConfigError) as unforeseen:
        foresee(chosen.design, mix=EVEN)
    fixes = [error.value.problems[0].fix for error in (unknown, unforeseen)]
    sets = [re.findall(r"--set (\S+?)(?:;|$)", fix) for fix in fixes]
    assert sets == [["cluster.groups.0.device.hours_between_failures=50000"]] * 2
    again = choose.choose("llama-5m", cluster="local:2", job=JOB, measure=False, say=str, cluster_sets=sets[0])
    counted = choose.designed(None, model="llama-5m", cluster="local:2", job=None, sets=[*sets[0], "seed=1"])
    for design in (again.design, counted):
        assert predicted_costs(cost.predict(design)).seconds_between_failures == pytest.approx(50_000 * 3600 / 2)
    with pytest.raises(ConfigError, match="names no number of the cluster"):
        choose.choose(
            "llama-5m", cluster="local:2", job=JOB, measure=False, say=str, cluster_sets=["cluster.nothing=1"]
        )


@pytest.mark.usefixtures("measured")
def test_only_plans_that_can_be_trained_are_searched() -> None:
    chosen = choose.choose("llama-5m", cluster="local:2", job=JOB, measure=False, say=str)
    assert chosen.decision is not None
    for candidate in chosen.decision.ranked:
        design = choose.replace(chosen.design, plan=candidate.plan)
        assert search.check(design, scopes=frozenset({search.Scope.RUNTIME})) == ()


@pytest.mark.usefixtures("measured")
def test_what_no_plan_can_train_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Problem(what="it cannot be trained yet")
    fastest = search.design(choose.catalog.load_model("llama-5m"), choose.catalog.load_cluster("local:2"), JOB)

    def design(*_: object, trainable: bool) -> search.Decision:
        assert trainable
        return choose.replace(fastest, predicts_only=(refusal,))

    monkeypatch.setattr(choose.search, "design", design)
    with pytest.raises(NoPlanFits, match="it cannot be trained yet"):
        choose.choose("llama-5m", cluster="local:2", job=JOB, measure=False, say=str)


def test_a_job_that_cannot_run_is_told_before_anything_is_measured(measured: list[str], tmp_path: Path) -> None:
    missing = choose.with_data(JOB, (tmp_path / "nothing.txt",))
    with pytest.raises(ConfigError, match=r"nothing\.txt"):
        choose.choose("llama-5m", cluster="local", job=missing, measure=True, say=str)
    assert measured == []


def test_files_replace_the_sources_of_a_job(tmp_path: Path) -> None:
    assert choose.with_data(JOB, ()) is JOB
    made = choose.with_data(JOB, (tmp_path / "a.txt", tmp_path / "b.txt"))
    assert [source.path for source in made.data.sources] == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def test_a_job_without_a_length_is_as_long_as_its_steps() -> None:
    assert choose.with_length(JOB, steps=3) is JOB
    free = JobSpec(sequence_length=64, batch_tokens=512)
    assert choose.with_length(free, steps=7).total_steps == 7
    assert choose.with_length(free, steps=None) is free
