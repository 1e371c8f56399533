"""Small models, machines and plans that the tests of the cost room share."""

from __future__ import annotations

from dataclasses import replace

from meshwright.cost import Layout
from meshwright.spec.cluster import (
    ClusterSpec,
    Collective,
    CollectiveFit,
    DeviceKind,
    DeviceSpec,
    Link,
    MatrixCurve,
    NodeGroup,
    Precision,
)
from meshwright.spec.job import JobSpec
from meshwright.spec.model import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Layer,
    Mixture,
    ModelSpec,
    Norm,
    NormKind,
    Recurrence,
    Rotary,
)
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)
from meshwright.spec.report import Origin

JOB = JobSpec(sequence_length=128, batch_tokens=128 * 64, total_tokens=128 * 64 * 10)


def gpt(*, width: int, layers: int, heads: int, vocab: int, positions: int = 2048) -> ModelSpec:
    """GPT-2 style: layer norms, biases, learned positions, tied head."""
    norm = Norm(width=width, kind=NormKind.LAYER)
    layer = Layer(
        mixer=Attention(
            width=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            norm=norm,
            qkv_bias=True,
            output_bias=True,
        ),
        transform=FeedForward(width=width, hidden=4 * width, norm=norm, gated=False, bias=True),
    )
    return ModelSpec(
        name="gpt",
        embedding=Embedding(vocab=vocab, width=width, positions=positions),
        layers=(layer,) * layers,
        head=Head(vocab=vocab, width=width, norm=norm, tied=True),
        max_positions=positions,
    )


