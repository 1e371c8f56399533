import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright import catalog
from meshwright.cost import PRECISIONS, SCHEDULES, SHARDINGS, Layout, PlanTable, evaluate
from meshwright.cost.layouts import count
from meshwright.cost.machine import machine
from meshwright.cost.parameters import local_parameters
from meshwright.cost.stacks import software_of
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec
from meshwright.spec.plan import ScheduleKind, Sharding
from meshwright.spec.report import LineName, MemoryPart
from tests.cost.cost_examples import A100, JOB, even_layout, gpt, llama, mixed, processor, selene, with_group

INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)


def everything(model, *, sequence_parallel=(0, 1)):
    """Plans of all kinds on eight devices."""
    layouts = [even_layout(layers=4, pipeline=1), even_layout(layers=4, pipeline=2)]
    layouts.append(even_layout(layers=4, pipeline=2, chunks=2))
    rows = [
        {
            "tensor": tensor,
            "sequence_parallel": split and tensor > 1,
            "pipeline": 1 if layout == 0 else 2,
            "chunks": 2 if layout == 2 else 1,
            "schedule": INTERLEAVED if layout == 2 else kind,
            "replicate": replicate if sharding else 8 // tensor // (1 if layout == 0 else 2),
            "shard": 8 // tensor // (1 if layout == 0 else 2) // replicate if sharding else 1,
            "sharding": sharding,
            "recompute": recompute,
            "microbatch": 2,
            "microbatches": 4,
            "layout": layout,
        }
        for tensor in (1, 2, 4)
        for split in sequence_parallel
        for layout in (0, 1, 2)
        for kind in (0, 1)
        for sharding in range(4)
        for replicate in (1, 8 // tensor // (1 if layout == 0 else 2))
        for recompute in range(3)
    ]
    assert len(model.layers) == 4
    columns = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return PlanTable.build(columns, layouts=layouts)


@pytest.mark.parametrize("model", [llama(), mixed()], ids=["llama", "mixed"])
@pytest.mark.parametrize("cluster", [selene(nodes=1), processor(ranks=8, cores=2)], ids=["selene", "processor"])
def test_lines_sum_to_the_step_and_nothing_is_negative(model, cluster):
    costs = evaluate(everything(model), model=model, cluster=cluster, job=JOB)
    assert np.isfinite(costs.step_seconds).all()
    assert np.allclose(sum(costs.parts.values()), costs.step_seconds, rtol=1e-12)
    for name, values in costs.parts.items():
        assert (values >= -1e-9 * costs.step_seconds).all(), name
    for name, values in costs.total.items():
        assert (costs.parts[name] <= values * (1 + 1e-12)).all(), name
    for name, values in costs.memory.items():
        assert (values >= 0.0).all(), name
    assert costs.fits.all()


def test_rows_do_not_depend_on_their_neighbours():
    model = mixed()
    table = everything(model)
    whole = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB)
    rows = [0, 17, 101, len(table) - 1]
    some = evaluate(table.take(rows), model=model, cluster=selene(nodes=1), job=JOB)
    assert np.allclose(whole.step_seconds[rows], some.step_seconds, rtol=1e-12)
    assert np.allclose(whole.memory_bytes[rows], some.memory_bytes, rtol=1e-12)


def test_showing_every_rank_changes_neither_the_step_nor_the_peak():
    model = llama(layers=16)
    layouts = [even_layout(layers=16, pipeline=8), even_layout(layers=16, pipeline=4, chunks=2)]
    columns = {"pipeline": [8, 8, 4], "chunks": [1, 1, 2], "schedule": [0, 1, INTERLEAVED], "layout": [0, 0, 1]}
    table = PlanTable.build(columns | {"microbatches": 8}, layouts=layouts)
    few = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB)
    all_of = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB, every_rank=True)
    assert all_of.valid.sum(axis=1).tolist() == [8, 8, 4]
    assert np.allclose(few.step_seconds, all_of.step_seconds, rtol=1e-12)
    assert np.allclose(few.memory_bytes, all_of.memory_bytes, rtol=1e-12)


@given(cuts=st.sets(st.integers(1, 5), max_size=3), model=st.sampled_from([llama(), mixed()]))
@settings(max_examples=12)
def test_parameters_of_all_stages_are_those_of_the_model(cuts, model):
    bounds = (0, *sorted(cuts), 6)
    layout = Layout(bounds=bounds, ranks=tuple(range(len(bounds) - 1)))
    table = PlanTable.build({"pipeline": len(layout.ranks)}, layouts=[layout])
    arrays = count([layout], model=model, every_rank=True)
    cluster = selene(nodes=1)
    priced = machine(
        cluster.groups[0], table, arrays.kinds, cluster=cluster, job=JOB, software=software_of(JOB, cluster)
    )
    held = local_parameters(table, priced.blocks, arrays=arrays, counts={"total": arrays.total}, model=model)
    assert held.sum() == pytest.approx(model.parameters, rel=1e-12)


