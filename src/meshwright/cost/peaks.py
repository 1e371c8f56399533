"""The peaks of memory on the machines of several node groups, each worked out once where machines hold alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np

from meshwright.cost.block_bytes import AMOUNTS, Holds
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.machine import Machine
from meshwright.cost.memory import Peak, memory, what_memory_counts
from meshwright.cost.pipeline import Shape
from meshwright.cost.table import PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec


def peaks(
    table: PlanTable,
    machines: Sequence[Machine],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    model: ModelSpec,
    job: JobSpec,
) -> list[Peak]:
    """What is held on each of `machines`, whatever ranks lie there."""
    found: list[Peak] = []
    for entry in machines:
        counted = what_memory_counts(entry.group, job)
        same = (
            peak.on(entry.group, table, valid=shape.valid)
            for other, peak in zip(machines, found, strict=False)
            if what_memory_counts(other.group, job) == counted and hold_alike(other.blocks, entry.blocks)
        )
        peak = next(same, None) or memory(
            table,
            entry.blocks,
            arrays=arrays,
            counts=counts,
            shape=shape,
            model=model,
            group=entry.group,
            job=job,
            software=entry.software,
        )
        found.append(peak)
    return found


def hold_alike(blocks: Sequence[Holds], others: Sequence[Holds]) -> bool:
    """Whether memory reads the same of `blocks` as of `others`, kind by kind."""
    return all(
        np.array_equal(one, other)
        for block, beside in zip(blocks, others, strict=True)
        for one, other in zip(_read(block), _read(beside), strict=True)
    )


def _read(block: Holds) -> list[FloatArray]:
    found = [block.parameters, block.expert_parameters, *(getattr(block.bytes, name) for name in AMOUNTS)]
    if block.bytes.slices is not None:
        found += [getattr(block.bytes.slices, field.name) for field in fields(block.bytes.slices)]
    return found
