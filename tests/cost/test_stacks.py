"""What software and devices change beside their peaks: kernels of attention, fp8 recipes, host time, power."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright import catalog
from meshwright.catalog.device_curves import BLACKWELL
from meshwright.catalog.device_sheet import Sheet
from meshwright.catalog.devices import devices
from meshwright.cost import SCHEDULES, PlanTable, evaluate, predict
from meshwright.cost.evaluate import stage_rows, stage_seconds
from meshwright.cost.operators import HEAD, block_work
from meshwright.cost.stacks import SOFTWARE, software_name, software_of
from meshwright.cost.work import LossKernel, Sizes
from meshwright.spec.cluster import AttentionKernel, DeviceKind, Precision
from meshwright.spec.errors import ConfigError
from meshwright.spec.job import DataSpec, JobSpec, Switch
from meshwright.spec.plan import ScheduleKind
from meshwright.spec.report import LineName
from tests.cost.cost_examples import design, even_layout, gpt, llama

WIDE = {"width": 4096, "hidden": 14336, "heads": 32, "layers": 4, "vocab": 32000}


def seconds(
    model,
    *,
    cluster="8xH100",
    software="torch",
    precision=Precision.BF16,
    sequence=4096,
    microbatch=1,
    compiled=Switch.OFF,
):
    machines = catalog.load_cluster(cluster)
    job = JobSpec(
        sequence_length=sequence,
        software=software,
        precision=precision,
        compile=compiled,
        data=DataSpec(document_mask=False),
    )
    made = design(
        model,
        machines,
        job=job,
        replicate=machines.num_devices,
        microbatch=microbatch,
        precision=precision,
        layout=even_layout(layers=len(model.layers), pipeline=1),
    )
    return predict(made)


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("8xH100", "torch"),
        ("8xMI300X", "torch"),
        ("8xH100+8xA100", "torch"),
        ("local:2", "torch"),
        ("8xTPU-v5p", "xla"),
    ],
)
def test_software_that_is_not_said_is_what_runs_on_the_devices(cluster, name):
    machines = catalog.load_cluster(cluster)
    assert software_name(JobSpec(), machines) == name
    assert software_of(JobSpec(), machines) == SOFTWARE[name]
    assert software_name(JobSpec(software="megatron-core"), machines) == "megatron-core"


def test_no_software_is_taken_for_tpus_and_other_devices_at_once():
    mixed = catalog.load_cluster("8xTPU-v5p+8xH100")
    with pytest.raises(ConfigError, match="no software trains on TPU-v5p and H100 at once"):
        software_of(JobSpec(), mixed)
    assert software_of(JobSpec(software="xla"), mixed) == SOFTWARE["xla"]


def test_a_plan_on_tpus_costs_what_xla_takes_there():
    automatic, xla, torch = (
        seconds(llama(**WIDE), cluster="8xTPU-v5p", software=name) for name in ("auto", "xla", "torch")
    )
    assert (automatic.software, torch.software) == ("xla", "torch")
    assert automatic == xla
    assert automatic.step_seconds < torch.step_seconds


def test_newer_attention_is_faster_and_the_more_the_longer_the_sequence():
    model = llama(**WIDE)
    gains = []
    for length in (8192, 32768):
        first, second, native = (
            seconds(model, software=name, sequence=length).step_seconds
            for name in ("torch-2023", "torch-2024", "torch")
        )
        assert first > second > native
        gains.append(first / native)
    assert gains[1] > gains[0] > 1.0


def test_every_accelerator_with_kernels_knows_every_kernel():
    for device in devices().values():
        if device.attention_kernels:
            own = {AttentionKernel.TRITON} if device.kind is DeviceKind.ROCM else set()
            assert set(device.attention_kernels) == {*AttentionKernel} - {AttentionKernel.TRITON} | own
            assert all(0.0 < share.backward <= share.forward < 1.0 for share in device.attention_kernels.values())
            assert device.sources["attention_kernels"]


def test_fp8_quickens_products_and_neither_attention_nor_the_head():
    model = llama(**WIDE)
    bf16, fp8 = (seconds(model, precision=precision) for precision in (Precision.BF16, Precision.FP8))
    assert 0.5 * bf16.step_seconds < fp8.step_seconds < bf16.step_seconds
    long = [seconds(model, precision=p, sequence=65536).step_seconds for p in (Precision.BF16, Precision.FP8)]
    assert long[1] / long[0] > fp8.step_seconds / bf16.step_seconds


def test_the_host_of_eager_stacks_holds_small_models_back_and_no_large_ones():
    small, large = llama(width=256, hidden=512, layers=8, vocab=1024), llama(**WIDE)
    # A layer's two passes are at least two host times, whatever its arithmetic.
    step = seconds(small, software="megatron-flash", sequence=512).step_seconds
    assert step >= 2 * len(small.layers) * SOFTWARE["megatron-flash"].layer_seconds
    slow, fast = (
        seconds(large, software=name, microbatch=4).step_seconds for name in ("megatron-flash", "megatron-core")
    )
    assert slow / fast < 1.5


def test_a_lower_power_limit_sustains_less():
    known = devices()
    full, limited = known["H100"], known["H100-96GB"]
    assert limited.watts < full.watts
    assert limited.matrix[Precision.BF16].fraction < full.matrix[Precision.BF16].fraction
    assert "a watt" in limited.sources["matrix"]
    assert known["A100-80GB-PCIe"].matrix[Precision.BF16].fraction < known["A100-80GB"].matrix[Precision.BF16].fraction


def test_blackwell_sustains_what_its_power_limit_leaves_in_every_precision():
    """The board's watts decide, not its peak: B300 does no more in four bits than its watts over those of B200."""
    known = devices()

    def sustained(name: str, precision: Precision) -> float:
        return known[name].peak_flops[precision] * known[name].matrix[precision].fraction

    for precision in (Precision.BF16, Precision.FP8, Precision.MXFP8, Precision.NVFP4):
        for name in ("B300", "GB200", "GB300"):
            expected = known[name].watts / known["B200"].watts
            assert sustained(name, precision) / sustained("B200", precision) == pytest.approx(expected)
    assert known["B300"].peak_flops[Precision.NVFP4] > 1.4 * known["B200"].peak_flops[Precision.NVFP4]
    assert sustained("B300", Precision.NVFP4) == pytest.approx(13.10 / 3.764 * sustained("B300", Precision.BF16))
    assert known["B200"].matrix[Precision.BF16].fraction < BLACKWELL.curve.fraction
    boundless = Sheet(name="", generation=BLACKWELL, title="", memory_gib=1, bandwidth_gb=1, watts=1e4, bf16=2250)
    assert boundless.device().matrix[Precision.BF16].fraction == BLACKWELL.curve.fraction


