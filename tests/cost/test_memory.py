"""Memory of whole plans: held against counts of our own modules, published peaks, and what must rise or fall."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.cost import PlanTable, evaluate, predict
from meshwright.cost.table import OFFLOADS, RECOMPUTES, SCHEDULES, SHARDINGS
from meshwright.nn import Decoder
from meshwright.parallel.apply import units
from meshwright.parallel.tensor import divided_dim
from meshwright.replay.express import express
from meshwright.replay.runs import read_runs
from meshwright.schedule.build import V_SHAPES
from meshwright.spec.cluster import Precision
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.plan import Offload, Recompute, ScheduleKind
from meshwright.spec.report import MemoryPart
from tests.cost.block_cases import BLOCKS, ENDS, MIXERS, TRANSFORMS
from tests.cost.cost_examples import design, even_layout, llama, processor, selene
from tests.cost.saved_tensors import Setting
from tests.cost.whole_step import step_peak

ROOT = Path(__file__).parents[2]
SMALL = llama(width=256, hidden=768, layers=4, vocab=1024, heads=8)
CUT = llama(width=512, hidden=1408, layers=3, vocab=2048, heads=8)


def predicted(model, setting, *, microbatches):
    precision = Precision.BF16 if setting.compute is torch.bfloat16 else Precision.FP32
    job = JobSpec(
        sequence_length=setting.sequence,
        batch_tokens=setting.batch * setting.sequence * microbatches,
        precision=precision,
        data=DataSpec(document_mask=False),
    )
    made = design(
        model,
        processor(ranks=1, cores=1),
        job=job,
        microbatch=setting.batch,
        microbatches=microbatches,
        precision=precision,
        recompute=setting.recompute,
        layout=even_layout(layers=len(model.layers), pipeline=1),
    )
    stage = predict(made).memory[0]
    return stage.allocated - stage.parts[MemoryPart.PARAMETERS] - stage.parts[MemoryPart.OPTIMIZER]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(("batch", "microbatches"), [(1, 1), (4, 2)])
def test_the_peak_of_a_step_is_that_of_our_own_modules(compute, recompute, batch, microbatches):
    """Within what a linear's backward has for a moment: the gradient of its own weight."""
    setting = Setting(batch=batch, sequence=1024, compute=compute, recompute=recompute)
    told = predicted(SMALL, setting, microbatches=microbatches)
    assert told == pytest.approx(step_peak(SMALL, setting, microbatches=microbatches), rel=0.015)


def local_bytes(model, *, tensor):
    """Elements that a tensor rank holds of the modules of `model`, by the layout's own table."""
    with torch.device("meta"):
        decoder = Decoder(model)
    total = 0.0
    for prefix, unit, block in units(decoder):
        for name, parameter in unit.named_parameters(prefix=prefix):
            divided = divided_dim(name, block=model.blocks[block]) is not None
            total += parameter.numel() / (tensor if divided else 1)
    return 4.0 * total


@pytest.mark.parametrize("tensor", [1, 2])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ENDS])
def test_parameters_and_optimizer_state_are_those_of_the_laid_modules(name, tensor):
    if name in MIXERS:
        layer = replace(MIXERS[name], transform=TRANSFORMS["gated"].transform)
    else:
        layer = replace(MIXERS["grouped"], transform=BLOCKS[name].transform)
    model = replace(
        SMALL, embedding=ENDS["embedding, positions"], layers=(layer, layer), head=ENDS["head, tied, capped"]
    )
    job = JobSpec(sequence_length=128, precision=Precision.FP32)
    made = design(
        model,
        processor(ranks=2, cores=2),
        job=job,
        tensor=tensor,
        precision=Precision.FP32,
        layout=even_layout(layers=2, pipeline=1),
    )
    parts = predict(made).memory[0].parts
    assert parts[MemoryPart.PARAMETERS] == local_bytes(model, tensor=tensor)
    assert parts[MemoryPart.OPTIMIZER] == 2.0 * local_bytes(model, tensor=tensor)


def megatron_runs():
    rows = read_runs(ROOT / "benchmarks" / "published" / "runs.csv")
    return [run for run in rows if run.source.startswith("S26") and run.number("mem_gb")]


def test_peaks_that_megatron_allocates_on_b200_within_half_a_percent():
    """SimuMax's measurements (docs/b200, 18 runs): no figure of the model comes from them."""
    errors = []
    for run in megatron_runs():
        report = predict(express(run).design)
        peak = max(stage.allocated for stage in report.memory)
        errors.append(abs(peak / (1e9 * (run.number("mem_gb") or 0.0)) - 1.0))
    assert len(errors) == 18
    assert fmean(errors) < 0.005
    assert max(errors) < 0.01