def test_a_tied_head_away_from_its_embedding_holds_a_copy():
    model = gpt(width=64, layers=4, heads=4, vocab=512)
    layouts = [even_layout(layers=4, pipeline=2), even_layout(layers=4, pipeline=1)]
    table = PlanTable.build({"pipeline": [2, 1], "layout": [0, 1]}, layouts=layouts)
    costs = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB, every_rank=True)
    held = costs.memory[MemoryPart.OPTIMIZER].sum(axis=1) / 8.0
    assert held[0] - held[1] == pytest.approx(512 * 64)
    assert held[1] == pytest.approx(model.parameters)


@given(scale=st.floats(1.05, 8.0), which=st.sampled_from(["peak", "memory", "inside", "nic"]))
@settings(max_examples=6)
def test_a_faster_machine_is_never_slower(scale, which):
    model = llama(width=512, hidden=1024, heads=8)
    table = everything(model)
    group = selene(nodes=1).groups[0]
    changed = {
        "peak": lambda: {"device": replace(A100, peak_flops={k: scale * v for k, v in A100.peak_flops.items()})},
        "memory": lambda: {"device": replace(A100, memory_bandwidth=scale * A100.memory_bandwidth)},
        "inside": lambda: {"inside": replace(group.inside, bandwidth=scale * group.inside.bandwidth)},
        "nic": lambda: {"nic": replace(group.nic, bandwidth=scale * group.nic.bandwidth)},
    }[which]()
    base = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB)
    fast = evaluate(table, model=model, cluster=with_group(selene(nodes=1), **changed), job=JOB)
    assert (fast.step_seconds <= base.step_seconds * (1 + 1e-9)).all()


@given(small=st.integers(1, 6), more=st.integers(1, 6))
@settings(max_examples=4)
def test_a_larger_microbatch_never_takes_less_memory(small, more):
    model = mixed()
    table = everything(model)
    sizes = [replace(table, microbatch=np.full(len(table), size)) for size in (small, small + more)]
    low, high = (evaluate(entry, model=model, cluster=selene(nodes=1), job=JOB) for entry in sizes)
    assert (high.memory_bytes > low.memory_bytes).all()


def test_options_that_are_off_cost_nothing():
    model = llama()
    plain = PlanTable.build({"microbatches": 4}, layouts=[even_layout(layers=4, pipeline=1)])
    costs = evaluate(plain, model=model, cluster=selene(nodes=1), job=JOB)
    zero = (LineName.TENSOR, LineName.TRANSFER, LineName.BUBBLE, LineName.GRADIENTS, LineName.PARAMETERS)
    assert [float(costs.parts[name][0]) for name in (*zero, LineName.RECOMPUTE)] == [0.0] * 6
    split = replace(plain, sequence_parallel=np.array([True]))
    assert evaluate(split, model=model, cluster=selene(nodes=1), job=JOB).step_seconds == costs.step_seconds
    sharded = replace(plain, sharding=np.array([3]))
    alone = evaluate(sharded, model=model, cluster=selene(nodes=1), job=JOB)
    assert float(alone.parts[LineName.PARAMETERS][0]) == 0.0


def test_full_recompute_trades_a_forward_for_memory():
    model = llama(width=512, hidden=2048, heads=8, layers=8)
    table = PlanTable.build({"recompute": [0, 1, 2], "microbatch": 8}, layouts=[even_layout(layers=8, pipeline=1)])
    costs = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB)
    kept = costs.memory[MemoryPart.ACTIVATIONS].max(axis=1)
    assert kept[0] > kept[1] > kept[2]
    assert np.all(np.diff(costs.step_seconds) > 0.0)
    again = costs.parts[LineName.RECOMPUTE]
    assert 0.8 < again[2] / costs.parts[LineName.FORWARD][2] <= 1.0


def test_sharding_divides_what_its_name_says():
    model = llama()
    table = PlanTable.build(
        {"sharding": [0, 1, 2, 3], "shard": [1, 8, 8, 8], "replicate": [8, 1, 1, 1], "microbatches": 4},
        layouts=[even_layout(layers=4, pipeline=1)],
    )
    costs = evaluate(table, model=model, cluster=selene(nodes=1), job=JOB)
    size = float(model.parameters)
    assert np.allclose(costs.memory[MemoryPart.OPTIMIZER][:, 0], size * np.array([8, 1, 1, 1]))
    assert np.allclose(costs.memory[MemoryPart.GRADIENTS][:, 0], size * np.array([4, 4, 0.5, 0.5]))
    assert np.allclose(costs.memory[MemoryPart.PARAMETERS][:, 0], size * np.array([4, 2.5, 2.5, 0.5]))
    moved = costs.total[LineName.PARAMETERS]
    assert moved[0] == 0.0
    assert moved[1] == pytest.approx(moved[2])
    assert moved[3] == pytest.approx(8.0 * moved[2])
    assert [SHARDINGS[i] for i in (0, 3)] == [Sharding.NONE, Sharding.PARAMETERS]


