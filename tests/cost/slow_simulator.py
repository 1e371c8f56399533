"""A second model of one training step: slow, plain, and written without the cost room.

Every pipeline rank has a clock, a queue of background collectives and a link to its host, and walks through its row
of the schedule block by block. Ranks that differ in their data, tensor or context coordinate alone do the same at the
same time, so one of each pipeline rank is followed. From the documents: parameters are gathered ahead by one block and
gradients reduced behind (ZeRO, 1910.02054; FSDP, 2304.11277), buckets of 25 MiB travel during the last backward (DDP,
2006.15704), keys and values pass around a ring beside the scores (2310.01889), tokens go to their experts and back
(2006.16668), layers are recomputed before their backward (1604.06174).
"""

from __future__ import annotations

from meshwright.schedule.build import build
from meshwright.schedule.table import Work as Pass
from meshwright.spec.cluster import Collective
from meshwright.spec.exchange import ExchangeKind
from meshwright.spec.model import Embedding, Head, Layer
from meshwright.spec.plan import Design, Offload, Recompute, Sharding
from tests.cost.slow_device import Device, Step
from tests.cost.slow_groups import Groups
from tests.cost.slow_network import Network, rate
from tests.cost.slow_work import Bench, Local, Work, work_of

BUCKET = 25 * 2**20
OUT, IN = 2.0 + 2.0, 2.0 + 4.0  # bytes to read and write what was gathered (bf16), and what is scattered (in fp32)
STEPPED = 0.43  # of its memory's bandwidth that a host's optimizer streams (2101.06840, table 4)
OPERATIONS = {"reduce": Collective.ALL_REDUCE, "gather": Collective.ALL_GATHER, "scatter": Collective.REDUCE_SCATTER}


