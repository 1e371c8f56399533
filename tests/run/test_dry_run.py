"""A dry run counts what the real step does: probes tell the whole to the byte, and a fake rank what a real one does."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright import cost
from meshwright.catalog import load_cluster
from meshwright.cli.app import run as main
from meshwright.run.children import in_child
from meshwright.run.dry.count import RankCount, content
from meshwright.run.dry.jobs import jobs_of, shared_out
from meshwright.run.dry.worker import PRELOADED
from meshwright.run.dry_run import dry_run, shares_of
from meshwright.run.preflight import check_design
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.compression import PowerSgd
from meshwright.spec.errors import ConfigError, ExitCode, WorkerFailed
from meshwright.spec.exchange import Exchange, TokenLayout
from meshwright.spec.job import Switch
from meshwright.spec.plan import Design, Plan, Recompute, ScheduleKind, Sharding
from meshwright.spec.report import LineName, MemoryPart, Origin
from meshwright.spec.synchronize import SyncKind
from tests.run import dry_cases
from tests.run.dry_cases import case
from tests.run.runs import cluster, design
from tests.support import designs, models
from tests.support.designs import Layout
from tests.support.models import ROUTINGS, routed, with_prefix
from tests.support.pool import Pool

FULL = Recompute.FULL


def balanced(entry: Design) -> Design:
    """Its experts are chosen with a bias, for which a step leaves counts to the next."""
    return replace(entry, model=routed(entry.model, ROUTINGS["sigmoid"]))


SLICES = Layout(pipeline=2, shard=2, kind=ScheduleKind.SEQUENCE_1F1B, slices=4, sharding=Sharding.OPTIMIZER, batch=24)
DENSE = Layout(shard=2, tensor=2, sequence_parallel=True, sharding=Sharding.PARAMETERS, batch=4)
PROBED = {
    "dense": case(DENSE, layers=7),
    "mixture": balanced(case(Layout(batch=6), kind="mixture", layers=8)),
}
MORE = {
    "dense": case(replace(DENSE, batch=12), layers=10),
    "plain": case(Layout(pipeline=2, tensor=2, batch=8), layers=16),
    "zero3": case(Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, recompute=FULL, batch=14), layers=18),
    "slices": balanced(case(SLICES, kind="mixture", layers=16)),
    "cut rows": case(replace(SLICES, microbatch=2, sharding=Sharding.PARAMETERS, batch=40), layers=18),
    "sliced gpipe": case(Layout(pipeline=2, tensor=2, kind=ScheduleKind.GPIPE, slices=2, batch=9), layers=16),
}
REAL = (
    case(Layout(shard=2, tensor=2, sequence_parallel=True, sharding=Sharding.PARAMETERS, batch=4), accelerator=False),
    case(Layout(pipeline=2, replicate=2, batch=8, recompute=FULL), accelerator=False),
)


def same(whole: RankCount, probed: RankCount) -> None:
    for name in ("memory", "flops", "calls", "bytes"):
        assert dict(getattr(whole, name)) == dict(getattr(probed, name)), name


def check_probes(cases: dict, ranks: list[int] | None = None) -> None:
    found = dry_cases.apart(dry_cases.count_both, designs=list(cases.values()), ranks=ranks)
    for ranks in found:
        for whole, probed in ranks:
            assert probed.probed
            assert not whole.probed
            same(whole, probed)


def test_probes_tell_the_whole_to_the_byte() -> None:
    check_probes(PROBED)


def check_split(entry: Design, rank: int) -> None:
    """The step of a pipeline in which halves of weights wait, from probes of fewer microbatches."""
    (counted,) = dry_cases.apart(dry_cases.count_ranks, designs=[entry], ranks=[rank])
    (probed,) = dry_cases.apart(dry_cases.count_probed, designs=[entry], rank=rank)
    assert probed.probed
    same(counted, probed)


def test_a_job_that_compiles_is_counted_as_it_is_written() -> None:
    plain = [case(Layout(batch=4), accelerator=accelerator, layers=2) for accelerator in (True, False)]
    compiled = [replace(entry, job=replace(entry.job, compile=Switch.ON)) for entry in plain]
    found = dry_cases.apart(dry_cases.count_whole, designs=[*plain, *compiled])
    for (written,), (other,) in zip(found[:2], found[2:], strict=True):
        same(written, other)


@pytest.mark.slow
def test_halves_of_backwards_are_told_from_few_microbatches() -> None:
    """And what context ranks cut of a batch before its passes, and losses that are kept until they are done."""
    check_split(case(Layout(pipeline=6, context=2, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=14), layers=6), 5)


@pytest.mark.parametrize("kind", [ScheduleKind.ZERO_BUBBLE_H1, ScheduleKind.INTERLEAVED])
def test_passes_come_in_the_order_in_which_they_are_performed(kind: ScheduleKind) -> None:
    chunks = 2 if kind is ScheduleKind.INTERLEAVED else 1
    entry = case(Layout(pipeline=2, chunks=chunks, kind=kind, batch=6), layers=2)
    told, performed = dry_cases.apart(dry_cases.told_and_performed, entry=entry, rank=1)
    assert told == performed


def test_stages_in_loops_gather_as_often_as_all_of_the_plan_does() -> None:
    """Interleaved ones for every pass, and breadth-first ones too where one of another rank has two layers."""
    loops = Layout(pipeline=2, shard=2, chunks=2, sharding=Sharding.PARAMETERS, batch=16)
    designs = [
        case(replace(loops, kind=ScheduleKind.INTERLEAVED), layers=2),
        case(replace(loops, kind=ScheduleKind.BREADTH_FIRST), layers=5),
    ]
    found = dry_cases.apart(dry_cases.count_probed, designs=designs, rank=0)
    for entry, told in zip(designs, found, strict=True):
        assert dict(told.bytes) == pytest.approx(dict(cost.traffic(entry, rank=0).bytes), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(6))
@pytest.mark.parametrize("kind", ["tiny", "mixture"])
def test_halves_are_told_on_every_rank(kind: str, rank: int) -> None:
    layout = Layout(pipeline=6, shard=2, sharding=Sharding.GRADIENTS, kind=ScheduleKind.ZERO_BUBBLE_H1, batch=28)
    check_split(case(layout, kind=kind, layers=6), rank)


@pytest.mark.slow
def test_what_operators_give_back_is_remembered_as_torch_works_it_out() -> None:
    with_them, without = dry_cases.apart(dry_cases.count_with_and_without_recipes, entry=REAL[0])
    same(without, with_them)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_probes_of_other_layouts_do_so_too(name: str) -> None:
    check_probes({name: MORE[name]})


@pytest.mark.slow
def test_a_fake_rank_counts_what_a_real_one_does(pool: Pool) -> None:
    fake = dry_cases.apart(dry_cases.count_fake, designs=list(REAL), rank=0)
    for entry, told in zip(REAL, fake, strict=True):
        real = pool.run(dry_cases.count_real, entry, ranks=entry.plan.world_size)[0]
        assert told.flops == real.flops
        assert told.calls == real.calls
        assert told.bytes == real.bytes
        ours, theirs = sum(told.memory.values()), sum(real.memory.values())
        assert ours == pytest.approx(theirs, rel=0.02)


def test_what_prompts_see_is_counted_as_a_real_rank_counts_it(pool: Pool) -> None:
    """Between context ranks, where the tiles of a prefix mask are known numbers."""
    exchange = Exchange(layout=TokenLayout.BALANCED)
    entry = case(Layout(pipeline=2, context=2, batch=2, exchange=exchange), layers=2, accelerator=False)
    entry = replace(entry, model=with_prefix(entry.model))
    (told,) = dry_cases.apart(dry_cases.count_fake, designs=[entry], rank=0)
    real = pool.run(dry_cases.count_real, entry, ranks=4)[0]
    assert (told.flops, told.calls, told.bytes) == (real.flops, real.calls, real.bytes)


def test_a_dry_run_is_a_report_beside_the_prediction() -> None:
    entry = case(Layout(shard=1024, sharding=Sharding.PARAMETERS, batch=1024), layers=2)
    entry = replace(entry, cluster=load_cluster("1024xH100"), plan=replace(entry.plan, cluster="1024xH100"))
    said: list[str] = []
    found = dry_run(entry, say=said.append)
    assert said
    assert found.counted.step.origin is Origin.COUNTED
    assert found.counted.plan == found.predicted.plan == entry.plan.digest()
    assert found.fits is found.counted.fits is True
    forward, told = (report.step.find(LineName.FORWARD) for report in (found.counted, found.predicted))
    assert forward is not None
    assert told is not None
    assert forward.flops == told.flops
    stage = found.counted.memory[0]
    assert stage.parts[MemoryPart.OPTIMIZER] > 0
    assert any(gap.name == "rank 0 peak" and gap.measured == stage.total for gap in found.gaps)


@pytest.mark.usefixtures("counted_in_turn")
@pytest.mark.parametrize("layout", [TokenLayout.CONTIGUOUS, TokenLayout.ZIGZAG])
def test_of_context_ranks_the_one_with_most_scores_is_counted(layout: TokenLayout) -> None:
    """Of ranks that hold a sequence one behind the other the last sees all keys and the first but its own."""
    made, length = case(Layout(context=4, batch=2, exchange=Exchange(layout=layout)), layers=2), 4096
    job = replace(made.job, sequence_length=length, batch_tokens=2 * length)
    plan = replace(made.plan, cluster="4xH100", sequence_length=length)
    told = dry_run(replace(made, cluster=load_cluster("4xH100"), job=job, plan=plan))
    for name in (LineName.FORWARD, LineName.BACKWARD):
        counted, predicted = told.counted.step.find(name), told.predicted.step.find(name)
        assert counted is not None
        assert predicted is not None
        assert counted.flops == pytest.approx(predicted.flops, rel=0.05)


@pytest.mark.usefixtures("counted_in_turn")
@pytest.mark.parametrize(
    "layout",
    [
        Layout(context=2, recompute=FULL, batch=2, exchange=Exchange(layout=TokenLayout.ZIGZAG)),
        Layout(context=2, recompute=Recompute.SELECTIVE, batch=2, exchange=Exchange(layout=TokenLayout.ZIGZAG)),
        Layout(pipeline=2, kind=ScheduleKind.ZERO_BUBBLE_H1, recompute=FULL, batch=4),
        Layout(pipeline=2, kind=ScheduleKind.SEQUENCE_1F1B, slices=4, recompute=Recompute.SELECTIVE, batch=4),
    ],
)
def test_what_is_computed_again_is_told_apart_from_the_rest_of_backward(layout: Layout) -> None:
    """Operators of our own save what they need by themselves, halves of backwards put their products off, and a slice
    meets no keys behind it."""
    made = case(layout, layers=2)
    told = dry_run(replace(made, cluster=load_cluster("2xH100"), plan=replace(made.plan, cluster="2xH100")))
    for name in (LineName.FORWARD, LineName.BACKWARD, LineName.RECOMPUTE):
        counted, predicted = told.counted.step.find(name), told.predicted.step.find(name)
        assert counted is not None
        assert predicted is not None
        assert counted.flops == pytest.approx(predicted.flops, rel=1e-9), name


def test_what_does_not_fit_is_counted_and_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    machines = load_cluster("1xH100")
    group = machines.groups[0]
    small = replace(group, device=replace(group.device, memory_bytes=9e8))
    entry = case(Layout(batch=1), layers=1)
    entry = replace(entry, cluster=replace(machines, groups=(small,)), plan=replace(entry.plan, cluster="1xH100"))
    path, page = tmp_path / "plan.json", tmp_path / "page.html"
    path.write_text(entry.to_json())
    assert main(["dryrun", str(path), "--json", "--html", str(page)]) == ExitCode.NO_PLAN
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["counted"]["step"]["origin"] == "counted"
    assert "fits: no" in page.read_text()


@pytest.mark.usefixtures("counted_in_turn")
def test_a_plan_for_another_trainer_is_counted_and_predicted_as_this_runtime_and_says_so() -> None:
    entry = case(Layout(batch=1), layers=1)
    entry = replace(entry, cluster=load_cluster("1xH100"), plan=replace(entry.plan, cluster="1xH100"))
    other = replace(entry, job=replace(entry.job, software="megatron-core"))
    usual, told = dry_run(entry), dry_run(other)
    assert told.predicted == usual.predicted
    assert told.counted == replace(usual.counted, notes=told.counted.notes)
    note, *rest = told.counted.notes
    assert tuple(rest) == usual.counted.notes
    assert note.startswith("this is the plan as this runtime trains it, counted and predicted: ")
    assert "; the design names megatron-core, as which it takes " in note


@pytest.mark.usefixtures("counted_in_turn")
def test_what_does_nothing_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    entry = case(Layout(batch=1), layers=1)
    entry = replace(entry, cluster=load_cluster("1xH100"), plan=replace(entry.plan, cluster="1xH100"))
    (tmp_path / "plan.json").write_text(entry.to_json())
    assert main(["dryrun", str(tmp_path / "plan.json"), "--set", "job.spike.window=64", "--json"]) == ExitCode.OK
    assert "warning: --set spike.window: does nothing (spike.policy is ignore)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["plan.json", "--model", "tiny"], ["none.json"]])
def test_bad_input_is_told_in_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dryrun", *words]) == ExitCode.USAGE
    assert "Traceback" not in capsys.readouterr().err


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_counts_and_is_killed_is_told() -> None:
    with pytest.raises(WorkerFailed, match="the process died"):
        in_child(killed, {}, seconds=280, preload=PRELOADED)


def unsupported(design: str, ranks: list[int], whole: bool, known: dict[str, object], say: object) -> None:
    raise NotImplementedError("no kernel of 'aten::odd'\nCPU: registered at ...\nMeta: registered at ...")


def test_what_cannot_be_traced_is_one_line_and_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.run.dry_run.count_ranks", unsupported)
    words = ["dryrun", "--model", "tiny", "--cluster", "local:2", "--job", "examples/demo.toml"]
    assert main(words) == ExitCode.BUG
    told = capsys.readouterr().err
    assert "the step could not be traced: NotImplementedError: no kernel of 'aten::odd' (this is a fault" in told
    assert "registered at" not in told
    assert main(["--verbose", *words]) == ExitCode.BUG
    assert "Meta: registered at" in capsys.readouterr().err


@pytest.mark.usefixtures("counted_in_turn")
def test_fp16_holds_and_sends_what_bf16_does() -> None:
    layout = Layout(pipeline=2, shard=2, sharding=Sharding.PARAMETERS, batch=4)
    halves = (Precision.BF16, Precision.FP16)
    made = [designs.design(models.model(), replace(layout, precision=kind)) for kind in halves]
    wanted, found = (dry_run(replace(each, cluster=cluster(4))) for each in made)
    assert found.ranks == wanted.ranks
    assert found.predicted.memory == wanted.predicted.memory


def test_what_the_runtime_cannot_run_is_refused_by_its_rule() -> None:
    entry = case(Layout(batch=2))
    plan = replace(entry.plan, schedule=replace(entry.plan.schedule, kind=ScheduleKind.SEQUENCE_1F1B, slices=2))
    with pytest.raises(ConfigError, match="schedule"):
        dry_run(replace(entry, plan=plan))
    (group,) = entry.cluster.groups
    tpus = replace(group, device=replace(group.device, kind=DeviceKind.TPU))
    with pytest.raises(ConfigError, match="rule runtime-devices"):
        dry_run(replace(entry, cluster=replace(entry.cluster, groups=(tpus,))))


def test_what_the_job_does_not_allow_is_refused_as_it_is_to_train(tmp_path: Path) -> None:
    entry = design(tmp_path, Layout(batch=4, replicate=2), steps=4)
    plan, (group,) = entry.plan, entry.plan.groups
    half = replace(plan.stages[0], groups=(replace(group, precision=Precision.BF16),))
    spoilt = [
        (replace(entry, plan=replace(plan, stages=(half,))), "rule precision-is-asked"),
        (replace(entry, plan=met(plan, compression=PowerSgd(rank=2))), "rule compression-is-asked"),
        (replace(entry, plan=met(plan, kind=SyncKind.LOCAL)), "rule learners-are-asked"),
        (replace(entry, job=replace(entry.job, techniques=("nope",))), "technique 'nope' is unknown"),
    ]
    for broken, says in spoilt:
        for refuse in (dry_run, check_design):
            with pytest.raises(ConfigError, match=says):
                refuse(broken)


def met(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, gradients=replace(plan.gradients, **changes))


def test_traces_are_shared_out_once_each_and_evenly() -> None:
    entry = case(Layout(pipeline=3, batch=12), layers=30)
    jobs = [job for rank in range(3) for job in jobs_of(entry, rank=rank, whole=False).jobs]
    shares = shared_out([*jobs, *jobs], processes=2)
    keys = [job.key for share in shares for job in share]
    assert sorted(keys) == sorted({job.key for job in jobs})
    works = [sum(job.work for job in share) for share in shares]
    assert max(works) - min(works) <= max(job.work for job in jobs)


def test_ranks_that_hold_the_same_are_counted_by_one_process() -> None:
    entry = case(Layout(pipeline=6, batch=6), layers=16)
    shares = shares_of(entry, processes=2)
    assert sorted(rank for share in shares for rank in share) == list(range(6))
    for one in range(6):
        for other in range(6):
            if content(entry, one) == content(entry, other):
                assert any(one in share and other in share for share in shares)
