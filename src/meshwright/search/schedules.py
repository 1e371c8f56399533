"""The schedules of one pipeline size, with the chunks and slices that each may have."""

from __future__ import annotations

import numpy as np

from meshwright.cost.table import SCHEDULES
from meshwright.schedule.build import V_SHAPES
from meshwright.search.constraints import Limits
from meshwright.search.degree_rules import least_microbatches, namesake
from meshwright.search.product import Mask, Product
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ScheduleKind

ONE_F_ONE_B = SCHEDULES.index(ScheduleKind.ONE_F_ONE_B)
INTERLEAVED = SCHEDULES.index(ScheduleKind.INTERLEAVED)
BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
GPIPE = SCHEDULES.index(ScheduleKind.GPIPE)
SEQUENCE_1F1B = SCHEDULES.index(ScheduleKind.SEQUENCE_1F1B)
WHOLE_STAGES = [
    SCHEDULES.index(kind) for kind in (ScheduleKind.GPIPE, ScheduleKind.ZERO_BUBBLE_H1, ScheduleKind.ZERO_BUBBLE_H2)
]
SLICES = (2, 4)  # of a microbatch: finer ones leave products too small to fill a device


def add_schedules(product: Product, model: ModelSpec, *, length: int) -> None:
    """Schedules of the one pipeline size of `product`."""
    pipeline = int(product["pipeline"][0]) if product.rows else 1
    kinds = _kinds(pipeline, len(model.blocks), length, product.asked)
    product.times(["schedule", "chunks", "slices"], kinds)
    if model.prefix:
        product.keep(product["slices"] == 1, "prefix-in-one-slice")
    product.constrain("schedule", product["schedule"], [kind.value for kind in SCHEDULES])
    product.constrain("chunks", product["chunks"])
    product.constrain("slices", product["slices"])
    distinct, index = np.unique(np.stack([product["schedule"], product["slices"]]), axis=1, return_inverse=True)
    least = [least_microbatches(SCHEDULES[kind], pipeline=pipeline, slices=cut) for kind, cut in distinct.T]
    product.keep(product["microbatches"] >= np.array(least, dtype=np.int64)[index.reshape(-1)], "microbatches-fill")
    rounds = product["microbatches"] % pipeline == 0
    product.keep(rounds | (product["schedule"] != INTERLEAVED), "microbatches-round")
    product.keep(~_named_twice(product, pipeline), "schedule-has-one-name")


def _named_twice(product: Product, pipeline: int) -> Mask:
    columns = np.stack([product[name] for name in ("schedule", "microbatches", "slices")])
    distinct, index = np.unique(columns, axis=1, return_inverse=True)
    twice = [
        namesake(SCHEDULES[kind], pipeline=pipeline, microbatches=count, slices=cut) is not None
        for kind, count, cut in distinct.T.tolist()
    ]
    return np.array(twice, dtype=np.bool_)[index.reshape(-1)]


def _kinds(pipeline: int, blocks: int, length: int, asked: Limits) -> list[list[int]]:
    """(schedule, chunks, slices) of one pipeline size. Breadth-first has the smallest stages, which gather least."""
    chunks = _chunks(pipeline, blocks, asked)
    found = [[ONE_F_ONE_B, 1, 1]]
    found += [[BREADTH_FIRST, count, 1] for count in (chunks if "chunks" in asked.fixed else chunks[-1:])]
    if pipeline == 1:
        return found
    found += [[kind, 1, 1] for kind in WHOLE_STAGES]
    found += [[INTERLEAVED, count, 1] for count in chunks]
    found += [[SCHEDULES.index(kind), 2, 1] for kind in sorted(V_SHAPES) if blocks >= 2 * pipeline]
    asked_cut = asked.fixed.get("slices")
    if not isinstance(asked_cut, int):
        return found + [[SEQUENCE_1F1B, 1, cut] for cut in SLICES if length % cut == 0]
    # gpipe in slices is no faster than seq1f1b and holds more: it is there for who asks.
    return found + [
        [kind, 1, asked_cut] for kind in (SEQUENCE_1F1B, GPIPE) if asked_cut > 1 and length % asked_cut == 0
    ]


def _chunks(pipeline: int, blocks: int, asked: Limits) -> list[int]:
    """Counts of chunks that differ in their largest stage, the smallest of each; any where one is asked for."""
    most = blocks // pipeline
    if "chunks" in asked.fixed:
        return list(range(2, most + 1))
    largest = [-(-blocks // (pipeline * chunks)) for chunks in range(1, most + 1)]
    return [chunks for chunks in range(2, most + 1) if largest[chunks - 1] < largest[chunks - 2]]
