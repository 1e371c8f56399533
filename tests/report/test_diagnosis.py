"""The diagnosis of run directories that are made up: of the dead and of the well; and the traffic of plans."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from meshwright import catalog, search
from meshwright.cli import main
from meshwright.cost import predict
from meshwright.report.congestion import Tier, congestion, tier_of
from meshwright.report.diagnosis import diagnose
from meshwright.report.explain import explain
from meshwright.report.page import write_page
from meshwright.spec.cluster import Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.goodput import Mark, Moment
from meshwright.spec.incident import Incident, Trouble
from meshwright.spec.plan import Axis, AxisName, Design
from meshwright.spec.report import Line, LineName, Origin, Report
from meshwright.spec.synchronize import GradientSync, SynchronizeSpec, SyncKind, usual_rounds
from meshwright.train.observe.collective_log import CollectiveLog, Group
from meshwright.train.observe.incidents import keep
from meshwright.train.observe.timekeeper import note
from tests.report import synthetic

SLOW = Incident(
    trouble=Trouble.RANK,
    begun=40,
    at=1000.0,
    what="rank 2 (b) is slow: 1.42 times its peers' own time in the last 16 steps",
    ranks=(2,),
    hosts=("b",),
    ratio=1.42,
    evidence=("its thread waited for a core 41.0 % of the time",),
    fix="see what else runs on its machine",
)


def collectives(run_dir: Path) -> None:
    """Rank 3 computes where the others wait for it."""
    for rank in range(4):
        log = CollectiveLog(run_dir, rank=rank)
        group = log.know(Group(name="0", ranks=(0, 1, 2, 3), described="default_pg"))
        for step in (20, 21):
            log.begin_step(step)
            log.leave(log.enter(group, "all_reduce", 1024), inside_seconds=0.002)
        if rank != 3:
            log.enter(group, "all_gather", 2048)


def test_a_dead_run_says_who_kept_it_waiting_and_what_was_told_before(run_dir: Path) -> None:
    collectives(run_dir)
    keep(run_dir, SLOW)
    keep(run_dir, replace(SLOW, ended=90))
    marks = [(Moment.LAUNCHED, ""), (Moment.ENDED, "rank 1 was killed (signal 9)"), (Moment.LAUNCHED, "")]
    marks += [(Moment.ENDED, "rank 0 lost another"), (Moment.ENDED, "rank 3 did not come to where the others waited")]
    for index, (what, why) in enumerate(marks):
        note(run_dir, Mark(what=what, at=time.time() + index, why=why))
    found = diagnose(run_dir)
    assert not found.healthy
    text = "\n".join(found.lines())
    assert "step 200, failed: rank 3 did not come to where the others waited" in text
    assert "found  rank 3 kept others waiting in step 21: ranks 0, 1 and 2 waited for it in all_gather 3" in text
    assert "slow rank  from step 40, until step 90: rank 2 (b) is slow: 1.42 times" in text
    assert "known by  its thread waited for a core" in text
    assert found.failures == ("rank 1 was killed (signal 9)",)
    assert [use.rank for use in found.ranks] == [0, 1, 2, 3]
    assert found.ranks[0].longest == "all_reduce 2 (all ranks) in step 21"


def test_no_step_time_is_told_where_no_collective_marks_steps(run_dir: Path) -> None:
    """As of one rank, whose only collectives are those of its checkpoints."""
    log = CollectiveLog(run_dir, rank=0)
    group = log.know(Group(name="1", ranks=(0,), described="checkpoints"))
    for step in (20, 30):
        log.begin_step(step)
        log.leave(log.enter(group, "all_gather", 8), inside_seconds=0.001)
    (use,) = diagnose(run_dir).ranks
    assert (use.steps, use.own_seconds, use.waited_seconds) == (0, None, None)
    (line,) = [line for line in diagnose(run_dir).lines() if line.strip().startswith("rank 0")]
    assert line.strip().startswith("rank 0  longest in all_gather ")
    assert "a step" not in line


def test_a_run_that_ended_well_is_healthy(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    note(run_dir, Mark(what=Moment.LAUNCHED, at=1.0))
    note(run_dir, Mark(what=Moment.ENDED, at=2.0, asked=True))
    assert main(["diagnose", str(run_dir)]) == 0
    printed = capsys.readouterr().out
    assert "novels: step 200, ended as it was asked to" in printed
    assert "nothing was wrong" in printed
    assert "traffic  inside nodes: " in printed


def learners(*, every: int) -> Design:
    """Two eager learners of two pipeline ranks."""
    made = synthetic.design(shard=1)
    rounds = usual_rounds(SyncKind.EAGER, every=every, learners=2, precision=Precision.FP32)
    axes = (made.plan.axes[0], Axis(name=AxisName.REPLICATE, size=2), *made.plan.axes[1:])
    plan = replace(made.plan, axes=axes, gradients=GradientSync(kind=SyncKind.EAGER, rounds=rounds))
    asked = SynchronizeSpec(kinds=(SyncKind.EAGER,))
    return replace(made, plan=plan, job=replace(made.job, batch_tokens=plan.batch_tokens, synchronize=asked))


def test_rounds_that_a_run_made_longer_are_told_by_all_that_tell_of_it(tmp_path: Path) -> None:
    folder = synthetic.write_run(tmp_path / "learners", chosen=learners(every=8))
    told = "rom step 60 on learners meet every 16 steps, not every 8 as planned"
    assert diagnose(folder).rounds == ""
    assert not any(told in line for line in explain(folder).sentences)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"step": step, "round_steps": every}) + "\n" for step, every in ((40, 12), (60, 16)))
    assert any(told in line for line in diagnose(folder).lines())
    assert any(told in line for line in explain(folder).sentences)
    assert "every 16" in explain(folder).ways[0].words
    assert told in write_page([folder], tmp_path / "page.html").read_text()


def test_a_device_alone_has_no_traffic() -> None:
    """What it measures of collectives of its own is about nothing."""
    sets = ("batch_tokens=1Ki", "sequence_length=128")
    cluster = catalog.local_cluster(cores=2, memory_bytes=8e9, devices=1)
    design = search.design(catalog.load_model("tiny"), cluster, catalog.load_job(None, sets=sets)).design
    report = predict(design)
    own = Line(name=LineName.GRADIENTS, seconds=8.9e-6, origin=Origin.MEASURED)
    timed = replace(report, step=replace(report.step, lines=(own,)))
    assert congestion(design, predicted=report, measured=timed).lines() == []


def test_a_run_that_goes_on_is_told_when_it_was_heard_of(run_dir: Path) -> None:
    assert diagnose(run_dir).state == "no rank was heard of"
    collectives(run_dir)
    assert diagnose(run_dir).state.startswith("no end was written; a rank was heard of ")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run"):
        diagnose(tmp_path / "nowhere")
    (tmp_path / "plan.json").write_text(synthetic.design().to_json())
    with pytest.raises(ConfigError, match="a plan has not run yet"):
        diagnose(tmp_path / "plan.json")


def test_incidents_are_on_the_page_and_beside_it(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(run_dir, SLOW)
    assert "What went wrong" in write_page([run_dir], run_dir / "page.html").read_text()
    assert main(["report", str(run_dir), "--no-trace"]) == 0
    assert "slow rank  from step 40, still so at the end: rank 2 (b) is slow" in capsys.readouterr().out


@cache
def wide() -> Design:
    """Four nodes of four devices, between which the network is slow, with replicas inside nodes and stages across."""
    cluster = catalog.load_cluster("4x4xA100-80GB")
    job = catalog.load_job(
        None,
        sets=("batch_tokens=64Ki", "sequence_length=1Ki", "constraints.fix.tensor=1", "constraints.fix.pipeline=4"),
    )
    return search.design(catalog.load_model("gpt2-medium"), cluster, job).design


def measured(report: Report, *, times: float) -> Report:
    """As predicted, but for collectives of gradients and parameters that take so many times as long."""
    slow = (LineName.GRADIENTS, LineName.PARAMETERS)
    lines = tuple(
        replace(line, origin=Origin.MEASURED, seconds=line.seconds * (times if line.name in slow else 1.0))
        for line in report.step.lines
    )
    whole = sum(line.seconds for line in lines)
    return replace(report, step=Line(name=LineName.STEP, seconds=whole, origin=Origin.MEASURED, lines=lines))


def test_a_tier_that_gives_what_was_predicted_is_not_congested() -> None:
    design = wide()
    report = predict(design)
    found = congestion(design, predicted=report, measured=measured(report, times=1.1))
    assert found.tiers
    assert found.congested is None


def test_the_order_of_axes_that_waits_less_is_named() -> None:
    """Replicas lie across nodes, whose network is five times slower than was thought: stages should."""
    design = wide()
    design = replace(design, plan=replace(design.plan, axes=design.plan.axes[::-1]))
    report = predict(design)
    found = congestion(design, predicted=report, measured=measured(report, times=5.0))
    assert found.congested is Tier.NODES
    assert found.relief is not None
    assert found.relief.axes[0].startswith("pipeline")
    assert found.relief.relieved_seconds < found.relief.seconds
    assert "with its axes in the order pipeline 4, " in found.lines()[-1]


def test_ranks_of_one_machine_that_wait_are_told_of_its_cores() -> None:
    cluster = catalog.local_cluster(cores=2, memory_bytes=8e9, devices=2)
    sets = ("batch_tokens=1Ki", "sequence_length=128", "constraints.fix.replicate=2")
    design = search.design(catalog.load_model("tiny"), cluster, catalog.load_job(None, sets=sets)).design
    report = predict(design)
    found = congestion(design, predicted=report, measured=measured(report, times=100.0))
    assert found.congested is Tier.NODE
    assert (
        found.lines()[1] == "ranks of a node wait for each other longer than predicted: see what else runs on its cores"
    )


def test_how_far_groups_reach() -> None:
    design = wide()
    innermost = next(axis.name for axis in reversed(design.plan.axes) if axis.size > 1)
    whole = [axis.name for axis in design.plan.axes]
    assert tier_of(design, whole) is Tier.NODES
    small = replace(design, plan=replace(design.plan, axes=(), placement=None))
    assert tier_of(small, (AxisName.TENSOR,)) is Tier.NODE
    assert innermost in whole
