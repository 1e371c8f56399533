"""Plan: how one model is laid over one cluster for one job. Data, and nothing else; everything is a function of it."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from enum import StrEnum

from meshwright.spec import codec
from meshwright.spec.cluster import ClusterSpec, Precision, Product
from meshwright.spec.exchange import Exchange
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan_words import plan_words
from meshwright.spec.synchronize import GradientSync, Rounds, SyncKind


class AxisName(StrEnum):
    """Axes of the mesh. `replicate` and `shard` together are data parallel; `context` divides every sequence."""

    PIPELINE = "pipeline"
    REPLICATE = "replicate"
    SHARD = "shard"
    CONTEXT = "context"
    TENSOR = "tensor"


class Sharding(StrEnum):
    """What the shard axis divides: nothing (plain data parallel) or what ZeRO-1, 2 and 3 divide (1910.02054)."""

    NONE = "none"
    OPTIMIZER = "zero1"
    GRADIENTS = "zero2"
    PARAMETERS = "zero3"


class Recompute(StrEnum):
    """Activations computed again in backward: none, the attention scores' part, or whole layers (2205.05198)."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Offload(StrEnum):
    """What lies in the host's memory instead of the device's: nothing, optimizer state (ZeRO-Offload, 2101.06840),
    what backward keeps, or shards of parameters with their gradients and optimizer state (ZeRO-Infinity, 2104.07857).
    """

    NONE = "none"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    PARAMETERS = "parameters"


class ScheduleKind(StrEnum):
    """gpipe 1811.06965; 1f1b 1806.03377; interleaved 2104.04473; breadth-first 2211.05953 (on one rank it is layered
    accumulation, 2106.02679); zero bubble H1 and H2 2401.10241, V 2405.15362; DualPipeV 2412.19437; seq1f1b 2406.03488;
    table: the one that the plan carries.
    """

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    BREADTH_FIRST = "breadth-first"
    ZERO_BUBBLE_H1 = "zb-h1"
    ZERO_BUBBLE_H2 = "zb-h2"
    ZERO_BUBBLE_V = "zb-v"
    DUAL_PIPE_V = "dualpipe-v"
    SEQUENCE_1F1B = "seq1f1b"
    TABLE = "table"