def llama(*, width: int = 64, layers: int = 4, vocab: int = 256, hidden: int = 128, heads: int = 4) -> ModelSpec:
    norm = Norm(width=width)
    dim = width // heads
    layer = Layer(
        mixer=Attention(
            width=width, heads=heads, kv_heads=max(1, heads // 2), head_dim=dim, norm=norm, rotary=Rotary(dims=dim)
        ),
        transform=FeedForward(width=width, hidden=hidden, norm=norm),
    )
    return ModelSpec(
        name="llama",
        embedding=Embedding(vocab=vocab, width=width),
        layers=(layer,) * layers,
        head=Head(vocab=vocab, width=width, norm=norm),
        max_positions=4096,
    )


def mixed() -> ModelSpec:
    """One layer of every kind of mixer and transform."""
    width = 64
    norm = Norm(width=width)
    feed = FeedForward(width=width, hidden=128, norm=norm)
    mixture = Mixture(
        width=width,
        hidden=32,
        experts=8,
        top_k=2,
        norm=norm,
        router_bias=True,
        shared=FeedForward(width=width, hidden=48, norm=None),
    )
    latent = LatentAttention(
        width=width, heads=4, query_rank=24, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16, norm=norm
    )
    attention = Attention(width=width, heads=4, kv_heads=4, head_dim=16, norm=norm, window=32, sinks=True)
    recurrence = Recurrence(width=width, inner=128, heads=4, state=16, groups=1, convolution=4, norm=norm)
    layers = (
        Layer(mixer=attention, transform=feed),
        Layer(mixer=latent, transform=mixture),
        Layer(mixer=recurrence, transform=None),
        Layer(mixer=attention, transform=mixture, extra_parameters=7),
    )
    return ModelSpec(
        name="mixed",
        embedding=Embedding(vocab=256, width=width),
        layers=layers,
        head=Head(vocab=256, width=width, norm=norm),
        max_positions=4096,
    )


A100 = DeviceSpec(
    name="A100",
    kind=DeviceKind.CUDA,
    memory_bytes=80 * 2**30,
    memory_bandwidth=2.039e12,
    peak_flops={Precision.BF16: 312e12, Precision.FP16: 312e12},
    matrix={Precision.BF16: MatrixCurve(fraction=0.827, half_m=99.6, half_n=99.6, half_k=105.5)},
    memory_fraction=0.7,
    price_per_hour=2.0,
)


def selene(*, nodes: int, device: DeviceSpec = A100) -> ClusterSpec:
    """Nodes of eight A100 on NVLink 3 with eight HDR adapters (2104.04473, section 5)."""
    group = NodeGroup(
        name="dgx",
        device=device,
        num_nodes=nodes,
        devices_per_node=8,
        inside=Link(bandwidth=300e9, latency_seconds=2e-6, efficiency=0.77),
        nic=Link(bandwidth=25e9, latency_seconds=5e-6),
        nics=8,
    )
    return ClusterSpec(name="selene", groups=(group,))


def processor(*, ranks: int, cores: int, scaling: tuple[float, ...] = (1.0, 1.9, 2.7, 3.5)) -> ClusterSpec:
    """One node whose `ranks` share `cores` cores, with measured collectives of 2 and 4 ranks."""
    device = DeviceSpec(
        name="core",
        kind=DeviceKind.CPU,
        memory_bytes=4 * 2**30,
        memory_bandwidth=12e9,
        peak_flops={Precision.FP32: 160e9, Precision.BF16: 600e9},
        matrix={Precision.FP32: MatrixCurve(fraction=0.9, half_m=8.0, half_n=8.0, half_k=8.0)},
        launch_seconds=5e-6,
        scaling=scaling,
    )
    fits = tuple(
        CollectiveFit(operation=operation, ranks=count, latency_seconds=1e-4 * count, bytes_per_second=2e9 / count)
        for operation in Collective
        for count in (2, 4)
    )
    group = NodeGroup(
        name="host",
        device=device,
        num_nodes=1,
        devices_per_node=ranks,
        inside=Link(bandwidth=4e9, latency_seconds=1e-4, fits=fits),
        nic=Link(bandwidth=1e9, latency_seconds=1e-4),
        cores=cores,
    )
    return ClusterSpec(name="host", groups=(group,), origin=Origin.CALIBRATED)


def even_layout(*, layers: int, pipeline: int, chunks: int = 1) -> Layout:
    """Layers as equal as can be over the stages, embedding first and head last."""
    stages = pipeline * chunks
    bounds = [0]
    for stage in range(stages):
        held = layers // stages + (stage < layers % stages)
        bounds.append(bounds[-1] + held + (stage == 0) + (stage == stages - 1))
    return Layout(bounds=tuple(bounds), ranks=tuple(stage % pipeline for stage in range(stages)))


def design(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    job: JobSpec = JOB,
    tensor: int = 1,
    pipeline: int = 1,
    chunks: int = 1,
    replicate: int = 1,
    shard: int = 1,
    sharding: Sharding = Sharding.NONE,
    recompute: Recompute = Recompute.NONE,
    sequence_parallel: bool = False,
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B,
    microbatch: int = 1,
    microbatches: int = 4,
    precision: Precision = Precision.BF16,
    layout: Layout | None = None,
) -> Design:
    layout = layout or even_layout(layers=len(model.layers), pipeline=pipeline, chunks=chunks)
    stages = tuple(
        Stage(
            rank=rank,
            groups=(
                BlockGroup(
                    start=layout.bounds[index],
                    stop=layout.bounds[index + 1],
                    tensor=tensor,
                    sequence_parallel=sequence_parallel,
                    sharding=sharding,
                    recompute=recompute,
                    precision=precision,
                ),
            ),
        )
        for index, rank in enumerate(layout.ranks)
    )
    sizes = {
        AxisName.PIPELINE: pipeline,
        AxisName.REPLICATE: replicate,
        AxisName.SHARD: shard,
        AxisName.TENSOR: tensor,
    }
    plan = Plan(
        model=model.name,
        cluster=cluster.name,
        axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()),
        stages=stages,
        schedule=Schedule(kind=kind, microbatches=microbatches, chunks=chunks),
        sequence_length=job.sequence_length,
        microbatch=microbatch,
    )
    return Design(model=model, cluster=cluster, job=job, plan=plan)


def with_group(cluster: ClusterSpec, **changes: object) -> ClusterSpec:
    return replace(cluster, groups=(replace(cluster.groups[0], **changes),))
