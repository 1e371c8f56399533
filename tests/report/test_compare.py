"""Two plans side by side: the differences are those of their reports, and the verdict follows from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import meshwright
from meshwright.report import compare
from meshwright.spec.codec import canonical
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design, Offload
from meshwright.spec.report import Line, LineName, Origin, Report

pytestmark = pytest.mark.usefixtures("searched_once")

MODEL, BATCH = "llama-3.2-1b", 2**20
NARROW: dict[str, int | str] = {"context": 1, "pipeline": 1}


def write(
    path: Path, cluster: str = "16xH100", *, model: str = MODEL, length: int = 2048, batch: int = BATCH, **fix: int
) -> Design:
    """The best plan of few, with those settings fixed, is in `path`."""
    job = meshwright.JobSpec(
        batch_tokens=batch, sequence_length=length, constraints=meshwright.Constraints(fix=NARROW | fix)
    )
    decision = meshwright.design(model, cluster, job, top=1)
    path.write_text(decision.design.to_json())
    return decision.design


def test_the_faster_is_named_with_the_difference_of_every_cause(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a.json"), write(tmp_path / "b.json", tensor=4)
    found = compare(tmp_path / "a.json", tmp_path / "b.json")
    fast, slow = meshwright.predict(one), meshwright.predict(other)
    assert found.settings["tensor"] == (str(one.plan.tensor), "4")
    assert "model" not in found.settings
    assert "expert tensor" not in found.settings, "the model has no experts"
    assert sum(pair.one for pair in found.step) == pytest.approx(fast.step_seconds)
    assert sum(pair.other for pair in found.step) == pytest.approx(slow.step_seconds)
    assert sum(pair.other for pair in found.memory) == pytest.approx(slow.peak_bytes)
    less = 1.0 - fast.step_seconds / slow.step_seconds
    assert f"a takes {100 * less:.1f} % less time a step than b" in found.verdict
    assert "mostly in tensor collectives" in found.verdict
    assert "bands" not in found.verdict, "on the same machines the order does not hang on the band"
    assert found.origin is Origin.ANALYTIC


def test_steps_that_do_not_do_the_same_are_compared_by_tokens(tmp_path: Path) -> None:
    write(tmp_path / "a.json")
    write(tmp_path / "b.json", "32xH100", batch=2 * BATCH)
    found = compare(tmp_path / "a.json", tmp_path / "b.json")
    one, other = found.one.report.tokens_per_second, found.other.report.tokens_per_second
    assert f"b trains {other / one:.2f} times the tokens/s of a" in found.verdict
    assert "on 32 devices, not 16" in found.verdict
    assert found.settings["batch"] == ("1,048,576 tokens", "2,097,152 tokens")


def test_machines_of_one_name_and_unlike_figures_are_told(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json")
    (group,) = design.cluster.groups
    slower = replace(group, nic=replace(group.nic, bandwidth=0.5 * group.nic.bandwidth))
    for origin, said in (
        (Origin.ANALYTIC, f"{design.cluster.name}, with other figures"),
        (Origin.CALIBRATED, f"{design.cluster.name}, calibrated"),
    ):
        cluster = replace(design.cluster, groups=(slower,), origin=origin)
        (tmp_path / "b.json").write_text(replace(design, cluster=cluster).to_json())
        found = compare(tmp_path / "a.json", tmp_path / "b.json")
        assert found.settings["cluster"][1] == said
        assert f"The figures of {design.cluster.name} are others in the two" in found.verdict
    same = compare(tmp_path / "a.json", tmp_path / "a.json")
    assert "cluster" not in same.settings
    assert "figures" not in same.verdict


def test_what_one_of_two_compiles_is_told(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json")
    (tmp_path / "b.json").write_text(replace(design, job=replace(design.job, compile=Switch.ON)).to_json())
    assert compare(tmp_path / "a.json", tmp_path / "b.json").settings == {"compile": ("off", "on")}


def test_of_different_models_there_is_no_verdict(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json")
    write(tmp_path / "b.json", model="gpt3-1.3b")
    verdict = compare(tmp_path / "a.json", tmp_path / "b.json").verdict
    assert verdict.startswith(f"No verdict: they train {MODEL} and gpt3-1.3b. a trains ")
    renamed = replace(design, model=replace(design.model, max_positions=4096))
    (tmp_path / "c.json").write_text(renamed.to_json())
    assert f"two models that are called {MODEL}" in compare(tmp_path / "a.json", tmp_path / "c.json").verdict


def test_longer_sequences_are_said_to_cost_more(tmp_path: Path) -> None:
    write(tmp_path / "a.json")
    write(tmp_path / "b.json", length=8192)
    verdict = compare(tmp_path / "a.json", tmp_path / "b.json").verdict
    assert verdict.endswith("they have 2,048 and 8,192 tokens.")


def test_one_that_does_not_fit_loses(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json")
    large = replace(design.plan, microbatch=32, schedule=replace(design.plan.schedule, microbatches=1))
    (tmp_path / "b.json").write_text(replace(design, plan=large, job=meshwright.JobSpec(batch_tokens=BATCH)).to_json())
    assert not meshwright.predict(tmp_path / "b.json").fits
    assert compare(tmp_path / "a.json", tmp_path / "b.json").verdict.startswith("a fits and b does not")


def test_one_that_the_hosts_memory_does_not_hold_is_told_so(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json")
    (small,) = design.cluster.groups
    cluster = replace(design.cluster, groups=(replace(small, host_bytes=2.0**30),))
    stages = tuple(
        replace(stage, groups=tuple(replace(group, offload=Offload.OPTIMIZER) for group in stage.groups))
        for stage in design.plan.stages
    )
    crowded = replace(design, plan=replace(design.plan, stages=stages), cluster=cluster)
    (tmp_path / "b.json").write_text(crowded.to_json())
    need = meshwright.predict(crowded).tightest.need
    assert "of the host's memory" in need
    assert compare(tmp_path / "a.json", tmp_path / "b.json").verdict.startswith(f"a fits and b does not: it {need}.")


def test_a_plan_and_itself_are_the_same(tmp_path: Path) -> None:
    write(tmp_path / "a.json")
    found = compare(tmp_path / "a.json", tmp_path / "a.json")
    assert found.settings == {}
    assert "take as long a step; both need as much memory" in found.verdict


def test_plans_that_are_only_laid_differently_are_not_the_same(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json", pipeline=2, tensor=2)
    turned = replace(design, plan=replace(design.plan, axes=tuple(reversed(design.plan.axes))))
    moved = replace(design, plan=replace(design.plan, placement=tuple(reversed(range(16)))))
    for name, other, setting in (
        ("b.json", turned, "axes, outermost first"),
        ("c.json", moved, "devices of the ranks"),
    ):
        (tmp_path / name).write_text(other.to_json())
        assert list(compare(tmp_path / "a.json", tmp_path / name).settings) == [setting]


def test_runs_that_were_measured_are_compared_by_measurements(tmp_path: Path) -> None:
    design = write(tmp_path / "a.json")
    for name, seconds in (("one", 8.0), ("two", 4.0)):
        run = tmp_path / name
        run.mkdir()
        (run / "design.json").write_text(design.to_json())
        report = meshwright.predict(design)
        lines = (Line(name=LineName.FORWARD, seconds=seconds),)
        measured: Report = replace(
            report, step=Line(name=LineName.STEP, seconds=seconds, origin=Origin.MEASURED, lines=lines)
        )
        (run / "measured.json").write_text(canonical(measured))
    found = compare(tmp_path / "one", tmp_path / "two")
    assert found.origin is Origin.MEASURED
    assert "two took 50.0 % less time a step than one" in found.verdict
    predicted = compare(tmp_path / "one", tmp_path / "a.json")
    assert predicted.one.report.step_seconds == meshwright.predict(design).step_seconds


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    write(tmp_path / "plan.json")
    with pytest.raises(ConfigError, match=r"plan\.json"):
        compare(tmp_path / "plan.json", tmp_path / "plam.json")
