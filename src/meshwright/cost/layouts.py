"""Layouts as arrays: how many blocks of each kind every pipeline rank holds, ranks that are alike taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meshwright.cost.layout import Layout, Policy, sharded_unlike
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Block, Layer, ModelSpec


class Backward(StrEnum):
    """What backward does in a block: gradients of its parameters and its input, of its input alone, or nothing."""

    WHOLE = "whole"
    INPUT = "input"
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A distinct block under a distinct policy, indexes as in the table; None takes the row's own.

    `shards` is over how many data parallel ranks it is sharded.
    """

    block: Block
    recompute: int | None = None
    offload: int | None = None
    sharding: int | None = None
    shards: int | None = None
    backward: Backward = Backward.WHOLE

    def rows(self, table: PlanTable) -> PlanTable:
        """`table` as though all blocks were sharded as such a block is, one learner's where a row has several and the
        block says over how many ranks; nothing is where a row has no ranks to shard over."""
        if self.sharding is None:
            return table
        sharded = table.sharding > 0
        found = replace(table, sharding=np.where(sharded, self.sharding, 0))
        if self.shards is None:
            return found
        replicate = np.where(sharded, np.maximum(table.meeting // self.shards, 1), table.replicate)
        sync = np.where(sharded & table.of_learners, 0, table.sync)
        return replace(found, replicate=replicate, shard=np.where(sharded, self.shards, table.shard), sync=sync)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutArrays:
    """Counts of blocks by kind, shape (layouts, ranks shown, kinds + 1), padded with ranks that are not `valid`.

    The column after the kinds counts stages. `total` is over all stages of the rank, `first` in its first stage,
    `last` in its last one; `first_upto` and `last_upto` are sums of `first` and `last` over all ranks up to and with
    this one. `rank` is the pipeline rank; `everything` the sum over all ranks, shape (layouts, kinds + 1). `places` are
    the numbers of a rank's blocks of a kind, on the mean.
    """

    kinds: tuple[Kind, ...]
    valid: BoolArray
    rank: IntArray
    total: FloatArray
    first: FloatArray
    last: FloatArray
    first_upto: FloatArray
    last_upto: FloatArray
    everything: FloatArray
    places: FloatArray

    def first_ranks(self, number: int) -> LayoutArrays:
        """The same of the first so many ranks shown, which are all of layouts that have no more."""
        names = ("valid", "rank", "total", "first", "last", "first_upto", "last_upto", "places")
        return replace(self, **{name: getattr(self, name)[:, :number] for name in names})

    def of(self, block: Block, counts: FloatArray) -> FloatArray:
        """How many of `counts` (rows, ranks, kinds + 1) are of `block`, however it is treated; shape (rows, ranks)."""
        alike = [index for index, kind in enumerate(self.kinds) if kind.block == block]
        return np.asarray(counts[..., alike].sum(axis=-1))


def count(layouts: Sequence[Layout], *, model: ModelSpec, every_rank: bool) -> LayoutArrays:
    """The counts of `layouts` over `model`.

    Without `every_rank`, a run of equal ranks is shown by its two ends: what is linear or monotone along the run has
    its largest value there, so that no cost and no peak is lost.
    """
    index: dict[Kind, int] = {}
    told = {
        treated: [index.setdefault(kind, len(index)) for kind in _kinds(model, treated)]
        for treated in dict.fromkeys(_treated(layout) for layout in layouts)
    }
    kinds = tuple(index)
    sums: dict[_Treated, tuple[FloatArray, FloatArray]] = {}
    for treated, each in told.items():
        ones = np.zeros((len(each) + 1, len(kinds) + 1))
        ones[np.arange(1, len(each) + 1), each] = 1.0
        sums[treated] = np.cumsum(ones, axis=0), np.cumsum(ones * np.arange(len(ones))[:, None], axis=0)
    shown = [_ranks(layout, *sums[_treated(layout)], every_rank=every_rank) for layout in layouts]
    width = max(len(entry.rank) for entry in shown)

    def pad(name: str) -> FloatArray:
        out = np.zeros((len(shown), width, len(kinds) + 1))
        for row, entry in enumerate(shown):
            values = getattr(entry, name)
            out[row, : len(values)] = values
        return out

    valid = np.zeros((len(shown), width), dtype=np.bool_)
    rank = np.zeros((len(shown), width), dtype=np.int64)
    for row, entry in enumerate(shown):
        valid[row, : len(entry.rank)] = True
        rank[row, : len(entry.rank)] = entry.rank
    names = ("total", "first", "last", "first_upto", "last_upto", "places")
    padded = {name: pad(name) for name in names}
    return LayoutArrays(
        kinds=kinds,
        valid=valid,
        rank=rank,
        everything=np.stack([entry.everything for entry in shown]),
        **padded,
    )


_Treated = tuple[tuple[Policy, ...], frozenset[int]]


def _treated(layout: Layout) -> _Treated:
    return layout.policies, layout.frozen


def _kinds(model: ModelSpec, treated: _Treated) -> list[Kind]:
    """The kind of every block; only layers are computed again or kept away by themselves."""
    policies, frozen = treated
    unlike = sharded_unlike(policies)
    first = next((index for index in range(len(model.blocks)) if index not in frozen), len(model.blocks))
    found = []
    for index, block in enumerate(model.blocks):
        backward = Backward.INPUT if index in frozen else Backward.WHOLE
        kind = Kind(block=block, backward=Backward.NONE if index < first else backward)
        if policies and isinstance(block, Layer):
            kind = replace(kind, recompute=policies[index].recompute, offload=policies[index].offload)
        if unlike:
            kind = replace(kind, sharding=policies[index].sharding, shards=policies[index].shards or None)
        found.append(kind)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    rank: IntArray
    total: FloatArray
    first: FloatArray
    last: FloatArray
    first_upto: FloatArray
    last_upto: FloatArray
    everything: FloatArray
    places: FloatArray


def _ranks(layout: Layout, upto: FloatArray, numbers_upto: FloatArray, *, every_rank: bool) -> _Ranks:
    """Of counts and of numbers of all blocks up to each one."""
    bounds, ranks = np.asarray(layout.bounds), np.asarray(layout.ranks)
    stages = upto[bounds[1:]] - upto[bounds[:-1]]
    stages[:, -1] = 1.0
    pipeline = layout.pipeline
    total, numbers = np.zeros((2, pipeline, upto.shape[1]))
    np.add.at(total, ranks, stages)
    np.add.at(numbers, ranks, numbers_upto[bounds[1:]] - numbers_upto[bounds[:-1]])
    first, last = stages[:pipeline], stages[-pipeline:][np.argsort(ranks[-pipeline:])]
    alike = np.concatenate([total, first, last], axis=1)
    changed = np.any(alike[1:] != alike[:-1], axis=1)
    starts, ends = np.append(True, changed), np.append(changed, True)
    shown = np.arange(pipeline) if every_rank else np.flatnonzero(starts | ends)
    return _Ranks(
        rank=shown,
        total=total[shown],
        first=first[shown],
        last=last[shown],
        first_upto=np.cumsum(first, axis=0)[shown],
        last_upto=np.cumsum(last, axis=0)[shown],
        everything=total.sum(axis=0),
        places=(numbers / np.maximum(total, 1.0))[shown],
    )
