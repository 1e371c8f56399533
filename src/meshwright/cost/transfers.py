"""What pipeline ranks send each other: how long one microbatch is on its way, and how long it keeps a link busy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from meshwright.cost.machine import hops
from meshwright.cost.placement import crossings
from meshwright.cost.software import Software
from meshwright.cost.table import SCHEDULES, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import ClusterSpec, NodeGroup
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.plan import ScheduleKind

_PHASES = np.array([kind in (ScheduleKind.GPIPE, ScheduleKind.BREADTH_FIRST) for kind in SCHEDULES])


def between_ranks(
    table: PlanTable,
    rank: IntArray,
    *,
    group: NodeGroup,
    cluster: ClusterSpec,
    model: ModelSpec,
    job: JobSpec,
    software: Software,
) -> tuple[FloatArray, FloatArray]:
    """On nodes like those of `group`: seconds of a microbatch from pipeline rank 0 to each of `rank`, of its shape
    (rows, ranks), and those for which it keeps the slowest link on the way busy, shape (rows,)."""
    nodes, sites = crossings(table, rank, group=group, cluster=cluster)
    empty = replace(table, microbatch=np.zeros_like(table.microbatch))
    full, idle = (
        np.stack(hops(each, group=group, cluster=cluster, model=model, job=job, software=software))
        for each in (table, empty)
    )
    near, far, wide = full[..., None]
    way = (rank - nodes) * near + (nodes - sites) * far + sites * wide
    crossed = np.stack([(rank > nodes).any(axis=1), (nodes > sites).any(axis=1), (sites > 0).any(axis=1)])
    return way, np.where(crossed, full - idle, 0.0).max(axis=0)


def times_crossed(schedule: IntArray, *, microbatches: FloatArray, chunks: FloatArray) -> FloatArray:
    """How often a link is taken one after another in a step, shape (rows,): by each microbatch for every stage of a
    rank, there and back at once but where all forwards come first."""
    return np.asarray(microbatches * chunks * np.where(_PHASES[schedule], 2.0, 1.0), dtype=np.float64)
