"""What the planner says of precisions that devices emulate, of vocabularies that they load slowly, and of masks."""

from dataclasses import replace

import pytest

from meshwright import catalog
from meshwright.search import design
from meshwright.spec.cluster import Precision
from meshwright.spec.job import Constraints
from meshwright.spec.report import LineName
from meshwright.spec.units import format_percent, format_seconds, format_tokens
from tests.search import search_samples as samples


def emulating(*, rate):
    """Two slow devices with `rate` of their fp32 in bf16."""
    device = samples.device(speed=1e-3)
    peaks = device.peak_flops | {Precision.BF16: rate * device.peak_flops[Precision.FP32]}
    return samples.cluster(samples.nodes(devices_per_node=2, of=replace(device, peak_flops=peaks)))


@pytest.mark.parametrize(("rate", "spoken"), [(0.1, True), (2.0, False)])
def test_bf16_that_is_emulated_is_spoken_of(rate, spoken):
    job = replace(samples.job(), precision=Precision.BF16)
    found = design(samples.model(), emulating(rate=rate), job, top=1)
    assert any("in fp32 this plan would take" in line for line in found.why) == spoken
    free = design(samples.model(), emulating(rate=rate), replace(job, other_precisions=(Precision.FP32,)), top=1)
    (precision,) = {group.precision for stage in free.design.plan.stages for group in stage.groups}
    assert (precision is Precision.FP32) == spoken
    assert not any("in fp32 this plan would take" in line for line in free.why)


@pytest.mark.parametrize(("device", "spoken"), [("A100-80GB", True), ("TPU-v4", False)])
def test_a_vocabulary_that_is_loaded_slowly_is_to_be_filled_up(device, spoken):
    """GPT-2's own 50,257: nanoGPT became a quarter faster with 50,304."""
    model = catalog.load_model("gpt3-125m")
    job = replace(samples.job(), sequence_length=1024, batch_tokens=2**19)
    cluster = catalog.load_cluster(f"8x{device}")
    found = design(model, cluster, job, top=1)
    said = [line for line in found.why if line.startswith("a vocabulary of 50,304 rows, 47 of them unused")]
    assert bool(said) == spoken
    filled = design(catalog.with_vocab(model, vocab=50304), cluster, job, top=1)
    assert not any("a vocabulary of" in line for line in filled.why)
    assert (filled.report.step_seconds < 0.9 * found.report.step_seconds) == spoken


def test_what_masks_of_documents_cost_is_spoken_of_where_all_scores_are_worked_out():
    model, cluster = catalog.load_model("llama-3.2-1b"), catalog.load_cluster("8xH100")
    job = replace(samples.job(), sequence_length=4096, batch_tokens=2**22)
    found = design(model, cluster, job, top=10)
    (line,) = [line for line in found.why if line.startswith("documents that share a sequence")]
    whole = design(model, cluster, replace(job, data=replace(job.data, document_mask=False)), top=10)
    assert whole.report.step_seconds < 0.98 * found.report.step_seconds
    assert "less time" in line
    assert not any("data.document_mask" in line for line in whole.why)


def test_a_batch_of_fewer_sequences_than_devices_is_spoken_of_where_pipeline_ranks_idle():
    """And no longer where the batch has a sequence for each."""
    model, cluster = samples.model(), samples.cluster(samples.nodes(devices_per_node=4))
    fixed = Constraints(fix={"pipeline": 4, "context": 1, "tensor": 1})
    few = replace(samples.job(sequences=1), constraints=fixed)
    found = design(model, cluster, few, top=1)
    (line,) = [line for line in found.why if line.startswith("pipeline ranks idle ")]
    assert f"idle {format_percent(found.report.share(LineName.BUBBLE))} of the step: 1 sequence a step for 4" in line
    assert f"(--set batch_tokens={format_tokens(2 * few.batch_tokens)})" in line
    assert "twice the batch would train " in line
    assert "--set constraints.devices=any" in line
    many = design(model, cluster, replace(samples.job(sequences=32), constraints=fixed), top=1)
    assert not [line for line in many.why if line.startswith("pipeline ranks idle ")]


@pytest.mark.slow
def test_what_whole_sequences_would_take_without_a_mask_is_told_where_context_ranks_are_best():
    """Two nodes whose devices meet over a slow network."""
    model, cluster = catalog.load_model("llama-3.1-8b"), catalog.load_cluster("16xA100-40GB-PCIe")
    slow = replace(cluster.groups[0].nic, bandwidth=3.125e9, latency_seconds=2e-5, fits=())
    cluster = replace(cluster, groups=(replace(cluster.groups[0], nic=slow),))
    job = catalog.load_job(None, sets=["sequence_length=8192", "batch_tokens=1Mi"])
    found = design(model, cluster, job, top=1)
    assert found.design.plan.context == 2
    (line,) = [line for line in found.why if line.startswith("context 1 instead of 2 would take ")]
    whole = design(model, cluster, replace(job, data=replace(job.data, document_mask=False)), top=1)
    assert whole.design.plan.context == 1
    assert f"; with data.document_mask = false it would take {format_seconds(whole.report.step_seconds)} a step" in line


def test_learners_that_are_advised_are_those_that_lose_least_for_what_they_save():
    """Over a slow link all of them hide what they send: eager, streaming and CO2 take as long."""
    cluster = catalog.load_cluster("2x1xA100")
    slow = replace(cluster.groups[0].nic, bandwidth=12.5e6)
    cluster = replace(cluster, groups=(replace(cluster.groups[0], nic=slow),))
    job = replace(samples.job(), sequence_length=512, batch_tokens=65536)
    found = design(catalog.load_model("llama-5m"), cluster, job, top=1)
    (line,) = [line for line in found.why if "learners that meet as" in line]
    assert "2 learners that meet as eager every" in line


def test_what_masks_cost_is_told_of_the_plan_that_would_be_ranked_first_without_them():
    """Of one likelier not to fit the chance is told beside its step; where it is followed, no other plan comes."""
    model, cluster = catalog.load_model("llama-3.2-1b"), catalog.load_cluster("1xRTX-4090")
    job = catalog.load_job(None, sets=["sequence_length=4096", "batch_tokens=64Ki", "total_tokens=100M"])
    found = design(model, cluster, job, top=10)
    (line,) = [line for line in found.why if "data.document_mask" in line]
    whole = design(model, cluster, replace(job, data=replace(job.data, document_mask=False)), top=10)
    best = whole.report
    assert f"{format_percent(1.0 - best.step_seconds / found.report.step_seconds)} less" in line
    assert f" {format_seconds(best.step_seconds)} a step" in line
    assert len({entry.plan.digest() for entry in found.ranked}) == len(found.ranked), "no plan is ranked twice"
    assert whole.design.plan.microbatch == found.design.plan.microbatch or "(with" in line
