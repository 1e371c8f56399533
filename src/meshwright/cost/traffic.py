"""Every collective of one step on one pipeline rank, with its bytes, as our own runtime makes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from meshwright.cost.portions import Portions, portions
from meshwright.spec.blocks import Attention, Block, Layer, QueryKeyNorm
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.plan import AxisName, BlockGroup, Design, Recompute, Sharding
from meshwright.spec.report import LineName

_SCALAR_BYTES = 8.0  # a loss or the square of a norm, in fp64


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes of the whole tensors of all collectives, by `line|operation|axes` with the axes joined by a plus."""

    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, line: LineName, operation: str, *axes: AxisName, each: float, calls: float) -> None:
        """`calls` collectives of `each` bytes; none where there are none to send."""
        if each and calls:
            self.bytes[f"{line.value}|{operation}|{'+'.join(axes)}"] += each * calls


def traffic(design: Design, *, rank: int) -> Traffic:
    """What the first data and tensor rank of pipeline rank `rank` sends in one step, every dimension being divisible
    by the ranks that share it: shards of others are padded, and padding is not told."""
    return _Rank(design, rank).found()


class _Rank:
    def __init__(self, design: Design, rank: int) -> None:
        plan, self.rank = design.plan, rank
        self.design, self.plan = design, plan
        group = plan.first_group
        self.tensor, self.split = plan.tensor, group.sequence_parallel and plan.tensor > 1
        self.sharding = group.sharding if plan.shard > 1 else Sharding.NONE
        master = 8.0 if group.precision is Precision.FP64 else 4.0
        narrow = plan.gradients.precision is Precision.BF16 and master == 4.0
        self.master, self.reduced = master, 2.0 if narrow else master
        self.compute = 2.0 if group.precision is Precision.BF16 else master
        self.tokens = float(plan.microbatch * plan.sequence_length)
        self.hidden = self.tokens * design.model.width * self.compute
        self.on_processor = design.cluster.groups[0].device.kind is DeviceKind.CPU
        self.traffic = Traffic()

    def found(self) -> Traffic:
        for index in self.plan.stages_of(self.rank):
            self._transfers(index)
            for block, group in self._blocks(index):
                part = portions(block, tensor=self.tensor)
                self._data(part.local + self._copied(block, index))
                if self.tensor > 1:
                    self._tensor(block, group)
                    self._partial(part)
        if self.plan.pipeline > 1 and self.design.model.head.tied:
            self._tied()
        self._scalars()
        return self.traffic

    def _blocks(self, index: int) -> Iterator[tuple[Block, BlockGroup]]:
        blocks = self.design.model.blocks
        for group in self.plan.stages[index].groups:
            yield from ((blocks[block], group) for block in range(group.start, group.stop))

    def _transfers(self, index: int) -> None:
        """A stage sends features on and gradients back, and receives as many."""
        stages, count = self.plan.stages, self.plan.schedule.microbatches
        each = self.hidden / (self.tensor if self.split else 1)
        for other in (index - 1, index + 1):
            if 0 <= other < len(stages) and stages[other].rank != self.rank:
                for operation in ("send", "recv"):
                    self.traffic.add(LineName.TRANSFER, operation, AxisName.PIPELINE, each=each, calls=count)

    def _copied(self, block: Block, index: int) -> float:
        """Parameters of a tied head's own copy of the table, where the embedding is in another stage."""
        head = self.design.model.head
        copied = block is head and head.tied and index > 0
        return head.matrix_parameters / self.tensor if copied else 0.0

    def _data(self, size: float) -> None:
        """Parameters are gathered and gradients reduced over the ranks that read other sequences."""
        count, add = self.plan.schedule.microbatches, self.traffic.add
        if self.sharding is Sharding.NONE:
            for axis in (AxisName.REPLICATE, AxisName.SHARD):
                if self.plan.size(axis) > 1:
                    add(LineName.GRADIENTS, "all_reduce", axis, each=size * self.reduced, calls=1)
            return
        gathers = 2 * count if self.sharding is Sharding.PARAMETERS else 1
        scatters = 1 if self.sharding is Sharding.OPTIMIZER else count
        scatter = "all_to_all" if self.on_processor else "reduce_scatter"
        add(LineName.PARAMETERS, "all_gather", AxisName.SHARD, each=size * self.compute, calls=gathers)
        add(LineName.GRADIENTS, scatter, AxisName.SHARD, each=size * self.reduced, calls=scatters)
        if self.plan.replicate > 1:
            each = size * self.reduced / self.plan.shard
            add(LineName.GRADIENTS, "all_reduce", AxisName.REPLICATE, each=each, calls=1)

    def _tensor(self, block: Block, group: BlockGroup) -> None:
        """Regions are entered and left, and backward leaves and enters them; full recompute does forward again."""
        count, add = self.plan.schedule.microbatches, self.traffic.add
        if isinstance(block, Layer):
            regions, again = len(block.parts), group.recompute is Recompute.FULL
            # What is computed again ends once backward has all it needs: before the last region is left.
            ends = again and bool(block.parts) and block.parts[-1].post_norm is None
            self._enter(count * regions * (1 + again))
            self._leave(count * (regions * (1 + again) - ends))
            self._enter_back(count * regions)
            self._leave_back(count * regions)
            if isinstance(block.mixer, Attention) and block.mixer.qk_norm is QueryKeyNorm.FULL:
                sums = self.tokens * max(self.compute, 4.0)
                add(LineName.TENSOR, "all_reduce", AxisName.TENSOR, each=sums, calls=2 * count * (2 + again))
        elif block is self.design.model.embedding:
            self._leave(count)
            self._leave_back(count)
        else:
            self._enter(count)
            self._enter_back(count)
            wide = max(self.compute, 4.0)
            for numbers in (1.0, 2.0):  # the largest logit of every token, then two sums
                add(LineName.TENSOR, "all_reduce", AxisName.TENSOR, each=numbers * self.tokens * wide, calls=count)

    def _enter(self, calls: float) -> None:
        if self.split:
            self.traffic.add(LineName.TENSOR, "all_gather", AxisName.TENSOR, each=self.hidden, calls=calls)

    def _leave(self, calls: float) -> None:
        scatter = "all_to_all" if self.on_processor else "reduce_scatter"
        operation = scatter if self.split else "all_reduce"
        self.traffic.add(LineName.TENSOR, operation, AxisName.TENSOR, each=self.hidden, calls=calls)

    def _enter_back(self, calls: float) -> None:
        self._leave(calls)

    def _leave_back(self, calls: float) -> None:
        self._enter(calls)

    def _partial(self, part: Portions) -> None:
        """Gradients of which each tensor rank has a summand are summed once a step, as far as they are its own."""
        held = part.inside + (part.outside if self.split else 0.0)
        shards = self.plan.shard if self.sharding is not Sharding.NONE else 1
        each = held * self.master / shards
        self.traffic.add(LineName.TENSOR, "all_reduce", AxisName.TENSOR, each=each, calls=1)

    def _tied(self) -> None:
        """The two copies of a tied table exchange their gradients."""
        ends = {self.plan.stages[0].rank, self.plan.stages[-1].rank}
        if self.rank not in ends or len(ends) == 1:
            return
        model = self.design.model
        shards = self.plan.shard if self.sharding is not Sharding.NONE else 1
        each = model.embedding.vocab * model.width * self.master / self.tensor / shards
        for operation in ("send", "recv"):
            self.traffic.add(LineName.TRANSFER, operation, AxisName.PIPELINE, each=each, calls=1)

    def _scalars(self) -> None:
        """The loss and the norm of the gradients, among all ranks; the count of targets, where some are masked."""
        axes = tuple(sorted(axis.name for axis in self.plan.axes if axis.size > 1))
        if axes:
            line = LineName.TENSOR if axes == (AxisName.TENSOR,) else LineName.OTHER
            self.traffic.add(line, "all_reduce", *axes, each=_SCALAR_BYTES, calls=2)
        if axes and self.design.job.data.masks:
            self.traffic.add(LineName.OTHER, "all_reduce", *axes, each=_SCALAR_BYTES, calls=1)
