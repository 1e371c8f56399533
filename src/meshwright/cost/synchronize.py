"""Gathering parameters and reducing gradients over data parallel ranks: whole seconds, and those no work hides."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.kinds import BlockSeconds
from meshwright.cost.memory import BUCKET_BYTES
from meshwright.cost.network import Linear
from meshwright.cost.states import StateBytes
from meshwright.cost.table import SHARDINGS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.plan import Sharding

_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLinks:
    """Collectives over data parallel axes, one entry a row."""

    gather: Linear
    scatter: Linear
    reduce_replicas: Linear
    reduce_all: Linear


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
    block: BlockSeconds, table: PlanTable, *, sizes: StateBytes, links: DataLinks, overlap: bool
) -> SyncSeconds:
    """What the sharding of every row does with one block's parameters and gradients.

    zero1 and zero2 gather once a step; zero3 gathers in forward and again in backward of every microbatch; zero2 and
    zero3 scatter gradients every microbatch, zero1 once. Replicas reduce their shards once. Each travels while the
    same block of a neighbouring layer works when `overlap`, and what the work does not cover is exposed.
    """
    sharded, zero3 = table.sharding > 0, table.sharding == _ZERO3
    gather = np.where(sharded, links.gather.seconds(block.parameters * sizes.compute), 0.0)
    scatter = np.where(sharded, links.scatter.seconds(block.parameters * sizes.reduced), 0.0)
    replicas = links.reduce_replicas.seconds(block.parameters * sizes.reduced / np.maximum(table.shard, 1))
    replicas = np.where(sharded, replicas, 0.0)
    window = block.backward + block.recompute
    each_scatter = np.where(table.sharding > _ZERO1, scatter, 0.0)
    each_gather = np.where(zero3, gather, 0.0)
    forward = _exposed(each_gather, block.forward, overlap=overlap)
    both = each_gather + each_scatter
    share = _exposed(both, window, overlap=overlap) / np.where(both > 0.0, both, 1.0)
    once = np.where(table.sharding == _ZERO1, scatter, 0.0) + replicas
    left = np.maximum(window - both, 0.0)
    first = np.where(zero3, 0.0, gather)
    return SyncSeconds(
        each_gather_forward=(forward, each_gather),
        each_gather_backward=(share * each_gather, each_gather),
        each_scatter=(share * each_scatter, each_scatter),
        once_gather=(_exposed(first, block.forward, overlap=overlap), first),
        once_gradients=(_exposed(once, left, overlap=overlap), once),
    )


def bucketed(
    parameters: FloatArray, window: FloatArray, table: PlanTable, *, sizes: StateBytes, links: DataLinks, overlap: bool
) -> tuple[FloatArray, FloatArray]:
    """(exposed, whole) seconds to all-reduce a rank's gradients in buckets where nothing is sharded; (rows, ranks).

    Buckets travel during the last microbatch's backward, `window`; the last bucket is always exposed.
    """
    moved = parameters * sizes.reduced[:, None]
    calls = np.ceil(moved / BUCKET_BYTES)
    seconds = links.reduce_all.latency[:, None] * calls + links.reduce_all.per_byte[:, None] * moved
    whole = np.where(table.sharding[:, None] > 0, 0.0, seconds)
    if not overlap:
        return whole, whole
    tail = whole * np.minimum(1.0, BUCKET_BYTES / np.maximum(moved, 1.0))
    return np.clip(np.maximum(whole - window, tail), 0.0, whole), whole


def _exposed(whole: FloatArray, window: FloatArray, *, overlap: bool) -> FloatArray:
    return np.maximum(whole - window, 0.0) if overlap else whole
