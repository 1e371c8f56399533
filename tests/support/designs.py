"""Plans of a small model, made by degrees."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.schedule import stage_rank
from meshwright.spec.cluster import ClusterSpec, DeviceKind, DeviceSpec, Link, MatrixCurve, NodeGroup, Precision
from meshwright.spec.exchange import Exchange, exchange_words
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.optimizer import OptimizerSpec
from meshwright.spec.plan import (
    Axis,
    AxisName,
    BlockGroup,
    Design,
    ExpertGrid,
    Plan,
    Recompute,
    Schedule,
    ScheduleKind,
    Sharding,
    Stage,
    TensorGrid,
    Training,
)

SEQUENCE = 16
RING = Exchange()
LINK = Link(bandwidth=1e9, latency_seconds=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of a plan; the batch is `batch` sequences whatever they are."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    sharding: Sharding = Sharding.NONE
    sequence_parallel: bool = False
    recompute: Recompute = Recompute.NONE
    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    chunks: int = 1
    slices: int = 1
    microbatch: int = 1
    batch: int = 16
    precision: Precision = Precision.FP64
    exchange: Exchange = RING
    experts: ExpertGrid | None = None
    tensor_grid: TensorGrid = TensorGrid.LINE

    @property
    def ranks(self) -> int:
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def microbatches(self) -> int:
        return self.batch // (self.replicate * self.shard * self.microbatch)

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        parts = [f"pp{self.pipeline}dp{self.replicate}sh{self.shard}tp{self.tensor}", self.sharding.value]
        parts += [f"cp{self.context}", exchange_words(self.exchange, self.context)] if self.context > 1 else []
        parts += [self.tensor_grid.value] if self.tensor_grid is not TensorGrid.LINE else []
        parts += ["sp"] if self.sequence_parallel else []
        parts += [self.recompute.value] if self.recompute is not Recompute.NONE else []
        parts += [f"{self.kind.value}x{self.chunks}"] if self.pipeline > 1 else []
        grid = self.experts
        parts += [f"ep{grid.expert}etp{grid.tensor}-{grid.dispatch.value}"] if grid is not None else []
        parts += [f"slices{self.slices}"] if self.slices > 1 else []
        return "-".join([*parts, f"m{self.microbatches}x{self.microbatch}"])


def plan(model: ModelSpec, layout: Layout) -> Plan:
    """The plan of `layout` with stages as even as the blocks allow."""
    blocks = len(model.layers) + 2
    stages = layout.pipeline * layout.chunks
    bounds = [round(index * blocks / stages) for index in range(stages + 1)]
    names = [AxisName.PIPELINE, AxisName.REPLICATE, AxisName.SHARD, AxisName.TENSOR]
    sizes = [layout.pipeline, layout.replicate, layout.shard, layout.tensor]
    if layout.context > 1:
        names.insert(3, AxisName.CONTEXT)
        sizes.insert(3, layout.context)
    return Plan(
        model=model.name,
        cluster="here",
        axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)),
        stages=tuple(
            Stage(
                rank=stage_rank(layout.kind, index, pipeline=layout.pipeline, chunks=layout.chunks),
                groups=(
                    BlockGroup(
                        start=bounds[index],
                        stop=bounds[index + 1],
                        tensor=layout.tensor,
                        sequence_parallel=layout.sequence_parallel,
                        sharding=layout.sharding,
                        recompute=layout.recompute,
                        precision=layout.precision,
                    ),
                ),
            )
            for index in range(stages)
        ),
        schedule=Schedule(
            kind=layout.kind, microbatches=layout.microbatches, chunks=layout.chunks, slices=layout.slices
        ),
        sequence_length=SEQUENCE,
        microbatch=layout.microbatch,
        exchange=layout.exchange,
        experts=layout.experts,
        tensor_grid=layout.tensor_grid,
    )


def design(model: ModelSpec, layout: Layout, *, z_loss: float = 0.0, optimizer: OptimizerSpec | None = None) -> Design:
    """A design over as many processors as the layout has ranks."""
    job = JobSpec(
        sequence_length=SEQUENCE,
        batch_tokens=layout.batch * SEQUENCE,
        total_tokens=100 * layout.batch * SEQUENCE,
        precision=layout.precision,
        optimizer=optimizer or OptimizerSpec(learning_rate=1e-2),
        z_loss=z_loss,
    )
    return Design(model=model, cluster=cluster(layout.ranks), job=job, plan=plan(model, layout))


def frozen(entry: Design, blocks: frozenset[int]) -> Design:
    """The same, where training leaves `blocks` as they are; every block is a group of its own."""

    def alone(group: BlockGroup, block: int) -> BlockGroup:
        training = Training.FROZEN if block in blocks else group.training
        return replace(group, start=block, stop=block + 1, training=training)

    stages = tuple(
        replace(stage, groups=tuple(alone(g, block) for g in stage.groups for block in range(g.start, g.stop)))
        for stage in entry.plan.stages
    )
    return replace(entry, plan=replace(entry.plan, stages=stages))


def sharded(entry: Design, word: str, *, over: str = "") -> Design:
    """The same, what is sharded of every block as ZeRO of its digit in `word` does, 0 none, `over` as many ranks as its
    digit there says, those of the shard axis where that is a dot; every block is a group of its own."""

    def alone(group: BlockGroup, block: int) -> BlockGroup:
        shards = None if not over or over[block] == "." else int(over[block])
        sharding = list(Sharding)[int(word[block])]
        return replace(group, start=block, stop=block + 1, sharding=sharding, shards=shards)

    stages = tuple(
        replace(stage, groups=tuple(alone(g, block) for g in stage.groups for block in range(g.start, g.stop)))
        for stage in entry.plan.stages
    )
    return replace(entry, plan=replace(entry.plan, stages=stages))


def cluster(ranks: int) -> ClusterSpec:
    device = DeviceSpec(
        name="processor", kind=DeviceKind.CPU, memory_bytes=1e9, memory_bandwidth=1e9, peak_flops={}, matrix={}
    )
    group = NodeGroup(name="node", device=device, num_nodes=1, devices_per_node=ranks, inside=LINK, nic=LINK)
    return ClusterSpec(name="here", groups=(group,))


def with_speed(entry: Design, precision: Precision = Precision.FP64) -> Design:
    """The same on processors that have a speed, so that it can be priced."""
    group = entry.cluster.groups[0]
    curve = MatrixCurve(fraction=0.5, half_m=8.0, half_n=8.0, half_k=8.0)
    device = replace(group.device, peak_flops={precision: 1e9}, matrix={precision: curve})
    return replace(entry, cluster=replace(entry.cluster, groups=(replace(group, device=device),)))