@pytest.mark.parametrize(("software", "least", "most"), [("megatron-2021", 1.1, 1.6), ("megatron-flash", 0.95, 1.05)])
def test_heads_that_are_not_whole_16_bytes_leave_the_matrix_units(software, least, most):
    """Head width 150 beside 144: fused kernels pad, batched products of two bytes an element do not."""
    odd, even = (
        seconds(
            gpt(width=14400, layers=2, heads=heads, vocab=32000),
            cluster="8xA100-80GB",
            software=software,
            precision=Precision.FP16,
            sequence=2048,
        ).step_seconds
        for heads in (96, 100)
    )
    assert least < odd / even < most


@pytest.mark.parametrize(("pipeline", "chunks", "hops"), [(4, 1, 1.0), (2, 1, 0.5), (4, 2, 0.0)])
def test_stages_that_wait_for_transfers_are_longer_by_them(pipeline, chunks, hops):
    """Megatron-Core waits in plain 1f1b, and hides transfers where stages go round; two ranks have one neighbour."""
    model = llama(**{**WIDE, "layers": 8})
    machines = catalog.load_cluster("8xH100")
    columns = {"pipeline": pipeline, "chunks": chunks, "microbatches": 16}
    columns |= {"schedule": SCHEDULES.index(ScheduleKind.INTERLEAVED if chunks > 1 else ScheduleKind.ONE_F_ONE_B)}
    table = PlanTable.build(columns, layouts=[even_layout(layers=8, pipeline=pipeline, chunks=chunks)])
    job = JobSpec(sequence_length=4096, software="megatron-core", data=DataSpec(document_mask=False))
    rows = stage_rows(table, model=model, cluster=machines, job=job)
    sent = float(stage_rows(table, model=model, cluster=machines, job=replace(job, software="torch")).transfer.max())
    assert rows.waits == pytest.approx(hops * sent, rel=1e-9)
    assert (rows.transfer.max() > 0.0) == (hops == 0.0)
    stages = stage_seconds(table, model=model, cluster=machines, job=job)
    assert [stage.forward for stage in stages] == pytest.approx((rows.forward + rows.waits)[:, 0].tolist())
    costs = evaluate(table, model=model, cluster=machines, job=job)
    assert costs.parts[LineName.TRANSFER][0] >= 2 * 16 * chunks * hops * sent * (1 - 1e-9)