def test_allocators_reserve_more_than_they_give_and_processors_have_none():
    stage = predict(express(megatron_runs()[0]).design).memory[0]
    assert stage.allocated < stage.reserved < 1.1 * stage.allocated
    made = design(SMALL, processor(ranks=1, cores=1), layout=even_layout(layers=4, pipeline=1))
    alone = predict(made).memory[0]
    assert alone.reserved == alone.allocated


def test_allocators_of_old_stacks_lose_a_sixth_more_than_tensors_fill():
    entry = express(megatron_runs()[0]).design
    old = predict(replace(entry, job=replace(entry.job, software="megatron-2022"))).memory[0]
    assert old.allocated == pytest.approx(0.85 * old.reserved)


TABLE_JOB = JobSpec(sequence_length=512, data=DataSpec(document_mask=False))


def peaks(columns, *, software="torch", model=CUT):
    """The peak of every row, all parts and the heaviest rank."""
    table = PlanTable.build(columns, layouts=[even_layout(layers=len(model.layers), pipeline=1)])
    job = replace(TABLE_JOB, software=software)
    return evaluate(table, model=model, cluster=selene(nodes=8), job=job).memory_bytes


STACKS = ("torch", "torch-2024", "megatron-core", "megatron-2021")


def along(columns, changes, *, software):
    """The peaks of every row of `columns` (rows, values), where the columns of `changes` have each of their values."""
    rows, values = len(columns["tensor"]), len(next(iter(changes.values())))
    table = {name: np.repeat(column, values) for name, column in columns.items()}
    table |= {name: np.tile(column, rows) for name, column in changes.items()}
    return peaks(table, software=software).reshape(rows, values)


@pytest.mark.parametrize("software", STACKS)
def test_memory_rises_with_the_microbatch_and_falls_with_tensor_ranks_and_sharding(software):
    drawn = product([1, 2, 4], range(len(RECOMPUTES)), range(len(SHARDINGS)))
    tensor, recompute, sharding = np.array(list(drawn)).T
    usual = {"tensor": tensor, "recompute": recompute, "sharding": sharding, "sequence_parallel": tensor > 1}
    usual |= {name: np.full(len(tensor), value) for name, value in (("shard", 8), ("microbatch", 4))}
    usual |= {"microbatches": np.full(len(tensor), 2), "replicate": np.ones(len(tensor), dtype=int)}
    assert (np.diff(along(usual, {"microbatch": [1, 2, 4, 8, 16]}, software=software)) > 0.0).all()
    assert (np.diff(along(usual, {"tensor": [1, 2, 4], "sequence_parallel": [1] * 3}, software=software)) < 0.0).all()
    falls = np.diff(along(usual, {"shard": [1, 2, 4, 8], "replicate": [8, 4, 2, 1]}, software=software)) <= 0.0
    assert falls[:, 1:].all()
    assert falls[sharding == 0].all()


@given(software=st.sampled_from(STACKS), tensor=st.sampled_from([1, 4]), batch=st.sampled_from([8, 32]))
@settings(max_examples=12)
def test_memory_falls_with_recompute_and_offload(software, tensor, batch):
    usual = {"tensor": tensor, "microbatch": batch, "microbatches": 2}
    by_name = {kind: RECOMPUTES.index(kind) for kind in Recompute}
    order = [by_name[kind] for kind in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL)]
    held = peaks(usual | {"recompute": order}, software=software)
    assert held[0] >= held[1] > held[2]


def test_optimizer_state_in_the_hosts_memory_is_not_on_the_device():
    cluster = selene(nodes=1)
    table = PlanTable.build(
        {"offload": [OFFLOADS.index(Offload.NONE), OFFLOADS.index(Offload.OPTIMIZER)]},
        layouts=[even_layout(layers=3, pipeline=1)],
    )
    group = replace(cluster.groups[0], host=cluster.groups[0].inside)
    costs = evaluate(table, model=CUT, cluster=replace(cluster, groups=(group,)), job=TABLE_JOB)
    optimizer = costs.memory[MemoryPart.OPTIMIZER][:, 0]
    assert optimizer[0] == 8.0 * CUT.parameters
    assert optimizer[1] == 0.0
    assert costs.memory_bytes[0] - costs.memory_bytes[1] == pytest.approx(optimizer[0])


def test_eight_bit_recipes_keep_less_of_activations_and_copies_of_weights():
    columns = {"precision": [list(Precision).index(Precision.BF16), list(Precision).index(Precision.FP8)]}
    table = PlanTable.build(columns | {"microbatch": 8}, layouts=[even_layout(layers=3, pipeline=1)])
    device = replace(selene(nodes=1).groups[0].device, peak_flops={Precision.BF16: 1e15, Precision.FP8: 2e15})
    group = replace(selene(nodes=1).groups[0], device=device)
    cluster = replace(selene(nodes=1), groups=(group,))
    costs = evaluate(table, model=CUT, cluster=cluster, job=replace(TABLE_JOB, software="megatron-core"))
    bf16, fp8 = costs.memory[MemoryPart.ACTIVATIONS][:, 0]
    assert 0.5 * bf16 < fp8 < bf16
    weights = costs.memory[MemoryPart.PARAMETERS][:, 0]
    layers = sum(layer.parameters for layer in CUT.layers)
    assert weights[1] - weights[0] == 2.0 * layers