class Training(StrEnum):
    """What of a block's parameters training changes: all of them, or none.

    Frozen blocks have no gradients and no optimizer state. Those that no trained block comes before end backward: they
    keep nothing for it.
    """

    ALL = "all"
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    name: AxisName
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGroup:
    """Consecutive blocks [start, stop) of the model and what happens to them.

    `shards` neighbours among the data parallel ranks divide what `sharding` divides, and the others repeat it; None are
    those of the shard axis. zero1 over 1 is plain data parallel.
    """

    start: int
    stop: int
    tensor: int = 1
    sequence_parallel: bool = False
    sharding: Sharding = Sharding.NONE
    recompute: Recompute = Recompute.NONE
    offload: Offload = Offload.NONE
    precision: Product = Precision.BF16
    training: Training = Training.ALL
    shards: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A run of blocks that one pipeline rank holds; `rank` is that rank's coordinate on the pipeline axis."""

    rank: int
    groups: tuple[BlockGroup, ...]

    @property
    def start(self) -> int:
        return self.groups[0].start

    @property
    def stop(self) -> int:
        return self.groups[-1].stop


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of forward and backward passes; `chunks` stages live on each pipeline rank.

    `slices` are runs of tokens that a microbatch is cut into (Seq1F1B; TeraPipe under gpipe). `table` is what each
    pipeline rank does in order where the kind is table: `0F*3 (0F 0B)*5 0B*3`, as schedule/written.py reads it. `paths`
    are the stages that each microbatch of a table passes, in order, `0 2 3`, where some leave stages out (2502.19913).
    """

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    microbatches: int = 1
    chunks: int = 1
    slices: int = 1
    table: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


class Dispatch(StrEnum):
    """How tokens reach experts of other ranks: sent to those chosen (2006.16668), or gathered by all of them."""

    ALL_TO_ALL = "all_to_all"
    ALL_GATHER = "all_gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertGrid:
    """A second grid over the ranks of one pipeline stage, for experts alone (MoE Parallel Folding, 2504.14960).

    `tensor` neighbouring ranks divide every expert, `expert` such groups hold different experts; the rest replicate
    or shard them.
    """

    expert: int = 1
    tensor: int = 1
    dispatch: Dispatch = Dispatch.ALL_TO_ALL


class TensorGrid(StrEnum):
    """How the ranks of the tensor axis lie: on a line, where each holds its features of every token (1909.08053); on a
    square that divides tokens and features alike (SUMMA, 2104.05343); on a cube (2105.14450)."""

    LINE = "line"
    SQUARE = "square"
    CUBE = "cube"

    def side(self, tensor: int) -> int:
        """Ranks along one side of a grid of `tensor` ranks, rounded where they are no square or cube; a line's are all
        of them."""
        return tensor if self is TensorGrid.LINE else round(math.exp(math.log(max(tensor, 1)) / self.dims))

    def token_parts(self, tensor: int) -> int:
        """Parts that the sequences of a microbatch are divided in."""
        return math.prod([self.side(tensor)] * (self.dims - 1))

    @property
    def dims(self) -> int:
        return {TensorGrid.LINE: 1, TensorGrid.SQUARE: 2, TensorGrid.CUBE: 3}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Axes from the outermost to the innermost: the last one varies fastest over devices.

    `placement[r]` is the device that holds rank r; None is the identity. `microbatch` and the batch are in
    sequences; the batch is replicate * shard * microbatch * schedule.microbatches rows, of which `empty_rows`, the last
    one of as many data ranks, have no sequence: where ranks do not divide the sequences of a step. `experts` None
    divides every expert over the tensor axis, as the rest of a layer is. What `shard` divides is divided over `context`
    too. `tensor_grid` is how the ranks of the tensor axis lie.
    """

    model: str
    cluster: str
    axes: tuple[Axis, ...]
    stages: tuple[Stage, ...]
    schedule: Schedule
    sequence_length: int
    microbatch: int
    gradients: GradientSync = GradientSync()
    exchange: Exchange = Exchange()
    experts: ExpertGrid | None = None
    tensor_grid: TensorGrid = TensorGrid.LINE
    placement: tuple[int, ...] | None = None
    empty_rows: int = 0
    schema: int = 1

    def size(self, axis: AxisName) -> int:
        return next((entry.size for entry in self.axes if entry.name is axis), 1)

    @property
    def pipeline(self) -> int:
        return self.size(AxisName.PIPELINE)

    @property
    def replicate(self) -> int:
        return self.size(AxisName.REPLICATE)

    @property
    def shard(self) -> int:
        return self.size(AxisName.SHARD)

    @property
    def context(self) -> int:
        return self.size(AxisName.CONTEXT)

    @property
    def tensor(self) -> int:
        return self.size(AxisName.TENSOR)

    @property
    def data(self) -> int:
        """Ranks that read different sequences."""
        return self.replicate * self.shard

    @property
    def learners(self) -> int:
        """Replicas that train apart and meet in rounds; 1 where all data parallel ranks meet in every step."""
        return self.replicate if self.gradients.kind.has_learners else 1

    def repeats(self, group: BlockGroup) -> int:
        """Data parallel ranks that meet in every step and hold the same of what is sharded of `group`."""
        return self.data // self.learners // (self.shard if group.shards is None else group.shards)

    @property
    def sends_fragments(self) -> bool:
        """Whether learners meet in one part of the model after another."""
        return self.learners > 1 and self.gradients.rounds.fragments > 1

    def of_learner(self) -> Plan:
        """The plan of one learner, which is all there is where all ranks meet in every step."""
        if not self.gradients.kind.has_learners:
            return self
        axes = tuple(replace(axis, size=1) if axis.name is AxisName.REPLICATE else axis for axis in self.axes)
        inside = replace(self.gradients, kind=SyncKind.EVERY_STEP, rounds=Rounds())
        return replace(self, axes=axes, gradients=inside, placement=None)

    def ranks_of_learner(self, learner: int) -> tuple[int, ...]:
        """Ranks of this plan that are learner `learner`, in the order of the ranks of its own plan."""
        if self.learners == 1:
            return tuple(range(self.world_size))
        inner = math.prod(axis.size for axis in self.axes[self._place(AxisName.REPLICATE) + 1 :])
        return tuple(rank for rank in range(self.world_size) if rank // inner % self.replicate == learner)

    def first_rank_of(self, pipeline_rank: int) -> int:
        """The rank of that pipeline rank that is first on every other axis, where shards are largest."""
        if self.pipeline == 1:
            return 0
        return pipeline_rank * math.prod(axis.size for axis in self.axes[self._place(AxisName.PIPELINE) + 1 :])

    def _place(self, name: AxisName) -> int:
        return next(index for index, axis in enumerate(self.axes) if axis.name is name)

    @property
    def has_usual_order(self) -> bool:
        """Whether the axes of more than one rank come as AxisName lists them."""
        usual = list(AxisName)
        places = [usual.index(axis.name) for axis in self.axes if axis.size > 1]
        return places == sorted(places)

    @property
    def is_placed(self) -> bool:
        """Whether ranks lie on other devices than those of their numbers."""
        return self.placement is not None and self.placement != tuple(range(self.world_size))

    def rank_on(self, device: int) -> int:
        """The rank that device `device` holds."""
        return device if self.placement is None else self.placement.index(device)

    @property
    def world_size(self) -> int:
        product = 1
        for axis in self.axes:
            product *= axis.size
        return product

    @property
    def batch(self) -> int:
        """Rows of one optimizer step, all of which are computed."""
        return self.data * self.microbatch * self.schedule.microbatches

    @property
    def batch_tokens(self) -> int:
        return self.batch * self.sequence_length

    @property
    def sequences(self) -> int:
        """Sequences that one optimizer step reads."""
        return self.batch - self.empty_rows

    @property
    def read_tokens(self) -> int:
        return self.sequences * self.sequence_length

    @property
    def first_group(self) -> BlockGroup:
        return self.stages[0].groups[0]

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        """The block groups of all stages, in model order."""
        return tuple(group for stage in self.stages for group in stage.groups)

    def group_of(self, block: int) -> BlockGroup:
        """The group that has `block`."""
        return next(group for group in self.groups if group.start <= block < group.stop)

    @property
    def frozen_blocks(self) -> frozenset[int]:
        """Blocks of the model that training does not change."""
        frozen = (group for group in self.groups if group.training is Training.FROZEN)
        return frozenset(block for group in frozen for block in range(group.start, group.stop))

    @property
    def first_trained_block(self) -> int:
        """The first block that training changes, where backward ends; the number of blocks where it changes none."""
        return next((group.start for group in self.groups if group.training is Training.ALL), self.groups[-1].stop)

    @property
    def extents(self) -> tuple[int, ...]:
        """Over how many data parallel ranks groups are sharded that say so, each number once, in ascending order."""
        return tuple(sorted({group.shards for group in self.groups if group.shards is not None}))

    def passing(self, stage: int) -> float:
        """The share of microbatches that pass stage `stage`."""
        paths = self.schedule.paths
        return sum(str(stage) in path.split() for path in paths) / len(paths) if paths else 1.0

    @property
    def skipped_share(self) -> float:
        """The share of the layers that a microbatch leaves out, on the mean of a step's."""
        if not self.schedule.paths:
            return 0.0
        layers = max(self.groups[-1].stop - 2, 1)
        return sum((1.0 - self.passing(s)) * (here.stop - here.start) for s, here in enumerate(self.stages)) / layers

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Indexes of the stages that pipeline rank `rank` holds, in model order."""
        return tuple(index for index, stage in enumerate(self.stages) if stage.rank == rank)

    def digest(self) -> str:
        """Twelve hex digits that name this plan: runs, checkpoints and caches use it."""
        return hashlib.sha256(codec.lasting(self).encode()).hexdigest()[:12]

    def describe(self) -> str:
        """One line a person can read: `4 devices: pipeline 2 x shard 2 (zero3), 1f1b, 8 microbatches of 1`."""
        return plan_words(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """A plan with the three documents it answers: all that a run needs, in one file."""

    model: ModelSpec
    cluster: ClusterSpec
    job: JobSpec
    plan: Plan
    schema: int = 1

    def to_json(self) -> str:
        return json.dumps(codec.encode(self), indent=1)