def test_megatron_softmaxes_four_heads_at_a_time_and_others_in_fp32_pass_by_pass():
    """18 heads of one sequence are no multiple of four, 36 of two are; of 20 heads one sequence is as good as two."""
    taken = {}
    for heads in (18, 20):
        model = gpt(width=256 * heads, heads=heads, layers=2, vocab=1024)
        one, two = (
            seconds(model, cluster="8xA100", software="megatron-2021", sequence=2048, microbatch=count)
            for count in (1, 2)
        )
        taken[heads] = 2.0 * one.step.find(LineName.FORWARD).seconds / two.step.find(LineName.FORWARD).seconds
    assert taken[18] > 1.1
    assert taken[20] < 1.05


def test_before_2022_megatron_added_gradients_apart_from_products():
    """Read, read and written in half precision: at least 6 bytes a parameter and microbatch."""
    model = gpt(width=8192, heads=64, layers=2, vocab=1024)
    old, new = (
        seconds(model, cluster="8xA100", software=name, sequence=2048, precision=Precision.FP16)
        for name in ("megatron-2021", "megatron-2022")
    )
    layers = 12 * 8192**2 * 2
    assert old.step.find(LineName.BACKWARD).seconds - new.step.find(LineName.BACKWARD).seconds > 2 * layers / 2.039e12


def test_blackwell_keeps_one_copy_of_weights_that_share_a_scale():
    """Hopper's units read eight-bit matrices one way only, and recipes of blocks scale either way apart."""
    model = llama(**WIDE)
    layers = float(sum(layer.parameters for layer in model.layers))

    def parameters(cluster, precision):
        found = seconds(model, cluster=cluster, software="megatron-bridge", precision=precision)
        return found.memory[0].parts["parameters"]

    one, two = (parameters(cluster, Precision.FP8) for cluster in ("8xB200", "8xH100"))
    assert two - one == pytest.approx(layers, rel=0.01)
    assert parameters("8xB200", Precision.MXFP8) > one + 0.9 * layers


def test_a_loss_kernel_reads_logits_twice_and_its_metrics_read_them_again():
    head = llama(**WIDE).blocks[-1]

    def each(kernel, *, eager=True):
        one = np.ones(1)
        sizes = Sizes(batch=one, sequence=512.0, tensor=one, split=one, itemsize=2.0 * one, eager=eager)
        part = next(part for part in block_work(head, replace(sizes, loss_kernel=kernel)) if part.name == HEAD)
        return tuple(float(way[0]) / (512.0 * head.vocab) for way in (part.traffic, part.backward_traffic))

    # bf16 logits are read, and read again to write their gradient.
    assert each(LossKernel()) == (2.0, 4.0) == each(LossKernel(), eager=False)
    # Each metric widens them and writes what a log-softmax gives.
    assert each(LossKernel(metrics=2)) == (2.0 + 2 * (6.0 + 8.0), 4.0)
    assert sum(each(None)) > sum(each(None, eager=False)) > sum(each(LossKernel()))


def test_a_job_that_compiles_has_fused_element_wise_work_and_the_same_memory():
    model = llama(**WIDE)
    plain = seconds(model)
    compiled = seconds(model, compiled=Switch.ON)
    assert seconds(model, compiled=Switch.AUTO) == plain
    for name in (LineName.FORWARD, LineName.BACKWARD):
        assert 0.7 < compiled.step.find(name).seconds / plain.step.find(name).seconds < 0.95
    assert compiled.step.find(LineName.OPTIMIZER) == plain.step.find(LineName.OPTIMIZER)
    assert compiled.memory == plain.memory


def test_the_loss_reads_logits_eight_bytes_compiled_and_forty_as_written():
    one, machines = np.ones(1), catalog.load_cluster("8xH100")
    sizes = Sizes(batch=one, sequence=8.0, tensor=one, split=one, itemsize=2.0 * one, fused_loss=True)
    head = llama(**WIDE).head
    found = []
    for how in (
        replace(sizes, eager=True),
        replace(sizes, loss_kernel=software_of(JobSpec(sequence_length=8, compile=Switch.ON), machines).loss_kernel),
    ):
        (work,) = (part for part in block_work(head, how) if part.name == HEAD)
        found.append(float(work.traffic[0] + work.backward_traffic[0]) / (8 * head.vocab))
    assert found == [40.0, 8.0]


def test_element_wise_work_reaches_less_of_newer_memories():
    known = devices()
    shares = [known[name].memory_fraction for name in ("A100-80GB", "H100", "B200")]
    assert shares[0] > shares[1] >= shares[2]
    assert not any(known[name].sources["memory_fraction"].startswith("by analogy") for name in ("H100", "B200"))
    rates = [
        known[name].memory_fraction * known[name].memory_bandwidth for name in ("A100-80GB", "H100", "H200", "B200")
    ]
    assert rates == sorted(rates)
