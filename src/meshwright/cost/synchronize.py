"""Gathering parameters and reducing gradients over data parallel ranks: whole seconds, and those no work hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.kinds import BlockSeconds
from meshwright.cost.memory import BUCKET_BYTES
from meshwright.cost.network import Linear
from meshwright.cost.states import StateBytes
from meshwright.cost.table import SCHEDULES, SHARDINGS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.plan import ScheduleKind, Sharding

_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
_CARRIED = 1.126  # a collective takes so much longer beside work: measured by Galvatron, its shipped overlap figure


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLinks:
    """Collectives over data parallel axes, one entry a row; `taken` of a device's compute while they run (rows,)."""

    gather: Linear
    scatter: Linear
    reduce_replicas: Linear
    reduce_all: Linear
    taken: FloatArray


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
    overlap: bool,
) -> SyncSeconds:
    """What the sharding of every row does with one block's parameters and gradients.

    zero1 and zero2 gather once a step; zero3 gathers in forward and again in backward of every microbatch; zero2 and
    zero3 scatter gradients every microbatch, zero1 once. Breadth-first runs all microbatches of a stage in a row, and
    does once what others do for each: a share of it is told of every microbatch. Replicas reduce their shards once.
    Each travels while the same block of a neighbouring layer works, or waits for the host's link, when `overlap`, and
    what that does not cover is exposed. Parameters on a grid of experts travel over `experts`.
    """
    sharded, zero3 = table.sharding > 0, table.sharding == _ZERO3
    dense, apart = grid_parameters(block, table)

    def both_ways(name: str, dense_bytes: FloatArray, apart_bytes: FloatArray) -> FloatArray:
        seconds: FloatArray = getattr(links, name).seconds(dense_bytes)
        if apart.any():
            seconds = seconds + np.where(apart > 0.0, getattr(experts, name).seconds(apart_bytes), 0.0)
        return np.where(sharded, seconds, 0.0)

    gather = both_ways("gather", dense * sizes.compute, apart * sizes.compute)
    scatter = both_ways("scatter", dense * sizes.reduced, apart * sizes.reduced)
    own, theirs = (sizes.reduced / parts for parts in (table.divided, table.expert_divided))
    replicas = both_ways("reduce_replicas", dense * own, apart * theirs)
    taken = links.taken if overlap else None
    ahead = block.forward + block.carried_forward
    window = block.backward + block.recompute + block.carried_backward
    every = np.where(table.schedule == _BREADTH_FIRST, 1.0 / table.microbatches, 1.0)
    each_scatter = np.where(table.sharding > _ZERO1, scatter, 0.0) * every
    each_gather = np.where(zero3, gather, 0.0) * every
    forward = exposed(each_gather, ahead, taken=taken)
    both = each_gather + each_scatter
    share = exposed(both, window, taken=taken) / np.where(both > 0.0, both, 1.0)
    once = np.where(table.sharding == _ZERO1, scatter, 0.0) + replicas
    left = np.maximum(window - both, 0.0)
    first = np.where(zero3, 0.0, gather)
    return SyncSeconds(
        each_gather_forward=(forward, each_gather),
        each_gather_backward=(share * each_gather, each_gather),
        each_scatter=(share * each_scatter, each_scatter),
        once_gather=(exposed(first, ahead, taken=taken), first),
        once_gradients=(exposed(once, left, taken=taken), once),
    )


def bucketed(
    parameters: Sequence[tuple[DataLinks, FloatArray]],
    window: FloatArray,
    table: PlanTable,
    *,
    sizes: StateBytes,
    overlap: bool,
) -> tuple[FloatArray, FloatArray]:
    """(exposed, whole) seconds to all-reduce a rank's gradients in buckets where nothing is sharded; (rows, ranks).

    `parameters` are those that travel over each of the links. Buckets travel during the last microbatch's backward,
    `window`; the last bucket is always exposed.
    """
    moved, seconds, taken = np.zeros_like(window), np.zeros_like(window), np.zeros(len(table))
    for links, values in parameters:
        sent = values * sizes.reduced[:, None]
        calls = np.ceil(sent / BUCKET_BYTES)
        seconds = seconds + links.reduce_all.seconds(sent, calls=calls)
        moved = moved + sent
        taken = np.maximum(taken, links.taken)
    whole = np.where(table.sharding[:, None] > 0, 0.0, seconds)
    if not overlap:
        return whole, whole
    tail = whole * np.minimum(1.0, BUCKET_BYTES / np.maximum(moved, 1.0))
    return np.maximum(exposed(whole, window, taken=taken[:, None]), tail), whole


def grid_parameters(block: BlockSeconds, table: PlanTable) -> tuple[FloatArray, FloatArray]:
    """Parameters of a block that data parallel ranks share, and those that lie on a grid of experts."""
    apart = np.where(table.on_grid, block.expert_parameters, 0.0)
    return block.parameters - apart, apart


def exposed(whole: FloatArray, window: FloatArray, *, taken: FloatArray | None) -> FloatArray:
    """What `whole` seconds of a collective add to `window` seconds of work that they run beside; 0 <= it <= whole.

    While both run each is slower: `taken` of the device's compute carries bytes, and the collective waits for memory.
    Work that outlasts the collective is later by what was taken from it; else the rest follows alone. None where
    nothing runs beside the work.
    """
    if taken is None:
        return whole
    hidden = 1.0 - (1.0 - 1.0 / _CARRIED) / (1.0 - taken)
    return np.asarray(np.maximum(taken * _CARRIED * whole, whole - hidden * window), dtype=np.float64)
