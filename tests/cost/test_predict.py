import math
from dataclasses import replace
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest

from meshwright.cost import PlanTable, evaluate, predict, timeline, uncertainty
from meshwright.cost.evaluate import stage_seconds
from meshwright.cost.simulate import makespan, simulate
from meshwright.schedule.build import build
from meshwright.spec.cluster import Precision
from meshwright.spec.plan import Recompute, ScheduleKind, Sharding
from meshwright.spec.report import LineName, MemoryPart, Origin
from tests.cost.cost_examples import JOB, design, even_layout, gpt, llama, mixed, processor, selene

CASES = {
    "one": {},
    "data": {"replicate": 8},
    "sharded": {"shard": 4, "replicate": 2, "sharding": Sharding.PARAMETERS},
    "tensor": {"tensor": 4, "sequence_parallel": True, "recompute": Recompute.SELECTIVE},
    "pipeline": {"pipeline": 4, "microbatches": 8, "recompute": Recompute.FULL},
    "interleaved": {"pipeline": 2, "chunks": 2, "kind": ScheduleKind.INTERLEAVED},
    "gpipe": {"pipeline": 2, "tensor": 2, "shard": 2, "sharding": Sharding.OPTIMIZER, "kind": ScheduleKind.GPIPE},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("model", [llama(), mixed()], ids=["llama", "mixed"])
def test_a_report_agrees_with_the_search_and_with_itself(name, model):
    options = design(model, selene(nodes=1), **CASES[name])
    report = predict(options)
    costs = evaluate(PlanTable.from_plan(options.plan), model=model, cluster=options.cluster, job=JOB)
    assert report.step_seconds == pytest.approx(float(costs.step_seconds[0]), rel=1e-12)
    assert report.peak_bytes == pytest.approx(float(costs.memory_bytes[0]), rel=1e-12)
    assert report.balanced
    assert report.fits
    assert [line.name for line in report.step.lines] == [name for name in LineName if name is not LineName.STEP]
    assert {part for stage in report.memory for part in stage.parts} == {part.value for part in MemoryPart}
    assert len(report.memory) == options.plan.pipeline
    assert report.tokens_per_step == options.plan.batch_tokens
    for line in report.step.lines:
        assert line.seconds >= -1e-12
        if line.lines:
            assert sum(child.seconds for child in line.lines) == pytest.approx(line.seconds, rel=1e-6)
    assert 0.0 < report.mfu < 1.0
    assert report.bottleneck
    low, high = report.error_band
    assert low < 1.0 < high
    assert low * high == pytest.approx(1.0)


def test_parts_of_the_model_are_named():
    report = predict(design(mixed(), selene(nodes=1)))
    forward = {line.name for line in report.step.find(LineName.FORWARD).lines}
    assert {"embedding", "attention", "feed forward", "mixture", "recurrence", "norm", "head and loss"} <= forward


def test_money_and_time_to_the_target():
    report = predict(design(llama(), selene(nodes=1), replicate=4))
    assert report.price_per_hour == pytest.approx(8.0)
    assert report.total_seconds == pytest.approx(report.total_tokens / report.tokens_per_second)
    assert any("4 devices are not used" in note for note in report.notes)


def test_measured_links_make_the_report_calibrated():
    machine = replace(processor(ranks=4, cores=2), step_error=0.05)
    case = design(llama(), machine, replicate=4, precision=Precision.FP32)
    report = predict(case)
    assert report.step.origin is Origin.CALIBRATED
    exposed = report.share(LineName.GRADIENTS, LineName.PARAMETERS)
    spread = math.hypot(0.05, exposed * uncertainty.SPREADS[uncertainty.Cause.DATA])
    assert report.error_band[1] == pytest.approx(math.exp(uncertainty.REACH * spread))
    assert report.peak_flops == pytest.approx(2 * 160e9)
    assert any("4 ranks share 2 cores" in note for note in report.notes)


@pytest.mark.parametrize("name", ["one", "pipeline", "interleaved", "gpipe"])
def test_a_timeline_fills_the_predicted_step(name):
    case = design(llama(), selene(nodes=1), **CASES[name])
    spans = timeline(case)
    report = predict(case)
    work = [span for span in spans if span.microbatch >= 0]
    stages = len(case.plan.stages)
    assert len(work) == 2 * stages * case.plan.schedule.microbatches
    assert {span.name for span in work} == {LineName.FORWARD, LineName.BACKWARD}
    start = min(span.start for span in work)
    end = max(span.start + span.seconds for span in work)
    assert start == pytest.approx(report.detail["first_gather_seconds"], rel=1e-9)
    assert end - start == pytest.approx(report.detail["makespan_seconds"], rel=1e-9)
    waits = [span for span in spans if span.name == LineName.BUBBLE]
    assert bool(waits) is (case.plan.pipeline > 1)
    for rank in range(case.plan.pipeline):
        own = sorted((s for s in spans if s.rank == rank), key=lambda span: span.start)
        for before, after in pairwise(own):
            assert after.start >= before.start + before.seconds - 1e-12


@pytest.mark.parametrize("microbatches", [8, 16, 64])
@pytest.mark.parametrize("layers", [17, 20, 30])
def test_an_interleaved_plan_of_uneven_stages_is_predicted_as_it_plays(layers, microbatches):
    model = llama(width=1024, hidden=4096, heads=8, layers=layers, vocab=32000)
    case = design(
        model,
        selene(nodes=1),
        job=replace(JOB, sequence_length=2048),
        pipeline=4,
        chunks=2,
        kind=ScheduleKind.INTERLEAVED,
        microbatches=microbatches,
        layout=even_layout(layers=layers, pipeline=4, chunks=2),
    )
    predicted = predict(case).detail["makespan_seconds"]
    assert predicted == pytest.approx(played_seconds(case), rel=0.01 if microbatches > 20 else 1e-9)


def test_a_schedule_too_large_to_follow_is_priced_by_the_closed_form(monkeypatch):
    model = llama(width=1024, hidden=4096, heads=8, layers=17, vocab=32000)
    case = design(
        model,
        selene(nodes=1),
        job=replace(JOB, sequence_length=2048),
        pipeline=4,
        chunks=2,
        kind=ScheduleKind.INTERLEAVED,
        microbatches=16,
        layout=even_layout(layers=17, pipeline=4, chunks=2),
    )
    followed = predict(case).detail["makespan_seconds"]
    module = import_module("meshwright.cost.evaluate")
    monkeypatch.setattr(module, "_MOST_ACTIONS", 1)
    monkeypatch.setattr(module, "longest_path", None)
    assert predict(case).detail["makespan_seconds"] == pytest.approx(followed, rel=0.04)


def test_the_played_pipeline_agrees_with_the_closed_form_within_one_percent():
    model = llama(width=1024, hidden=4096, heads=8, layers=28, vocab=32000)
    for kind, pipeline, chunks in [
        (ScheduleKind.GPIPE, 4, 1),
        (ScheduleKind.ONE_F_ONE_B, 4, 1),
        (ScheduleKind.INTERLEAVED, 7, 2),
        (ScheduleKind.ONE_F_ONE_B, 8, 1),
    ]:
        case = design(
            model,
            selene(nodes=1),
            job=replace(JOB, sequence_length=2048),
            pipeline=pipeline,
            chunks=chunks,
            kind=kind,
            microbatches=14,
            layout=even_layout(layers=28, pipeline=pipeline, chunks=chunks),
        )
        assert played_over_closed(case) == pytest.approx(1.0, rel=0.01), (kind, pipeline)


def played_over_closed(case):
    table = PlanTable.from_plan(case.plan)
    costs = evaluate(table, model=case.model, cluster=case.cluster, job=case.job)
    return played_seconds(case) / float(costs.figures["makespan_seconds"][0])


def played_seconds(case):
    table = PlanTable.from_plan(case.plan)
    schedule = case.plan.schedule
    actions = build(
        schedule.kind, pipeline=case.plan.pipeline, chunks=schedule.chunks, microbatches=schedule.microbatches
    )
    stages = stage_seconds(table, model=case.model, cluster=case.cluster, job=case.job)
    return makespan(simulate(actions, stages=stages))


def test_megatron_one_trillion_is_within_twelve_percent_of_what_was_measured():
    """2104.04473, table 1, last row: 3072 A100, tensor 8, pipeline 64, data 6, 163 TFLOP/s a device."""
    layers, width, vocab, sequence, batch = 128, 25600, 51200, 2048, 3072
    flops = 96.0 * batch * sequence * layers * width**2
    flops *= 1.0 + sequence / (6.0 * width) + vocab / (16.0 * layers * width)
    measured = flops / (163e12 * 3072)
    case = design(
        gpt(width=width, layers=layers, heads=160, vocab=vocab),
        selene(nodes=384),
        job=replace(JOB, sequence_length=sequence, batch_tokens=sequence * batch, software="megatron-2021"),
        tensor=8,
        pipeline=64,
        replicate=6,
        microbatches=512,
        recompute=Recompute.FULL,
        precision=Precision.FP16,
    )
    report = predict(case)
    assert report.step_seconds == pytest.approx(measured, rel=0.12)
    assert report.fits
    assert np.isclose(case.model.parameters, 1.008e12, rtol=1e-3)


def test_a_long_context_names_the_mask_of_documents():
    def notes(length: int, *, mask: bool = True) -> str:
        made = design(llama(width=4096, hidden=16384, heads=32, layers=2), selene(nodes=1))
        made = replace(made, plan=replace(made.plan, sequence_length=length))
        data = replace(made.job.data, document_mask=mask)
        return "\n".join(predict(replace(made, job=replace(made.job, data=data))).notes)

    assert "document_mask" not in notes(1024)
    long = notes(65536)
    assert "priced over whole sequences of 65,536 tokens: job.data.document_mask is on" in long
    assert "document_mask" not in notes(65536, mask=False)
