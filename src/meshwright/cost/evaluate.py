"""Every row of a plan table priced in one vectorised pass: the one path that search and predict share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from meshwright.cost.assemble import Step, Ways, assemble
from meshwright.cost.costs import Costs
from meshwright.cost.layouts import Kind, LayoutArrays, count
from meshwright.cost.longest_path import Path, longest_path, played_microbatches
from meshwright.cost.machine import Machine, hops, machine
from meshwright.cost.microbatch import pass_seconds
from meshwright.cost.peaks import peaks
from meshwright.cost.pipeline import Shape
from meshwright.cost.placement import covers, crossings
from meshwright.cost.rounds import outer, with_rounds
from meshwright.cost.simulate import StageRows, StageSeconds
from meshwright.cost.software import Software
from meshwright.cost.stacks import software_of
from meshwright.cost.table import IntArray, PlanTable
from meshwright.cost.transfers import between_ranks
from meshwright.cost.work import FloatArray
from meshwright.schedule import planned
from meshwright.schedule.program import Program
from meshwright.spec.cluster import ClusterSpec
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec

_BLOCK_ELEMENTS = 1_000_000
_MOST_ACTIONS = 2_000_000  # of a schedule whose longest path is followed; a second of a search


def evaluate(
    table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec, every_rank: bool = False
) -> Costs:
    """The Costs of every row.

    Sequence length and batch follow `job` and the table; `every_rank` shows each pipeline rank instead of one of
    those that are alike. The step is the same, but that of plans shown so is the longest path through their schedules,
    of which closed forms may miss some percent where stages are uneven; plans of one schedule are followed together.
    Tables, of which there are no closed forms, are followed whatever is asked.
    Raises ConfigError where a device lacks a figure that the rows need.
    """
    assert len(table), "an empty plan table has no costs"
    table, cluster = effective(table.of_job(job)).with_used_layouts(), cluster.joined
    mixed = len(cluster.groups) > 1
    every_rank = every_rank or any(layout.table for layout in table.layouts)
    arrays = count(table.layouts, model=model, every_rank=every_rank or mixed)
    asked = partial(_in_pieces, arrays=arrays, model=model, cluster=cluster, job=job, every_rank=every_rank)
    edges = np.cumsum([group.num_devices for group in cluster.groups[:-1]], dtype=np.int64)
    reach = np.searchsorted(edges, table.world, side="left")  # the last node group that a row uses
    if reach.min() == reach.max():
        return _join(asked(table))
    alike = [np.flatnonzero(reach == last) for last in np.unique(reach)]
    found = _join([piece for rows in alike for piece in asked(table.take(rows))])
    return found.take(np.argsort(np.concatenate(alike), kind="stable"))


def _in_pieces(
    table: PlanTable,
    *,
    arrays: LayoutArrays,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    every_rank: bool,
) -> list[Costs]:
    """The costs of rows that use the same node groups, as many at a time as fit a processor's memory well."""
    width = arrays.valid.shape[1]
    rows = max(1, _BLOCK_ELEMENTS // (width * width + 40))
    known: dict[int, Machine] = {}
    path = None
    if every_rank:
        known = _machines(table, arrays, cluster=cluster, job=job)
        path = _paths(table, model=model, cluster=cluster, job=job, known=known, kinds=arrays.kinds)
    return [
        _evaluate(
            table.take(slice(start, start + rows)),
            arrays,
            model=model,
            cluster=cluster,
            job=job,
            path=path and path.take(slice(start, start + rows)),
            known=known if len(table) <= rows else {},
        )
        for start in range(0, len(table), rows)
    ]


def _machines(table: PlanTable, arrays: LayoutArrays, *, cluster: ClusterSpec, job: JobSpec) -> dict[int, Machine]:
    """The prices of every row by node group, of the groups that some row uses."""
    rank, valid = arrays.rank[table.layout], arrays.valid[table.layout]
    used = (covers(table, rank, cluster=cluster) & valid[..., None]).any(axis=(0, 1))
    features = software_of(job, cluster)
    return {
        index: machine(cluster.groups[index], table, arrays.kinds, cluster=cluster, job=job, software=features)
        for index in np.flatnonzero(used).tolist()
    }


def _tables(table: PlanTable) -> dict[int, Program]:
    """What rows do whose schedule is a table."""
    told = np.array([bool(layout.table) for layout in table.layouts])[table.layout]
    rows = np.flatnonzero(told).tolist()
    return {row: planned.program(table.entry(row), pipeline=int(table.pipeline[row])) for row in rows}


def effective(table: PlanTable) -> PlanTable:
    """The table as the runtime sees it: sharding over one rank is none."""
    return replace(table, sharding=np.where(table.divided > 1, table.sharding, 0))


def _paths(
    table: PlanTable,
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    known: Mapping[int, Machine],
    kinds: Sequence[Kind],
) -> Path:
    """The longest path through the schedule of every row; unknown where there is one rank, whose closed form is exact.

    Unknown too where the schedule is so large that following it would hold a search up. `known` machines price blocks
    of `kinds` on every row.
    """
    path = Path.unknown(len(table))
    stages = np.array([layout.num_stages for layout in table.layouts])[table.layout]
    told = np.array([index if layout.table else -1 for index, layout in enumerate(table.layouts)])[table.layout]
    columns = (stages, table.schedule, table.pipeline, table.chunks, table.microbatches, table.slices, told)
    _, first, inverse = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
    passes = {index: pass_seconds(entry) for index, entry in known.items()}
    for number, row in enumerate(first.tolist()):
        entry, pipeline = table.entry(row), int(table.pipeline[row])
        actions = 3 * entry.chunks * entry.slices * played_microbatches(entry, pipeline=pipeline)[1] * pipeline
        if pipeline == 1 or (actions > _MOST_ACTIONS and not entry.table):
            continue
        rows = np.flatnonzero(inverse.reshape(-1) == number)
        seconds = stage_rows(
            table.take(rows),
            model=model,
            cluster=cluster,
            job=job,
            known={index: tuple(each[rows] for each in found) for index, found in passes.items()},
            kinds=kinds,
        )
        path.set(rows, longest_path(entry, stages=seconds, pipeline=pipeline))
    return path


def _evaluate(
    table: PlanTable,
    arrays: LayoutArrays,
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    path: Path | None,
    known: Mapping[int, Machine],
) -> Costs:
    features = software_of(job, cluster)
    chosen = {
        name: getattr(arrays, name).take(table.layout, axis=0)
        for name in ("total", "first", "last", "first_upto", "last_upto")
    }
    valid, rank = arrays.valid[table.layout], arrays.rank[table.layout]
    shape = Shape(
        schedule=table.schedule,
        pipeline=table.pipeline.astype(np.float64),
        chunks=table.chunks.astype(np.float64),
        microbatches=table.microbatches.astype(np.float64),
        rank=rank,
        valid=valid,
        slices=table.slices.astype(np.float64),
        tables=_tables(table),
    )
    place = covers(table, rank, cluster=cluster) & valid[..., None]
    used = [index for index in range(len(cluster.groups)) if place[..., index].any()]
    machines = [
        known.get(index)
        or machine(cluster.groups[index], table, arrays.kinds, cluster=cluster, job=job, software=features)
        for index in used
    ]
    step = assemble(
        table,
        machines,
        place=place[..., used],
        arrays=arrays,
        counts=chosen,
        everything=arrays.everything.take(table.layout, axis=0),
        shape=shape,
        ways=_ways(table, rank, used, model=model, cluster=cluster, job=job),
        path=path,
        model=model,
        job=job,
        detailed=path is not None,
    )
    met = outer(table, machines, place[..., used], step=step, arrays=arrays, counts=chosen, model=model, job=job)
    return _costs(
        step if met is None else with_rounds(step, met),
        table if met is None else replace(table, every=met.every),
        machines,
        used=used,
        place=place[..., used],
        arrays=arrays,
        counts=chosen,
        shape=shape,
        context=_Context(model=model, job=job),
    )


def _ways(
    table: PlanTable, rank: IntArray, used: list[int], *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> Ways:
    """Seconds of a microbatch between the pipeline ranks in `rank`, over the slowest group in use.

    Ranks that wait for it have no way to go besides.
    """
    features, reach, busy = software_of(job, cluster), np.zeros(rank.shape), np.zeros(len(table))
    for index in used:
        group = cluster.groups[index]
        way, carried = between_ranks(table, rank, group=group, cluster=cluster, model=model, job=job, software=features)
        reach, busy = np.maximum(reach, way), np.maximum(busy, carried)
    waits = _waits(table, features)
    mean = reach.max(axis=1) / np.maximum(table.pipeline - 1.0, 1.0)
    return Ways(reach=np.where(waits[:, None] > 0.0, 0.0, reach), waits=waits * mean, busy=busy)


def _waits(table: PlanTable, features: Software) -> FloatArray:
    """How many hops every pass of a stage waits for: one, to one neighbour before it and to the other after it.

    The only two ranks of a pipeline have a neighbour on one side, but where stages go round. 0 where nothing waits.
    """
    loops = table.chunks > 1
    waiting = (table.pipeline > 1) & np.where(loops, features.waits_in_loops, features.waits_for_transfers)
    return np.where(waiting, np.where((table.pipeline == 2) & ~loops, 0.5, 1.0), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    model: ModelSpec
    job: JobSpec


def _costs(
    step: Step,
    table: PlanTable,
    machines: list[Machine],
    *,
    used: list[int],
    place: np.ndarray[tuple[int, ...], np.dtype[np.bool_]],
    arrays: LayoutArrays,
    counts: dict[str, FloatArray],
    shape: Shape,
    context: _Context,
) -> Costs:
    capacity = np.full(shape.valid.shape, np.inf)
    parts: dict[str, FloatArray] = {}
    host, host_room = np.zeros(shape.valid.shape), np.full(shape.valid.shape, np.inf)
    found = peaks(table, machines, arrays=arrays, counts=counts, shape=shape, model=context.model, job=context.job)
    for position, (entry, held) in enumerate(zip(machines, found, strict=True)):
        device = entry.group.device
        here = place[..., position]
        capacity = np.where(here, np.minimum(capacity, device.memory_bytes * device.usable_fraction), capacity)
        host = np.maximum(host, np.where(here, held.host, 0.0))
        host_room = np.where(here, np.minimum(host_room, held.host_room), host_room)
        for name, values in held.parts.items():
            parts[name] = np.maximum(parts.get(name, np.zeros(here.shape)), np.where(here, values, 0.0))
    whole = sum(parts.values(), np.zeros(shape.valid.shape))
    return Costs(
        step_seconds=step.seconds,
        parts=step.parts,
        total=step.total,
        memory=parts,
        host=host,
        host_room=host_room,
        ranks=shape.rank,
        valid=shape.valid,
        capacity=capacity,
        memory_bytes=whole.max(axis=1),
        fits=np.asarray(((whole <= capacity) & (host <= host_room)).all(axis=1), dtype=np.bool_),
        tokens_per_step=(table.data * table.microbatch * table.microbatches * context.job.sequence_length).astype(
            np.float64
        ),
        every=table.every,
        busiest=np.take_along_axis(shape.rank, step.busiest[:, None], axis=1)[:, 0],
        paced=np.asarray(used, dtype=np.int64)[step.paced],
        detail=step.detail,
        figures=step.figures,
    )


def stage_seconds(
    table: PlanTable, *, model: ModelSpec, cluster: ClusterSpec, job: JobSpec
) -> tuple[StageSeconds, ...]:
    """Seconds of every stage of the one plan in `table`, with the transfer to the stage after it.

    Where ranks wait for transfers those are part of every pass instead.
    """
    assert len(table) == 1, "stages are told of one plan"
    rows = stage_rows(table, model=model, cluster=cluster, job=job)
    passes = (rows.forward + rows.waits, rows.backward + rows.waits, rows.weight, rows.transfer)
    columns = [each[:, 0] for each in passes]
    return tuple(
        StageSeconds(forward=f, backward=b, transfer=t, input_share=1.0 - w / b if b else 0.5)
        for f, b, w, t in zip(*(column.tolist() for column in columns), strict=True)
    )


def stage_rows(
    table: PlanTable,
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    job: JobSpec,
    known: Mapping[int, tuple[FloatArray, ...]] = MappingProxyType({}),
    kinds: Sequence[Kind] = (),
) -> StageRows:
    """As `stage_seconds` of every row of a table whose layouts have as many stages each.

    `known` are the `pass_seconds` of machines by node group, of blocks of `kinds`.
    """
    table = effective(table).with_used_layouts()
    features = software_of(job, cluster)
    alone = [replace(layout, ranks=tuple(range(layout.num_stages))) for layout in table.layouts]
    arrays = count(alone, model=model, every_rank=True)
    column = [*(kinds.index(kind) for kind in arrays.kinds), -1] if known else slice(None)
    counts = arrays.total[table.layout]
    ranks = np.asarray([layout.ranks for layout in table.layouts], dtype=np.int64)[table.layout]
    place = covers(table, ranks, cluster=cluster)
    moves = ranks[:, 1:] != ranks[:, :-1]
    forward, backward, weight, transfer = np.zeros((4, *ranks.shape))
    for index, group in enumerate(cluster.groups):
        here = place[..., index]
        if not here.any():
            continue
        passes = known.get(index) or pass_seconds(
            machine(group, table, arrays.kinds, cluster=cluster, job=job, software=features)
        )
        down, up, late = (np.matmul(counts, each[:, column][..., None])[..., 0] for each in passes)
        forward = np.maximum(forward, np.where(here, down, 0.0))
        slower = here & (up > backward)
        weight, backward = np.where(slower, late, weight), np.where(slower, up, backward)
        near, far, wide = hops(table, group=group, cluster=cluster, model=model, job=job, software=features)
        nodes, sites = (np.diff(edges, axis=1) != 0 for edges in crossings(table, ranks, group=group, cluster=cluster))
        way = np.where(sites, wide[:, None], np.where(nodes, far[:, None], near[:, None]))
        way = np.where(moves & here.any(axis=1, keepdims=True), way, 0.0)
        transfer[:, :-1] = np.maximum(transfer[:, :-1], way)
    hops_waited = _waits(table, features)[:, None]
    waits = hops_waited * transfer.max(axis=1, keepdims=True) + np.zeros_like(transfer)
    transfer = np.where(hops_waited > 0.0, 0.0, transfer)
    return StageRows(forward=forward.T, backward=backward.T, weight=weight.T, transfer=transfer.T, waits=waits.T)


def _join(pieces: list[Costs]) -> Costs:
    """The rows of all pieces in order; what only some pieces have, as those with learners do, is 0 in the others."""
    if len(pieces) == 1:
        return pieces[0]
    joined: dict[str, Any] = {}
    for field in fields(Costs):
        first = getattr(pieces[0], field.name)
        if isinstance(first, np.ndarray):
            joined[field.name] = np.concatenate([getattr(piece, field.name) for piece in pieces])
        else:
            held = [getattr(piece, field.name) for piece in pieces]
            keys = dict.fromkeys(key for entry in held for key in entry)
            none = [np.zeros_like(next(iter(entry.values()))) for entry in held] if keys else []
            joined[field.name] = {
                key: np.concatenate([entry.get(key, zeros) for entry, zeros in zip(held, none, strict=True)])
                for key in keys
            }
    return replace(pieces[0], **joined)