def test_a_precision_without_a_peak_is_refused_in_words():
    table = PlanTable.build({"precision": PRECISIONS.index(Precision.FP8)}, layouts=[even_layout(layers=4, pipeline=1)])
    with pytest.raises(ConfigError, match="no peak for fp8"):
        evaluate(table, model=llama(), cluster=selene(nodes=1), job=JOB)
    with pytest.raises(ConfigError, match="software"):
        evaluate(table, model=llama(), cluster=selene(nodes=1), job=replace(JOB, software="nonsense"))


def test_unlike_machines_run_at_the_pace_of_the_slowest():
    model = llama(width=2048, hidden=8192, heads=16)
    slow = replace(A100, name="old", peak_flops={Precision.BF16: 31e12}, memory_bandwidth=2e11)
    fast_group = selene(nodes=1).groups[0]
    cluster = replace(selene(nodes=1), groups=(fast_group, replace(fast_group, name="old", device=slow)))
    table = PlanTable.build(
        {"pipeline": [2, 1], "replicate": [8, 16], "microbatches": 4, "microbatch": 4, "layout": [0, 1]},
        layouts=[even_layout(layers=4, pipeline=2), even_layout(layers=4, pipeline=1)],
    )
    both = evaluate(table, model=model, cluster=cluster, job=JOB)
    all_slow = evaluate(table, model=model, cluster=selene(nodes=2, device=slow), job=JOB)
    all_fast = evaluate(table, model=model, cluster=selene(nodes=2), job=JOB)
    assert both.step_seconds[1] == pytest.approx(all_slow.step_seconds[1])
    assert all_fast.step_seconds[0] < both.step_seconds[0] < all_slow.step_seconds[0]
    assert both.busiest[0] == 1


def test_ten_thousand_plans_of_a_large_model_take_well_under_a_second():
    model = llama(width=16384, hidden=53248, heads=128, layers=126, vocab=128256)
    layouts = [even_layout(layers=126, pipeline=size) for size in (4, 8, 16)]
    rng = np.random.default_rng(0)
    rows = 10_000
    layout = rng.integers(0, 3, rows)
    pipeline = np.array([4, 8, 16])[layout]
    tensor = rng.choice([1, 2, 4, 8], rows)
    columns = {
        "tensor": tensor,
        "pipeline": pipeline,
        "layout": layout,
        "replicate": 16384 // tensor // pipeline,
        "microbatch": rng.choice([1, 2, 4], rows),
        "microbatches": rng.choice([4, 8, 16], rows),
        "recompute": rng.integers(0, 3, rows),
    }
    table = PlanTable.build(columns, layouts=layouts)
    began = time.process_time()
    costs = evaluate(table, model=model, cluster=selene(nodes=2048), job=replace(JOB, sequence_length=8192))
    assert time.process_time() - began < 1.0
    assert len(costs) == rows
    assert np.isfinite(costs.step_seconds).all()


def test_a_processor_shares_its_cores():
    assert processor(ranks=4, cores=2).groups[0].device.kind is DeviceKind.CPU
    model = llama(width=256, hidden=512, heads=4)
    job = replace(JOB, sequence_length=256)
    layouts = [even_layout(layers=4, pipeline=size) for size in (1, 2, 4)]
    columns = {
        "replicate": [1, 2, 4, 1, 1],
        "pipeline": [1, 1, 1, 2, 4],
        "layout": [0, 0, 0, 1, 2],
        "microbatches": [8, 4, 2, 8, 8],
        "precision": PRECISIONS.index(Precision.FP32),
    }
    table = PlanTable.build(columns, layouts=layouts)
    cluster = processor(ranks=4, cores=2)
    one, two, four, stages, deep = evaluate(table, model=model, cluster=cluster, job=job).figures["makespan_seconds"]
    assert two == pytest.approx(four, rel=0.02)  # four ranks on two cores work no faster than two
    assert 0.5 <= two / one <= 1.1  # one rank on two cores reaches 1.9 times one core's speed
    work = two
    assert deep >= work  # cores are never overfull
    assert deep <= 1.25 * stages


@pytest.mark.parametrize(("kind", "phases"), [(ScheduleKind.GPIPE, 2.0), (ScheduleKind.ONE_F_ONE_B, 1.0)])
def test_a_link_carries_one_microbatch_after_another(kind, phases):
    """Over a slow link a step is no shorter than all that crosses it; ways back come after where forwards do first."""
    cluster = catalog.load_cluster("two-sites")
    job = JobSpec(sequence_length=4096, data=DataSpec(document_mask=False))
    columns = {"pipeline": 2, "microbatches": 32, "schedule": SCHEDULES.index(kind)}
    columns |= {"replicate": cluster.num_devices // 2}
    model = llama(width=4096, hidden=14336, heads=32, layers=8, vocab=32000)
    table = PlanTable.build(columns, layouts=[even_layout(layers=8, pipeline=2)])
    costs = evaluate(table, model=model, cluster=cluster, job=job)
    features = 2.0 * 4096 * 4096 * cluster.num_devices / 2
    link = cluster.wide_area
    crossing = features / (link.bandwidth * link.efficiency / link.oversubscription)
    assert costs.figures["makespan_seconds"][0] >= phases * 32 * crossing
