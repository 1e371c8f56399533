"""A small model, a small cluster and a legal design of them, to be broken one field at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from meshwright.spec.blocks import (
    Attention,
    Embedding,
    FeedForward,
    Head,
    Indexer,
    LatentAttention,
    Layer,
    Mixture,
    Norm,
    Recurrence,
)
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, MatrixCurve, NodeGroup, Precision
from meshwright.spec.exchange import Exchange
from meshwright.spec.job import Constraints, JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    ExpertGrid,
    Offload,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
)

WIDTH = 64
NORM = Norm(width=WIDTH)
INDEXER = Indexer(heads=2, head_dim=8, top_k=16)


def dense_layer(*, heads: int = 8, kv_heads: int = 4, hidden: int = 192) -> Layer:
    mixer = Attention(width=WIDTH, heads=heads, kv_heads=kv_heads, head_dim=8, norm=NORM)
    return Layer(mixer=mixer, transform=FeedForward(width=WIDTH, hidden=hidden, norm=NORM))


def mixture_layer(**changes: Any) -> Layer:
    mixer = Attention(width=WIDTH, heads=8, kv_heads=4, head_dim=8, norm=NORM)
    part = Mixture(width=WIDTH, hidden=64, experts=4, top_k=2, norm=NORM)
    return Layer(mixer=mixer, transform=replace(part, **changes))


def latent_layer() -> Layer:
    mixer = LatentAttention(
        width=WIDTH, heads=8, query_rank=None, kv_rank=16, nope_dim=8, rope_dim=4, value_dim=8, norm=NORM
    )
    return Layer(mixer=mixer, transform=FeedForward(width=WIDTH, hidden=192, norm=NORM))


def recurrent_layer() -> Layer:
    mixer = Recurrence(width=WIDTH, inner=128, heads=8, state=16, groups=1, convolution=4, norm=NORM)
    return Layer(mixer=mixer, transform=FeedForward(width=WIDTH, hidden=192, norm=NORM))


def model(
    *, layers: int = 6, layer: Layer | None = None, vocab: int = 512, positions: int = 0, tied: bool = False
) -> ModelSpec:
    return ModelSpec(
        name="small",
        embedding=Embedding(vocab=vocab, width=WIDTH, positions=positions),
        layers=(layer or dense_layer(),) * layers,
        head=Head(vocab=vocab, width=WIDTH, norm=NORM, tied=tied),
        max_positions=1024,
    )


def device(*, memory_bytes: float = 16 * 2**30, name: str = "device", speed: float = 1.0) -> DeviceSpec:
    curve = MatrixCurve(fraction=0.8, half_m=64, half_n=64, half_k=64)
    precisions = (Precision.FP32, Precision.BF16, Precision.FP16)
    return DeviceSpec(
        name=name,
        kind=DeviceKind.CUDA,
        memory_bytes=memory_bytes,
        memory_bandwidth=1e12,
        peak_flops=dict.fromkeys(precisions, 1e14 * speed),
        matrix=dict.fromkeys(precisions, curve),
        price_per_hour=2.0,
    )


def nodes(
    *,
    num_nodes: int = 1,
    devices_per_node: int = 8,
    of: DeviceSpec | None = None,
    site: str = "a",
    host: Link | None = None,
) -> NodeGroup:
    return NodeGroup(
        name=f"{site} nodes",
        device=of or device(),
        num_nodes=num_nodes,
        devices_per_node=devices_per_node,
        inside=Link(bandwidth=2e11, latency_seconds=1e-5),
        nic=Link(bandwidth=2.5e10, latency_seconds=1e-5),
        nics=devices_per_node,
        host=host,
        site=site,
    )


def cluster(*groups: NodeGroup) -> ClusterSpec:
    wide = Link(bandwidth=1e9, latency_seconds=0.02)
    return ClusterSpec(name="box", groups=groups or (nodes(),), wide_area=wide)


def job(*, sequences: int = 32, length: int = 128, constraints: Constraints | None = None) -> JobSpec:
    return JobSpec(
        sequence_length=length,
        batch_tokens=sequences * length,
        total_tokens=10**9,
        constraints=constraints or Constraints(),
    )


def design(
    *,
    tensor: int = 2,
    shard: int = 2,
    pipeline: int = 2,
    replicate: int = 1,
    context: int = 1,
    exchange: Exchange | None = None,
    experts: ExpertGrid | None = None,
    offload: Offload = Offload.NONE,
    sequence_parallel: bool = True,
    sharding: Sharding = Sharding.OPTIMIZER,
    precision: Precision = Precision.BF16,
    schedule: Schedule | None = None,
    microbatch: int = 2,
    bounds: tuple[int, ...] | None = None,
    of: ModelSpec | None = None,
    on: ClusterSpec | None = None,
    asked: JobSpec | None = None,
) -> Design:
    """A legal design of 8 devices unless an argument makes it otherwise."""
    spec, machines = of or model(), on or cluster()
    schedule = schedule or Schedule(kind=ScheduleKind.ONE_F_ONE_B, microbatches=8)
    stages = pipeline * schedule.chunks
    blocks = len(spec.blocks)
    bounds = bounds or tuple(blocks * index // stages for index in range(stages + 1))
    group = BlockGroup(
        start=0,
        stop=blocks,
        tensor=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
        sharding=sharding if shard > 1 else Sharding.NONE,
        recompute=Recompute.NONE,
        offload=offload,
        precision=precision,
    )
    plan = Plan(
        model=spec.name,
        cluster=machines.name,
        axes=(
            Axis(name=AxisName.PIPELINE, size=pipeline),
            Axis(name=AxisName.REPLICATE, size=replicate),
            Axis(name=AxisName.SHARD, size=shard),
            Axis(name=AxisName.CONTEXT, size=context),
            Axis(name=AxisName.TENSOR, size=tensor),
        ),
        stages=tuple(
            Stage(rank=index % pipeline, groups=(change(group, start=bounds[index], stop=bounds[index + 1]),))
            for index in range(stages)
        ),
        schedule=schedule,
        sequence_length=128,
        microbatch=microbatch,
        exchange=exchange or Exchange(),
        experts=experts,
    )
    return Design(model=spec, cluster=machines, job=asked or job(), plan=plan)


def change(group: BlockGroup, **fields: object) -> BlockGroup:
    return replace(group, **fields)
