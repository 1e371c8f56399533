"""Every collective of one step on one pipeline rank, with its bytes, as our own runtime makes them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from meshwright.cost.holdings import TABLE
from meshwright.cost.states import BUCKET_BYTES
from meshwright.cost.traffic_adafactor import sums
from meshwright.cost.traffic_blocks import BlockTraffic, Widths
from meshwright.cost.traffic_compression import of_bucket
from meshwright.cost.traffic_groups import Group, along, grid_groups
from meshwright.cost.traffic_muon import exchanges
from meshwright.cost.traffic_parameters import Held, Part, Unit, buckets, held, summands
from meshwright.cost.traffic_rounds import agreed_bytes, round_traffic
from meshwright.cost.traffic_turns import gathers, scatters
from meshwright.schedule import planned
from meshwright.spec.blocks import Mixture
from meshwright.spec.cluster import DeviceKind, Precision
from meshwright.spec.compression import Compression
from meshwright.spec.optimizer import Master
from meshwright.spec.plan import AxisName, Design, TensorGrid
from meshwright.spec.report import LineName
from meshwright.spec.synchronize import PACKINGS

_NUMBER_BYTES = 8.0  # a loss or the square of a norm, in fp64, or a count


@dataclass(slots=True, kw_only=True)
class Traffic:
    """Bytes of the whole tensors of all collectives, by `line|operation|axes` with the axes joined by a plus."""

    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, line: LineName, operation: str, *axes: AxisName, each: float, calls: float) -> None:
        """`calls` collectives of `each` bytes; none where there are none to send."""
        if each and calls:
            self.bytes[f"{line.value}|{operation}|{'+'.join(sorted(axes))}"] += each * calls


def traffic(design: Design, *, rank: int) -> Traffic:
    """What the first data, context and tensor rank of pipeline rank `rank` sends in one step; of a learner, what one
    sends inside it, and its shares of a round and of what learners tell each other.

    Every expert is taken to be chosen as often as the others.
    """
    plan, own = design.plan, design.plan.of_learner()
    found = _Rank(replace(design, plan=own), rank).found()
    if plan.learners == 1:
        return found
    first, every = plan.first_rank_of(rank), plan.gradients.rounds.every
    for each in round_traffic(design, rank=first):
        line = LineName.OTHER if each.fragment is None else LineName.OUTER
        found.add(line, each.operation, AxisName.REPLICATE, each=each.bytes, calls=each.calls / every)
    among = along(own, *(axis.name for axis in own.axes))
    if among.size > 1:
        agreed = agreed_bytes(design, rank=first)
        found.add(LineName.OUTER, "all_reduce", *among.axes, each=agreed, calls=1.0 / every)
    return found


class _Rank:
    def __init__(self, design: Design, rank: int) -> None:
        plan, self.rank = design.plan, rank
        self.design, self.plan = design, plan
        group = plan.first_group
        self.split = group.sequence_parallel and plan.tensor > 1
        wide = 8.0 if group.precision is Precision.FP64 else 4.0
        narrow = plan.gradients.precision is Precision.BF16 and wide == 4.0
        self.master = wide if design.job.master is Master.FP32 else 2.0
        self.reduced = 2.0 if narrow else wide
        whole = (Precision.FP64, Precision.FP32, Precision.TF32)
        self.compute = wide if group.precision in whole else 2.0
        on_processor = design.cluster.groups[0].device.kind is DeviceKind.CPU
        self.scatter = "all_to_all" if on_processor else "reduce_scatter"
        self.packed = plan.gradients.precision in PACKINGS
        self.apart = self.packed or plan.gradients.compression is not None  # replicas meet after what they shard does
        self.grid = grid_groups(design)
        self.traffic = Traffic()

    def found(self) -> Traffic:
        stages = [(index, held(self.design, index, grid=self.grid)) for index in self.plan.stages_of(self.rank)]
        for index, own in stages:
            self._transfers(index)
            self._inside(index)
            for unit in own.units:
                self._unit(unit, index)
            self._shards(own)
            self._whole(own)
        self._partial([part for _, own in stages for part in own.parts])
        self._tied([part for _, own in stages for part in own.parts])
        trained = [part for _, own in stages for part in own.parts if part.trained]
        for group, elements in exchanges(trained, self.design.job.optimizer):
            each = elements * self.compute
            self.traffic.add(group.line("all_to_all", num_bytes=each), "all_to_all", *group.axes, each=each, calls=1)
        copied = TABLE if self.design.model.head.tied and len(self.plan.stages) > 1 else None
        for group, elements in sums(trained, self.design.job.optimizer, apart=copied):
            self._add(group, "all_reduce", elements * self.master, calls=1)
        self._numbers()
        return self.traffic

    def _transfers(self, index: int) -> None:
        """A stage sends features on, and gradients back as far as a trained block comes before."""
        plan, stages = self.plan, self.plan.stages
        passes = planned.passes(plan.schedule, index)
        tokens = plan.microbatch * plan.sequence_length / (plan.context * plan.schedule.slices)
        divided = self.split or plan.tensor_grid is not TensorGrid.LINE
        each = tokens * self.design.model.width * self.compute / (plan.tensor if divided else 1)
        for other, there, back in ((index - 1, "recv", "send"), (index + 1, "send", "recv")):
            if 0 <= other < len(stages) and stages[other].rank != self.rank:
                goes_back = plan.first_trained_block < stages[max(index, other)].start
                for operation, calls in ((there, passes), (back, passes * goes_back)):
                    self.traffic.add(LineName.TRANSFER, operation, AxisName.PIPELINE, each=each, calls=calls)

    def _inside(self, index: int) -> None:
        """What the blocks of a stage send while they compute."""
        passes = planned.passes(self.plan.schedule, index)
        of_blocks = BlockTraffic(self.design, Widths(compute=self.compute, scatter=self.scatter), grid=self.grid)
        blocks, first = self.design.model.blocks, self.plan.first_trained_block
        for group in self.plan.stages[index].groups:
            for place in range(group.start, group.stop):
                trained = place not in self.plan.frozen_blocks
                sent = of_blocks.of(blocks[place], group.recompute, comes_back=place >= first, trained=trained)
                for line, operation, axes, each in sent:
                    self.traffic.add(line, operation, *axes, each=each, calls=passes)

    def _unit(self, unit: Unit, index: int) -> None:
        """Its parameters are gathered and its gradients reduced over the ranks that share it."""
        group, replicas = unit.sharers.shards, unit.sharers.replicas
        padded = sum(part.padded for part in unit.parts)
        comes_back = unit.block is None or unit.block >= self.plan.first_trained_block
        calls = gathers(self.plan, index, unit, comes_back=comes_back)
        self._add(group, "all_gather", padded * self.compute, calls=calls)
        if not unit.parts[0].trained:
            return
        together = 1 if self.apart else replicas.size
        for parts, calls in scatters(self.plan, index, unit, replicas=together).items():
            elements = sum(part.padded for part in parts)
            if self.packed:
                self._add(group, "all_to_all", self._rounded(elements, group), calls=calls)
            else:
                self._add(group, self.scatter, elements * self.reduced, calls=calls)
        if not self.apart:
            self._add(replicas, "all_reduce", padded * self.reduced / group.size, calls=1)

    def _shards(self, own: Held) -> None:
        """Gradients of shards are rounded or compressed among the replicas that have the same ones."""
        over: dict[Group, list[Part]] = {}
        for unit in own.units if self.apart else ():
            over.setdefault(unit.sharers.replicas, []).extend(part for part in unit.parts if part.trained)
        for replicas, trained in over.items():
            trained.sort(key=lambda part: _place(part.name))
            for bucket in buckets(trained, each=self.master, most=BUCKET_BYTES):
                self._summed(bucket, replicas)

    def _whole(self, own: Held) -> None:
        """Gradients of parameters that ranks hold whole are summed over those that hold the same ones."""
        same = [along(self.plan, AxisName.REPLICATE), along(self.plan, AxisName.SHARD, AxisName.CONTEXT)]
        of_experts = [self.grid.replicas, self.grid.shards] if self.grid else []
        for parts, groups in ((own.dense, same), (own.apart, of_experts)):
            trained = [part for part in parts if part.trained]
            for bucket in buckets(trained, each=self.master, most=BUCKET_BYTES):
                for group in groups:
                    self._summed(bucket, group)

    def _summed(self, bucket: Sequence[Part], group: Group) -> None:
        """A bucket meets whole, rounded or compressed."""
        compression, elements = self.plan.gradients.compression, sum(part.size for part in bucket)
        if compression is not None:
            self._compressed(compression, bucket, group)
        elif self.packed:
            for operation in ("all_to_all", "all_gather"):
                self._add(group, operation, self._rounded(elements, group), calls=1)
        else:
            self._add(group, "all_reduce", elements * self.reduced, calls=1)

    def _compressed(self, compression: Compression, bucket: Sequence[Part], group: Group) -> None:
        shapes = [part.shape for part in bucket]
        for operation, each in of_bucket(compression, shapes, ranks=group.size, wide=self.master):
            self._add(group, operation, each, calls=1)

    def _partial(self, parts: Sequence[Part]) -> None:
        """Gradients of which each tensor rank has a summand are summed once a step, as far as they are its own."""
        if self.plan.tensor > 1:
            each = self.master * sum(part.size * summands(part, sequence=self.split) for part in parts)
            self.traffic.add(LineName.TENSOR, "all_reduce", AxisName.TENSOR, each=each, calls=1)

    def _tied(self, parts: Sequence[Part]) -> None:
        """The two copies of a tied table exchange their gradients, where they lie on two ranks."""
        ends = {self.plan.stages[0].rank, self.plan.stages[-1].rank}
        frozen = 0 in self.plan.frozen_blocks
        if not self.design.model.head.tied or frozen or self.rank not in ends or len(ends) == 1:
            return
        each = self.master * sum(part.size for part in parts if part.name == TABLE)
        for operation in ("send", "recv"):
            self.traffic.add(LineName.TRANSFER, operation, AxisName.PIPELINE, each=each, calls=1)

    def _numbers(self) -> None:
        """The loss and the norm of the gradients, among all ranks; the count of targets, where some are masked; and
        where a bias balances them, how often experts of every mixture were chosen."""
        everyone = along(self.plan, *(axis.name for axis in self.plan.axes))
        if everyone.size == 1:
            return
        line = everyone.line("all_reduce", num_bytes=_NUMBER_BYTES)
        self.traffic.add(line, "all_reduce", *everyone.axes, each=_NUMBER_BYTES, calls=2)
        if self.design.job.data.masks or self.plan.empty_rows:
            self.traffic.add(LineName.OTHER, "all_reduce", *everyone.axes, each=_NUMBER_BYTES, calls=1)
        mixtures = [layer.transform for layer in self.design.model.layers if isinstance(layer.transform, Mixture)]
        if any(part.routing.bias_rate for part in mixtures):
            each = _NUMBER_BYTES * len(mixtures) * max(part.experts for part in mixtures)
            self.traffic.add(LineName.OTHER, "all_reduce", *everyone.axes, each=each, calls=1)

    def _add(self, group: Group, operation: str, each: float, *, calls: int) -> None:
        if group.size > 1:
            line = group.line(operation, num_bytes=each)
            self.traffic.add(line, operation, *group.axes, each=each, calls=calls)

    def _rounded(self, elements: float, group: Group) -> float:
        """Bytes of all parts, as many as ranks, of which the last is filled up to the others, and their scales."""
        packing = PACKINGS[self.plan.gradients.precision]
        return float(group.size * packing.part_bytes(math.ceil(elements / group.size)))


def _place(name: str) -> float:
    """Where a stage has the block of a parameter, by its number among the layers."""
    block, number = name.split(".")[:2]
    return {"embedding": -1.0, "layers": float(number) if number.isdigit() else 0.0}.get(block, math.inf)