def test_parameters_of_eight_bits_lie_beside_no_other_copy_and_sharded_ones_are_quantised_as_they_come():
    """Layers by rows and by columns instead of two bytes; scales of a byte for 32 elements under mxfp8."""
    order = list(Precision)
    layout = even_layout(layers=3, pipeline=1)
    recipes = {"precision": [order.index(Precision.BF16), order.index(Precision.FP8), order.index(Precision.MXFP8)]}
    peaks_by = {Precision.BF16: 1e15, Precision.FP8: 2e15, Precision.MXFP8: 2e15}
    device = replace(selene(nodes=1).groups[0].device, peak_flops=peaks_by)
    cluster = replace(selene(nodes=1), groups=(replace(selene(nodes=1).groups[0], device=device),))
    layers = sum(layer.parameters for layer in CUT.layers)

    def held(software, **columns):
        table = PlanTable.build(recipes | columns, layouts=[layout])
        job = replace(TABLE_JOB, software=software)
        return evaluate(table, model=CUT, cluster=cluster, job=job).memory[MemoryPart.PARAMETERS][:, 0]

    whole = held("megatron-bridge")
    assert whole - whole[0] == pytest.approx([0.0, 0.0, 2.0 / 32 * layers])
    beside = held("megatron-core")
    assert beside - beside[0] == pytest.approx([0.0, 2.0 * layers, (2.0 + 2.0 / 32) * layers])
    sharded = held("megatron-core", shard=8, sharding=3)
    assert sharded == pytest.approx([2.0 * CUT.parameters / 8] * 3)


def test_gradients_add_up_in_half_precision_where_the_software_says_so():
    """At the peak in backward: those that a rank owns are copied to fp32 only for the optimizer's step."""
    columns = {"microbatches": 2, "shard": 8, "sharding": 1}
    table = PlanTable.build(columns, layouts=[even_layout(layers=3, pipeline=1)])
    wide, narrow = (
        evaluate(table, model=CUT, cluster=selene(nodes=1), job=replace(TABLE_JOB, software=name))
        for name in ("megatron-flash", "internevo")
    )
    held = [costs.memory[MemoryPart.GRADIENTS][0, 0] / CUT.parameters for costs in (wide, narrow)]
    assert held == pytest.approx([4.0, 2.0])


def test_masters_beside_the_weights_of_megatron_are_eighteen_bytes_a_parameter():
    costs = evaluate(
        PlanTable.build({"replicate": 8}, layouts=[even_layout(layers=3, pipeline=1)]),
        model=CUT,
        cluster=selene(nodes=1),
        job=replace(TABLE_JOB, software="megatron-core"),
    )
    kept = (MemoryPart.PARAMETERS, MemoryPart.GRADIENTS, MemoryPart.OPTIMIZER)
    assert sum(costs.memory[part][0, 0] for part in kept) == 18.0 * CUT.parameters


LOOPED = tuple(kind for kind in ScheduleKind if kind not in (ScheduleKind.TABLE, *V_SHAPES))


@pytest.mark.parametrize("sharding", [0, 1, 3])
@pytest.mark.parametrize("kind", LOOPED)
def test_the_ranks_shown_are_as_full_as_any_of_a_run_of_equal_ones(kind: ScheduleKind, sharding: int) -> None:
    """Where some of a run hold all microbatches at once and others go on, none between them holds more."""
    chunks = 2 if kind in (ScheduleKind.INTERLEAVED, ScheduleKind.BREADTH_FIRST) else 1
    columns = {
        "pipeline": 8,
        "chunks": chunks,
        "microbatches": [8, 16, 24, 40],
        "microbatch": 1,
        "slices": 4 if kind is ScheduleKind.SEQUENCE_1F1B else 1,
        "schedule": SCHEDULES.index(kind),
        "shard": 8,
        "sharding": sharding,
    }
    table = PlanTable.build(columns, layouts=[even_layout(layers=32, pipeline=8, chunks=chunks)])
    model = llama(width=512, hidden=2048, heads=8, layers=32, vocab=1024)
    job = replace(TABLE_JOB, sequence_length=512)
    few, all_of = (
        evaluate(table, model=model, cluster=selene(nodes=8), job=job, every_rank=every) for every in (False, True)
    )
    assert few.memory_bytes == pytest.approx(all_of.memory_bytes, rel=1e-12)