class SlowSimulator:
    """One step of `design`, whose groups all have one tensor degree, sharding and precision (bf16)."""

    def __init__(self, design: Design) -> None:
        self.design, self.plan, self.model = design, design.plan, design.model
        self.network = Network.of(design.cluster)
        self.device = self.network.group.device
        plan, group = self.plan, design.plan.first_group
        self.bench = Bench(self.device, plan.world_size // plan.pipeline)
        self.sharding = group.sharding if plan.shard * plan.context > 1 else Sharding.NONE
        self.groups = Groups(plan)
        self.policies = {
            block: (part.recompute, part.offload)
            for stage in plan.stages
            for part in stage.groups
            for block in range(part.start, part.stop)
        }
        self.local = local = Local(
            tokens=plan.microbatch * plan.sequence_length / plan.context,
            sequences=plan.microbatch,
            length=plan.sequence_length,
            tensor=plan.tensor,
            split=plan.tensor if group.sequence_parallel else 1,
            context=plan.context,
            inner=plan.exchange.inner,
            experts=self.groups.grid[0],
            slices=self.groups.grid[1],
            masked=design.job.data.document_mask,
        )
        alike = {block: work_of(block, local, self.bench) for block in dict.fromkeys(self.model.blocks)}
        self.works = [alike[block] for block in self.model.blocks]
        self.times = {id(work): self._times(work) for work in alike.values()}

    def seconds(self) -> float:
        """The step, from its first token to its last parameter."""
        rows = [self._program(row) for row in self._schedule()]
        far = self._far(self.groups.data)
        self.ranks = [Device(far=far) for _ in rows]
        self.tickets: list[dict[int, int]] = [{} for _ in rows]
        self.fetched: list[dict[int, float]] = [{} for _ in rows]
        self.copies: list[list[float]] = [[] for _ in rows]
        self.bucket = [[0.0, 0.0] for _ in rows]
        self.scattered = [0 for _ in rows]
        self.ended: dict[tuple[Pass, int, int], float] = {}
        places = [0] * len(rows)
        for rank, row in enumerate(rows):
            self._ahead(rank, row, 0)
        while any(place < len(row) for place, row in zip(places, rows, strict=True)):
            before = list(places)
            for rank, row in enumerate(rows):
                while places[rank] < len(row) and self._step(rank, row, places[rank]):
                    places[rank] += 1
            assert places != before, "the schedule deadlocks"
        return self._finish(rows)

    def _far(self, members: list[int]) -> bool:
        return len({self.network.node(device) for device in members}) > 1

    def _schedule(self):
        at, pipeline = self.plan.schedule, self.plan.pipeline
        return build(at.kind, pipeline=pipeline, chunks=at.chunks, microbatches=at.microbatches)

    def _program(self, row) -> list[Step]:
        """The row's actions block by block; backward takes blocks from the last to the first."""
        last = {action.stage: index for index, action in enumerate(row) if action.work is Pass.BACKWARD}
        seen: set[int] = set()
        steps = []
        for index, action in enumerate(row):
            stage = self.plan.stages[action.stage]
            blocks = list(range(stage.start, stage.stop))
            if action.work is Pass.BACKWARD:
                blocks.reverse()
            for place, block in enumerate(blocks):
                steps.append(
                    Step(
                        action=action.work,
                        stage=action.stage,
                        microbatch=action.microbatch,
                        block=block,
                        opens=place == 0,
                        closes=place == len(blocks) - 1,
                        first=action.work is Pass.FORWARD and action.stage not in seen,
                        last=last[action.stage] == index,
                    )
                )
            seen.add(action.stage)
        return steps

    def _step(self, rank: int, row: list[Step], place: int) -> bool:
        """Does one block, unless what it needs from another rank has not come into being yet."""
        step, device = row[place], self.ranks[rank]
        if step.opens:
            arrived = self._arrival(step)
            if arrived is None:
                return False
            device.pause(arrived)
            action = self.device.action_seconds if self.plan.pipeline > 1 else 0.0
            device.work(action)
        if place in self.tickets[rank]:
            device.wait(self.tickets[rank][place])
        if place in self.fetched[rank]:
            device.pause(self.fetched[rank][place])
        self._ahead(rank, row, place + 1)
        if place in self.tickets[rank]:
            self._copy(rank, step.block, OUT)
        self._forward(rank, step) if step.action is Pass.FORWARD else self._backward(rank, step)
        following = row[place + 1] if place + 1 < len(row) else step
        if following.opens and following.action is Pass.BACKWARD and self._away(following.block):
            self._fetch(rank, following, place + 1, leaving=2)
        if step.closes:
            self.ended[step.action, step.stage, step.microbatch] = device.clock
        return True

    def _arrival(self, step: Step) -> float | None:
        """When the input of an action has come from the stage before (or, backward, after) its own."""
        if step.action is Pass.FORWARD:
            if step.stage == 0:
                return 0.0
            other = step.stage - 1
        else:
            other = step.stage + 1
            if other == len(self.plan.stages):
                return self.ended.get((Pass.FORWARD, step.stage, step.microbatch))
        end = self.ended.get((step.action, other, step.microbatch))
        return None if end is None else end + self._send(other, step.stage)

    def _send(self, one: int, other: int) -> float:
        source, target = (self.plan.stages[stage].rank for stage in (one, other))
        if source == target:
            return 0.0
        size = 2.0 * self.local.tokens * self.model.width / self.local.split
        return self.network.send_seconds(
            list(zip(self.groups.stages[source], self.groups.stages[target], strict=True)), size
        )

    def _ahead(self, rank: int, row: list[Step], place: int) -> None:
        """What the block at `place` needs is asked for: its parameters, and what it kept in the host's memory."""
        if place >= len(row):
            return
        step, device, work = row[place], self.ranks[rank], self.works[row[place].block]
        if self.sharding is Sharding.PARAMETERS or (self.sharding is not Sharding.NONE and step.first):
            seconds = self.network.seconds(Collective.ALL_GATHER, self.groups.shards, 2.0 * work.dense)
            seconds += self.network.seconds(Collective.ALL_GATHER, self.groups.grid_shards, 2.0 * work.on_grid)
            self.tickets[rank][place] = device.issue(seconds)
            self._cross(device, 2.0 * work.dense, seconds)
        if step.action is Pass.BACKWARD and self._away(step.block) and not step.opens:
            self._fetch(rank, step, place, leaving=1)

    def _fetch(self, rank: int, step: Step, place: int, *, leaving: int) -> None:
        """Two blocks may be on their way in all: one comes back when no more than one, or none, still leaves."""
        device, copies = self.ranks[rank], self.copies[rank]
        left = copies[-leaving] if len(copies) >= leaving else 0.0
        device.back = max(device.back, device.clock, left) + self._carry(step.block)
        self.fetched[rank][place] = device.back

    def _away(self, block: int) -> bool:
        return isinstance(self.model.blocks[block], Layer) and self.policies[block][1] is Offload.ACTIVATIONS

    def _again(self, block: int) -> Recompute:
        return self.policies[block][0] if isinstance(self.model.blocks[block], Layer) else Recompute.NONE

    def _carry(self, block: int) -> float:
        """Seconds of what a layer keeps, but for copies of weights, over the link to the host."""
        work, again = self.works[block], self._again(block)
        size = work.kept + work.kept_core
        if again is Recompute.FULL:
            size = work.hidden_bytes / self.local.split
        elif again is Recompute.SELECTIVE:
            size = work.kept
        group = self.network.group
        share = group.host_bandwidth / group.devices_per_node if group.host_bandwidth else float("inf")
        return group.host.latency_seconds + size / min(rate(group.host), share)

    def _forward(self, rank: int, step: Step) -> None:
        device = self.ranks[rank]
        if self._away(step.block):
            copies = self.copies[rank]
            if len(copies) > 1:
                device.pause(copies[-2])  # two blocks' bytes may be on their way
            self._run(device, self.works[step.block], forward=True)
            device.out = max(device.out, device.clock) + self._carry(step.block)
            copies.append(device.out)
        else:
            self._run(device, self.works[step.block], forward=True)

    def _backward(self, rank: int, step: Step) -> None:
        device, work, again = self.ranks[rank], self.works[step.block], self._again(step.block)
        if again is Recompute.FULL:
            self._run(device, work, forward=True)
        elif again is Recompute.SELECTIVE:
            self._attend(device, work, forward=True)
        self._run(device, work, forward=False)
        device.work(self._accumulate(work) / self.bench.bandwidth)
        self._reduce(rank, step, work)

    def _times(self, work: Work) -> dict[bool, tuple[float, float, float]]:
        """Forward and backward: device seconds without scores, host seconds, and seconds over tensor ranks."""
        casts = 6.0 * self._multiplied(work) / self.bench.bandwidth if self.sharding is Sharding.NONE else 0.0
        launch, starts = self.device.launch_seconds, work.matrices * self.device.launch_seconds
        each = 0.0
        if any(
            work is other
            for other, block in zip(self.works, self.model.blocks, strict=True)
            if isinstance(block, Layer)
        ):
            each = self.device.layer_seconds + (self.device.tensor_layer_seconds if self.plan.tensor > 1 else 0.0)
            each += self.device.shard_layer_seconds if self.sharding is not Sharding.NONE else 0.0
        cast_starts = starts if casts else 0.0
        found = {}
        for forward in (True, False):
            names = work.hidden_forward if forward else work.hidden_backward
            hidden = sum(
                self.network.seconds(OPERATIONS[name], self.groups.tensor, work.hidden_bytes) for name in names
            )
            if forward:
                small = 4.0 * self.local.tokens * work.statistics
                hidden += self.network.seconds(Collective.ALL_REDUCE, self.groups.tensor, small, work.statistics)
            busy = (work.forward if forward else work.backward) + casts
            host = (
                (work.kernels * (1 if forward else 2) + work.met[0 if forward else 1]) * launch
                + each
                + cast_starts
                + (0.0 if forward else starts)
            )
            found[forward] = (busy, host, hidden)
        return found

    def _multiplied(self, work: Work) -> float:
        """Parameters that a product reads: a tied head's too, and not an embedding's."""
        for other, block in zip(self.works, self.model.blocks, strict=True):
            if other is work and isinstance(block, Embedding):
                return 0.0
            if other is work and isinstance(block, Head):
                return block.matrix_parameters / self.plan.tensor
        return work.dense + work.on_grid

    def _experts(self, work: Work) -> float:
        """Tokens to their experts and back; the ranks that divide an expert gather them and add up what it gives."""
        if not work.routed:
            return 0.0
        there = self.network.seconds(Collective.ALL_TO_ALL, self.groups.holders, work.routed)
        joined = self.network.seconds(Collective.ALL_GATHER, self.groups.slices, work.gathered)
        return 2 * there + joined + self.network.seconds(Collective.REDUCE_SCATTER, self.groups.slices, work.gathered)

    def _run(self, device: Device, work: Work, *, forward: bool) -> None:
        """A pass of one block; the host starts its kernels ahead of the device."""
        busy, host, hidden = self.times[id(work)][forward]
        device.host = device.host + host
        device.work(busy)
        self._attend(device, work, forward=forward)
        device.exchange(hidden, far=self._far(self.groups.tensor))
        device.exchange(self._experts(work), far=self._far(self.groups.holders))
        device.pause(device.host)

    def _attend(self, device: Device, work: Work, *, forward: bool) -> None:
        """The scores, with what context ranks must exchange for them."""
        core = work.core_forward if forward else work.core_backward
        if self.plan.context == 1 or not work.keys:
            device.work(core)
            return
        traded = self.network.seconds(Collective.ALL_TO_ALL, self.groups.traders, work.heads_out, calls=2)
        device.exchange(traded, far=self._far(self.groups.traders))
        if self.groups.outer == 1:
            device.work(core)
        elif self.plan.exchange.kind is ExchangeKind.RING:
            pairs = list(zip(self.groups.runs, self.groups.runs[1:] + self.groups.runs[:1], strict=True))
            hop = self.network.send_seconds(pairs, work.keys * (1 if forward else 3))
            for turn in range(self.groups.outer):
                sent = device.clock + hop
                device.work(core / self.groups.outer)
                if turn < self.groups.outer - 1:
                    device.exchange(max(sent - device.clock, 0.0), far=self._far(self.groups.runs))
        else:
            whole = work.keys * self.groups.outer
            wait = self.network.seconds(Collective.ALL_GATHER, self.groups.runs, whole)
            if not forward:
                wait += self.network.seconds(Collective.REDUCE_SCATTER, self.groups.runs, 2 * whole)
            device.exchange(wait, far=self._far(self.groups.runs))
            device.work(core)

    def _accumulate(self, work: Work) -> float:
        """Bytes to add a microbatch's gradient to those before it, the first of which there are none before spread."""
        size = work.dense + work.on_grid
        if self.sharding in (Sharding.GRADIENTS, Sharding.PARAMETERS):
            size = work.dense / self.groups.divided + work.on_grid / self.groups.grid_divided
        first = (
            0.0
            if self.sharding is Sharding.NONE and len(self.groups.data) > 1
            else 1.0 / self.plan.schedule.microbatches
        )
        return size * (12.0 if self.sharding is Sharding.NONE else 10.0) * (1.0 - first)

    def _reduce(self, rank: int, step: Step, work: Work) -> None:
        """A block's gradients leave behind its backward: into buckets, or to their owners."""
        device, net = self.ranks[rank], self.network
        if self.sharding is Sharding.NONE:
            if step.last:
                self._fill(rank, 4.0 * work.dense, 0, self.groups.data)
                self._fill(rank, 4.0 * work.on_grid, 1, self.groups.grid_data)
            return
        if step.last or self.sharding is not Sharding.OPTIMIZER:
            seconds = net.seconds(Collective.REDUCE_SCATTER, self.groups.shards, 4.0 * work.dense)
            device.wait(self.scattered[rank])  # FSDP2 has one reduce-scatter on its way
            self._copy(rank, step.block, IN)
            seconds += net.seconds(Collective.REDUCE_SCATTER, self.groups.grid_shards, 4.0 * work.on_grid)
            self.scattered[rank] = device.issue(seconds)
            self._cross(device, 4.0 * work.dense, seconds)
        if step.last:
            seconds = net.seconds(Collective.ALL_REDUCE, self.groups.replicas, 4.0 * work.dense / self.groups.divided)
            apart = 4.0 * work.on_grid / self.groups.grid_divided
            device.issue(seconds + net.seconds(Collective.ALL_REDUCE, self.groups.grid_replicas, apart))

    def _cross(self, device: Device, size: float, seconds: float) -> None:
        """Tensors of shards that leave the node keep the lanes on which the device copies to its host busy."""
        members, host = self.groups.shards, self.network.group.host
        if host is not None and self._far(members):
            here = sum(self.network.node(member) == self.network.node(members[0]) for member in members)
            busy = min(seconds, size * (1.0 - 1.0 / len(members)) / here / rate(host))
            device.out, device.back = (max(at, device.clock) + busy for at in (device.out, device.back))

    def _copy(self, rank: int, block: int, each: float) -> None:
        work = self.works[block]
        self.ranks[rank].work(each * (work.dense + work.on_grid) / self.bench.bandwidth)

    def _fill(self, rank: int, size: float, which: int, members: list[int]) -> None:
        bucket = self.bucket[rank]
        bucket[which] += size
        while bucket[which] >= BUCKET:
            self.ranks[rank].issue(self.network.seconds(Collective.ALL_REDUCE, members, BUCKET))
            bucket[which] -= BUCKET

    def _finish(self, rows: list[list[Step]]) -> float:
        """What is left in queues and buckets, the norm that all agree on, the optimizer."""
        ends, steps = [], []
        for rank, (device, row) in enumerate(zip(self.ranks, rows, strict=True)):
            if self.sharding is Sharding.NONE:
                for which, members in enumerate((self.groups.data, self.groups.grid_data)):
                    device.issue(self.network.seconds(Collective.ALL_REDUCE, members, self.bucket[rank][which]))
            device.wait(len(device.jobs))
            ends.append(device.clock)
            steps.append(self._optimizer({step.block for step in row}))
        clipped = self.design.job.optimizer.clip_norm is not None
        agree = self.network.seconds(Collective.ALL_REDUCE, self.groups.everyone, 4.0) if clipped else 0.0
        tokens = self.plan.microbatch * self.plan.schedule.microbatches * self.plan.sequence_length
        fixed = self.device.step_overhead_seconds + 24.0 * tokens / self.bench.bandwidth
        return max(ends) + agree + max(steps) + fixed

    def _optimizer(self, blocks: set[int]) -> float:
        """AdamW over a rank's share: four states in and three out, and gradients read, written or zeroed besides."""
        dense = sum(self.works[block].dense for block in blocks)
        head = len(self.works) - 1
        if self.model.head.tied and head in blocks and 0 not in blocks:
            dense += self.model.head.matrix_parameters / self.plan.tensor
        owned = dense / (self.groups.divided if self.sharding is not Sharding.NONE else 1)
        apart = sum(self.works[block].on_grid for block in blocks)
        owned += apart / (self.groups.grid_divided if self.sharding is not Sharding.NONE else 1)
        if self.plan.first_group.offload is Offload.OPTIMIZER:
            group = self.network.group
            shared = STEPPED * (group.host_bandwidth or 0.0) / group.devices_per_node
            share = shared or rate(group.host)
            return owned * ((4.0 + 2.0) / rate(group.host) + 28.0 / share)
        rest = 16.0 if self.design.job.optimizer.clip_norm is not None else 4.0
        return owned * (28.0 / (self.device.optimizer_bandwidth or self.bench.bandwidth) + rest / self.bench.bandwidth)


def slow_seconds(design: Design) -> float:
    """Seconds of one step of `design`."""
    return SlowSimulator(design).seconds()
