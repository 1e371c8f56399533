"""Gathering parameters and reducing gradients over data parallel ranks: whole seconds, and those no work hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.kinds import BlockSeconds
from meshwright.cost.layout import Layout
from meshwright.cost.layouts import Backward
from meshwright.cost.network import Linear
from meshwright.cost.overlap import Contention, Slack, Traffic, Way, exposed
from meshwright.cost.shard_copies import copy_seconds
from meshwright.cost.software import Software
from meshwright.cost.states import BUCKET_BYTES, StateBytes
from meshwright.cost.table import SCHEDULES, SHARDINGS, BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceSpec
from meshwright.spec.plan import ScheduleKind, Sharding

_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLinks:
    """Collectives over data parallel axes, one entry a row; the way among shards, among replicas, and among both."""

    gather: Linear
    scatter: Linear
    reduce_replicas: Linear
    reduce_all: Linear
    sharded: Way
    replicas: Way
    everywhere: Way


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncSeconds:
    """Seconds of one block's collectives; `each_*` every microbatch, `once_*` once a step; arrays of shape (rows,).

    Pairs are (exposed, whole): 0 <= exposed <= whole.
    """

    each_gather_forward: tuple[FloatArray, FloatArray]
    each_gather_backward: tuple[FloatArray, FloatArray]
    each_scatter: tuple[FloatArray, FloatArray]
    once_gather: tuple[FloatArray, FloatArray]
    once_gradients: tuple[FloatArray, FloatArray]


def synchronize(
    block: BlockSeconds,
    table: PlanTable,
    *,
    sizes: StateBytes,
    links: DataLinks,
    experts: DataLinks,
    contention: Contention | None,
    software: Software,
    device: DeviceSpec,
    turns: FloatArray,
    backward: Backward = Backward.WHOLE,
) -> SyncSeconds:
    """What the sharding of every row does with one block's parameters and gradients.

    zero1 and zero2 gather once a step; zero3 gathers in forward and again in backward of every microbatch; zero2 and
    zero3 scatter gradients every microbatch, or once in `turns` of them; zero1 once, or reduces them whole. Replicas
    reduce their shards once, some software beyond a node after all backwards; where they compress them it is in buckets
    of several blocks, and not here. What is done once is done beside the first or the last slice of a microbatch, where
    those are cut. Each travels while the same block of a neighbouring layer works or waits for other links, unless
    `contention` is None, and what that does not cover is exposed: gradients beside the products that give them, where
    those are a pass of their own. Parameters on a grid of experts travel over `experts`. A block has no gradients that
    `backward` does not give it, and is gathered once where backward does not come. What is copied for it on the device
    itself hides behind nothing.
    """
    copied = _Copied.of(block, table, sizes, software=software, device=device, turns=turns, backward=backward)
    found = _travelling(
        block,
        table,
        sizes=sizes,
        links=links,
        experts=experts,
        contention=contention,
        windows=copied.windows(block, table, contention),
        software=software,
        turns=turns,
        backward=backward,
    )
    return copied.beside(found, table)


def _travelling(
    block: BlockSeconds,
    table: PlanTable,
    *,
    sizes: StateBytes,
    links: DataLinks,
    experts: DataLinks,
    contention: Contention | None,
    windows: tuple[Slack, Slack],
    software: Software,
    turns: FloatArray,
    backward: Backward,
) -> SyncSeconds:
    """As `synchronize`, without copies; `windows` are what the block leaves free forward and backward."""
    sharded, zero3 = table.sharding > 0, table.sharding == _ZERO3
    dense, apart = grid_parameters(block, table)

    def both_ways(name: str, place: str, dense_bytes: FloatArray, apart_bytes: FloatArray) -> Traffic:
        seconds = Traffic.over(getattr(links, name).seconds(dense_bytes), getattr(links, place), num_bytes=dense_bytes)
        if apart.any():
            grid = np.where(apart > 0.0, getattr(experts, name).seconds(apart_bytes), 0.0)
            seconds = seconds + Traffic.over(grid, getattr(experts, place), num_bytes=apart_bytes)
        return seconds.where(sharded)

    gather = both_ways("gather", "sharded", dense * sizes.gathered, apart * sizes.gathered)
    trains = sharded & (backward is Backward.WHOLE)
    scatter = both_ways("scatter", "sharded", dense * sizes.reduced, apart * sizes.reduced).where(trains)
    own, theirs = (sizes.reduced / parts for parts in (table.divided, table.expert_divided))
    replicas = both_ways("reduce_replicas", "replicas", dense * own, apart * theirs).where(trains & ~compresses(table))
    after = replicas.far if software.sums_replicas_last else np.zeros_like(replicas.far)
    replicas = replicas.where(after == 0.0)
    ahead, behind = windows
    alone = scatter.where(software.scatters_alone & (table.sharding > _ZERO1)).times(1.0 / turns).whole
    each_scatter = scatter.where((not software.scatters_alone) & (table.sharding > _ZERO1)).times(1.0 / turns)
    each_gather = gather.where(zero3 & (not software.gathers_alone)).times(1.0 / turns)
    by_itself = gather.where(zero3 & software.gathers_alone).times(1.0 / turns).whole
    once, first = scatter.where(table.sharding == _ZERO1) + replicas, gather.where(~zero3)
    if software.reduces_whole:
        whole = both_ways("reduce_all", "everywhere", dense * sizes.reduced, apart * sizes.reduced).where(trains)
        once = whole.where(table.sharding == _ZERO1) + once.where(table.sharding != _ZERO1)
    split, slice_share = block.late.near > 0.0, 1.0 / table.slices
    gathers_back = sharded & (backward is not Backward.NONE)
    gather_back, alone_back = each_gather.where(gathers_back), np.where(gathers_back, by_itself, 0.0)
    back = exposed(gather_back, behind, contention)
    before, window = np.where(split, 0.0, back), Slack.either(split, block.late, behind)
    queue = gather_back.where(~split) + each_scatter
    scattered = exposed(queue, window, contention) - before
    ended = exposed(queue.times(slice_share) + once, window.times(slice_share), contention)
    return SyncSeconds(
        each_gather_forward=(exposed(each_gather, ahead, contention) + by_itself, each_gather.whole + by_itself),
        each_gather_backward=(back + alone_back, gather_back.whole + alone_back),
        each_scatter=(scattered + alone, each_scatter.whole + alone),
        once_gather=(exposed(first, ahead.times(slice_share), contention), first.whole),
        once_gradients=(ended - slice_share * (before + scattered) + after, once.whole + after),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copied:
    """Seconds of a block's copies on the device itself: after a gather in `forward` and in `backward`, and before a
    scatter; shape (rows,)."""

    forward: FloatArray
    backward: FloatArray
    scatter: FloatArray

    @classmethod
    def of(
        cls,
        block: BlockSeconds,
        table: PlanTable,
        sizes: StateBytes,
        *,
        software: Software,
        device: DeviceSpec,
        turns: FloatArray,
        backward: Backward,
    ) -> _Copied:
        copies = copy_seconds(software.shard_copies, compute=sizes.compute, reduced=sizes.reduced, device=device)
        sharded = table.sharding > 0
        gathered = np.where(sharded, copies.gathered * block.parameters, 0.0)
        scattered = np.where(sharded & (backward is Backward.WHOLE), copies.scattered * block.parameters, 0.0)
        return cls(
            forward=np.where(table.sharding == _ZERO3, gathered / turns, gathered),
            backward=np.where(table.sharding == _ZERO3, gathered / turns, 0.0) * (backward is not Backward.NONE),
            scatter=np.where(table.sharding > _ZERO1, scattered / turns, scattered),
        )

    def windows(self, block: BlockSeconds, table: PlanTable, contention: Contention | None) -> tuple[Slack, Slack]:
        """What the block leaves free forward and backward of every microbatch, while it copies too."""
        ahead, behind = block.forth.slack, block.back.slack
        if contention is None:
            return ahead, behind
        forward = np.where(table.sharding == _ZERO3, self.forward, 0.0)
        back = self.backward + np.where(table.sharding > _ZERO1, self.scatter, 0.0)
        ahead, behind = (
            slack + Slack.beside(seconds, np.zeros_like(seconds), contention)
            for slack, seconds in ((ahead, forward), (behind, back))
        )
        return ahead, behind

    def beside(self, found: SyncSeconds, table: PlanTable) -> SyncSeconds:
        """`found` with the copies, which hide behind nothing themselves."""
        zero3, every = table.sharding == _ZERO3, table.sharding > _ZERO1

        def more(pair: tuple[FloatArray, FloatArray], seconds: FloatArray) -> tuple[FloatArray, FloatArray]:
            return pair[0] + seconds, pair[1] + seconds

        return SyncSeconds(
            each_gather_forward=more(found.each_gather_forward, np.where(zero3, self.forward, 0.0)),
            each_gather_backward=more(found.each_gather_backward, self.backward),
            each_scatter=more(found.each_scatter, np.where(every, self.scatter, 0.0)),
            once_gather=more(found.once_gather, np.where(zero3, 0.0, self.forward)),
            once_gradients=more(found.once_gradients, np.where(every, 0.0, self.scatter)),
        )


def compresses(table: PlanTable) -> BoolArray:
    """Rows whose gradients are compressed."""
    return np.array([meeting.compression is not None for meeting in table.syncs])[table.sync]


def turns(table: PlanTable) -> FloatArray:
    """Microbatches for which a block's sharded parameters are gathered once, and its gradients scattered (rows,).

    Breadth-first runs all microbatches of a stage in a row (2211.05953), and they share both where the parameters stay:
    in stages of one layer, for memory holds the layer at work and the next one.
    """
    kept = table.schedule == _BREADTH_FIRST
    for layout in np.unique(table.layout[kept]).tolist():
        if _layers(table.layouts[layout]) > 1:
            kept &= table.layout != layout
    return np.where(kept, table.microbatches, 1).astype(np.float64)


def _layers(layout: Layout) -> int:
    """The most layers of any stage; the embedding is in the first one, the head in the last one."""
    held = np.diff(layout.bounds)
    held[0] -= 1
    held[-1] -= 1
    return int(held.max())


def bucketed(
    parameters: Sequence[tuple[DataLinks, FloatArray]],
    slack: Slack,
    table: PlanTable,
    *,
    sizes: StateBytes,
    contention: Contention | None,
) -> tuple[FloatArray, FloatArray]:
    """(exposed, whole) seconds to all-reduce a rank's gradients in buckets where nothing is sharded; (rows, ranks).

    `parameters` are those that travel over each of the links. Buckets travel during the last microbatch's backward,
    which leaves `slack`; the last bucket is always exposed.
    """
    zeros = np.zeros_like(slack.work)
    moved, traffic = zeros, Traffic.none(zeros)
    for links, values in parameters:
        sent = np.where(table.sharding[:, None] > 0, 0.0, values * sizes.reduced[:, None])
        calls = np.ceil(sent / BUCKET_BYTES)
        seconds = np.where(sent > 0.0, links.reduce_all.seconds(sent, calls=calls), 0.0)
        traffic = traffic + Traffic.over(seconds, links.everywhere, num_bytes=sent)
        moved = moved + sent
    whole = traffic.whole
    tail = whole * np.minimum(1.0, BUCKET_BYTES / np.maximum(moved, 1.0))
    return np.maximum(exposed(traffic, slack, contention), tail), whole


def grid_parameters(block: BlockSeconds, table: PlanTable) -> tuple[FloatArray, FloatArray]:
    """Parameters of a block that data parallel ranks share, and those that lie on a grid of experts."""
    apart = np.where(table.on_grid, block.expert_parameters, 0.0)
    return block.parameters - apart, apart
