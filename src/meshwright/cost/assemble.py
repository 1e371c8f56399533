"""From prices of blocks to the seconds of a step: ranks, pipeline, synchronisation, and lines that sum to the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from meshwright.cost.compression import Compressed, coding_seconds, compressed_seconds
from meshwright.cost.copied_heads import heads_of, summed_copies
from meshwright.cost.extents import Extent, by_extent
from meshwright.cost.layouts import Backward, LayoutArrays
from meshwright.cost.longest_path import Path
from meshwright.cost.machine import Machine
from meshwright.cost.microbatch import Each, microbatch
from meshwright.cost.offload import away_seconds, optimizes_away
from meshwright.cost.optimizers import Optimized, host_bytes, update_seconds
from meshwright.cost.orthogonal import orthogonal_flops, orthogonal_seconds
from meshwright.cost.overlap import LINKS, Slack
from meshwright.cost.parameters import grid_parameters, local_parameters, owned_of, trained_of
from meshwright.cost.part_seconds import by_part
from meshwright.cost.pipeline import RankSeconds, Shape, makespan
from meshwright.cost.synchronize import bucketed
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.thin import summed_elements
from meshwright.cost.tied import tied_seconds
from meshwright.cost.transfers import times_crossed
from meshwright.cost.work import FloatArray
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.report import LineName

_INPUT_BYTES_PER_TOKEN = 24.0  # token, target and document of 8 bytes each, copied once
_EVERY_PASS = MappingProxyType(
    {
        LineName.FORWARD: "forward",
        LineName.BACKWARD: "backward",
        LineName.RECOMPUTE: "recompute",
        LineName.TENSOR: "tensor",
        LineName.CONTEXT: "context",
        LineName.EXPERTS: "experts",
        LineName.HOST: "carried",
    }
)


_WHOLE = MappingProxyType(
    {
        LineName.TENSOR: "whole_tensor",
        LineName.CONTEXT: "whole_context",
        LineName.EXPERTS: "whole_experts",
        LineName.HOST: "whole_carried",
        LineName.PARAMETERS: "whole_gather",
        LineName.GRADIENTS: "whole_scatter",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """Seconds of a microbatch between pipeline ranks: `reach` from the first to each other, shape (rows, ranks); what
    every pass of a stage `waits`, and for which the slowest link is `busy` with each, shape (rows,)."""

    reach: FloatArray
    waits: FloatArray
    busy: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Seconds of every row's step and its lines; `busiest` is the column of the rank that the lines tell of,
    `paced` which of the machines its pace is that of.

    `total` are whole seconds of collectives and copies as if none ran beside work, under the names of their `parts`;
    what is done once a step is told of the rank that has most of it. Of learners it is a step of one, before they meet.
    """

    seconds: FloatArray
    parts: Mapping[str, FloatArray]
    total: Mapping[str, FloatArray]
    detail: Mapping[tuple[str, str], FloatArray]
    figures: Mapping[str, FloatArray]
    busiest: IntArray
    paced: IntArray


_BLOCK_FIGURES = ("flops_again", "tensor_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Once:
    """Seconds once a step on every rank and FLOPs of its update, shape (rows, ranks); `tied` of the two that hold a
    tied table, (rows,)."""

    gather: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    update_flops: FloatArray
    whole_gather: FloatArray
    whole_gradients: FloatArray
    halves: FloatArray
    tied: FloatArray


def assemble(
    table: PlanTable,
    machines: list[Machine],
    *,
    place: BoolArray,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    everything: FloatArray,
    shape: Shape,
    ways: Ways,
    path: Path | None,
    model: ModelSpec,
    job: JobSpec,
    detailed: bool,
) -> Step:
    """The step of every row. `place` (rows, ranks, machines) says which machine a rank runs on; the slowest decides.

    `path` is the longest one through the schedule of the only row, where it was followed.
    """
    each = microbatch(machines, place, counts=counts, everything=everything, shape=shape)
    once = _once(table, machines, place, arrays=arrays, counts=counts, each=each, model=model, job=job)
    pipe = _pipe(machines, each, shape=shape, ways=ways, path=path)
    paced = np.take_along_axis(each.paced, pipe.busiest[:, None], axis=1)[:, 0]
    of, passed, passes = pipe.of, pipe.of(shape.passed), pipe.of(shape.passed) * pipe.stretch
    start, early = _ahead(each, shape=shape)
    agree = np.max([entry.agree for entry in machines], axis=0)
    after = np.maximum(_worst(once.gradients - early, shape.valid), 0.0) + agree
    before = np.maximum(_worst(once.gather - start, shape.valid), 0.0)
    parts: dict[str, FloatArray] = {line: of(each.by_name[name]) * passes for line, name in _EVERY_PASS.items()}
    parts |= {
        LineName.TENSOR: parts[LineName.TENSOR] + _worst(once.halves, shape.valid),
        LineName.TRANSFER: pipe.moving - pipe.still + once.tied,
        LineName.BUBBLE: pipe.still - pipe.own,
        LineName.GRADIENTS: of(each.by_name["scatter"]) * passes + after,
        LineName.PARAMETERS: of(each.by_name["gather"]) * passes + before,
        LineName.OUTER: np.zeros(len(table)),
        LineName.OPTIMIZER: _worst(once.optimizer, shape.valid),
        LineName.INPUT: _input_seconds(table, machines, job=job),
        LineName.OTHER: np.full(len(table), max(entry.group.device.step_overhead_seconds for entry in machines)),
    }
    passing: dict[str, FloatArray] = {line: of(each.by_name[name]) * passes for line, name in _WHOLE.items()}
    return Step(
        seconds=np.sum(list(parts.values()), axis=0),
        parts=parts,
        total=_whole(passing, once, valid=shape.valid, agree=agree),
        detail=by_part(machines, paced, of=of, counts=counts["total"], microbatches=passes) if detailed else {},
        figures={
            "flops": of(each.by_name["flops"]) * passed,
            **{name: of(values) * passed for name, values in _of_blocks(machines[0], counts["total"]).items()},
            "flops_update": of(once.update_flops),
            "transfer_seconds": np.where(shape.valid, ways.reach, 0.0).max(axis=1),
            "makespan_seconds": pipe.seconds,
            "first_gather_seconds": before,
            "last_reduce_seconds": after,
            "tied_seconds": once.tied,
        },
        busiest=pipe.busiest,
        paced=paced,
    )


def _whole(
    passing: Mapping[str, FloatArray], once: _Once, *, valid: BoolArray, agree: FloatArray
) -> dict[str, FloatArray]:
    """Whole seconds of every line: those that are `passing`, of all microbatches, and those once a step."""
    return {
        **passing,
        LineName.TENSOR: passing[LineName.TENSOR] + _worst(once.halves, valid),
        LineName.GRADIENTS: passing[LineName.GRADIENTS] + _worst(once.whole_gradients, valid) + agree,
        LineName.PARAMETERS: passing[LineName.PARAMETERS] + _worst(once.whole_gather, valid),
    }


def _of_blocks(machine: Machine, total: FloatArray) -> dict[str, FloatArray]:
    """Figures of a microbatch on every rank, shape (rows, ranks)."""
    return {name: _weighted(total, [getattr(one, name) for one in machine.blocks]) for name in _BLOCK_FIGURES}


def _ahead(each: Each, *, shape: Shape) -> tuple[FloatArray, FloatArray]:
    """Seconds by which every rank starts after the first one, and ends before it at the least, shape (rows, ranks).

    The first unit that reaches a rank is a slice where microbatches are cut. A rank ends late where it gives its
    weights' gradients in passes of their own.
    """
    units = np.ones(len(shape.microbatches)) if shape.slices is None else shape.slices
    share = (1.0 / units)[:, None]
    start = each.forward.first_upto - each.forward.first
    early = each.backward.first_upto - each.backward.first
    waited = each.weight.first_upto - each.weight.first
    return start * share, (early - waited) * share


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipe:
    """The pipeline of every row: its seconds without transfers, with them, and on the cores there are, shape (rows,).

    `busiest` is the column of the rank with most work and `own` its seconds of work; passes take `stretch` times
    their own time where ranks wait for cores.
    """

    still: FloatArray
    moving: FloatArray
    seconds: FloatArray
    own: FloatArray
    stretch: FloatArray
    busiest: IntArray

    def of(self, values: FloatArray) -> FloatArray:
        """What the busiest rank has of `values` (rows, ranks)."""
        return np.take_along_axis(values, self.busiest[:, None], axis=1)[:, 0]


def _pipe(
    machines: list[Machine],
    each: Each,
    *,
    shape: Shape,
    ways: Ways,
    path: Path | None,
) -> _Pipe:
    still, moving = _spans(each, shape=shape, ways=ways, path=path)
    moving = np.maximum(moving, _carried(each, shape=shape, busy=ways.busy))
    cost = _of_path(each.forward, shape=shape) + _of_path(each.backward, shape=shape)
    least = [
        entry.sharing.least_seconds(each=cost, microbatches=shape.microbatches, stages=shape.pipeline)
        for entry in machines
    ]
    seconds = np.maximum(moving, np.max(least, axis=0))
    busy = np.where(shape.valid, each.forward.total + each.backward.total, -1.0) * shape.passed
    busiest = busy.argmax(axis=1)
    own = np.take_along_axis(busy, busiest[:, None], axis=1)[:, 0]
    stretch = 1.0 + (seconds - moving) / np.maximum(own, 1e-30)
    return _Pipe(still=still, moving=moving, seconds=seconds, own=own, stretch=stretch, busiest=busiest)


def _optimized(
    table: PlanTable,
    entry: Machine,
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    model: ModelSpec,
    job: JobSpec,
) -> Optimized:
    one_kernel = entry.software.steps_narrow
    return Optimized(table=table, arrays=arrays, counts=counts, model=model, spec=job.optimizer, one_kernel=one_kernel)


def _once(
    table: PlanTable,
    machines: list[Machine],
    place: BoolArray,
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    each: Each,
    model: ModelSpec,
    job: JobSpec,
) -> _Once:
    names = ("gather", "gradients", "optimizer", "update_flops", "whole_gather", "whole_gradients", "halves")
    worst = {name: np.zeros(place.shape[:2]) for name in names}
    for position, entry in enumerate(machines):
        changed = trained_of(entry.blocks, kinds=arrays.kinds)
        parameters = local_parameters(table, changed, arrays=arrays, counts=counts, model=model)
        slack = Slack(**{name: each.by_name[f"slack_{name}"] for name in LINKS})
        apart = grid_parameters(table, changed, counts=counts)
        exposed, whole = bucketed(
            [(entry.data[None], parameters - apart), (entry.expert_data, apart)],
            slack,
            table,
            sizes=entry.sizes,
            contention=entry.contention,
        )
        owned = owned_of(table, changed, arrays=arrays, counts=counts, model=model)
        optimized = _optimized(table, entry, arrays=arrays, counts=counts, model=model, job=job)
        extents = by_extent(table, changed, arrays=arrays, counts=counts, model=model)
        parts = [_compressed(optimized, extent, entry) for extent in extents]
        small = compressed_seconds(parts, slack=slack, contention=entry.contention, device=entry.group.device)
        if small is not None:
            exposed = np.where(small.rows[:, None], small.exposed, exposed)
            whole = np.where(small.rows[:, None], small.whole, whole)
        together = (entry.sharing.everyone / entry.sharing.speed)[:, None]
        coded = coding_seconds(table, parameters, device=entry.group.device) * together
        step = update_seconds(optimized, owned, device=entry.group.device)
        step = (step if entry.update is None else step + orthogonal_seconds(optimized, entry.update)) * together
        away = optimizes_away(table)
        if away.any():
            passed = host_bytes(job.optimizer, entry.software)
            there = away_seconds(owned, table, sizes=entry.sizes, group=entry.group, passed=passed)
            step = np.where(away[:, None], there, step)
        found = {
            "gather": _weighted(counts["total"], [s.once_gather[0] for s in entry.syncs]),
            "gradients": _weighted(counts["total"], [s.once_gradients[0] for s in entry.syncs]) + exposed + coded,
            "optimizer": step,
            "update_flops": 0.0 * step if entry.update is None else orthogonal_flops(optimized),
            "whole_gather": _weighted(counts["total"], [s.once_gather[1] for s in entry.syncs]),
            "whole_gradients": _weighted(counts["total"], [s.once_gradients[1] for s in entry.syncs]) + whole + coded,
            "halves": _halves(table, entry, arrays=arrays, counts=counts["total"]),
        }
        for name, values in found.items():
            worst[name] = np.maximum(worst[name], np.where(place[..., position], values, 0.0))
    ends = [entry.ends for entry in machines]
    tied = tied_seconds(table, ends, sizes=machines[0].sizes, model=model, software=machines[0].software)
    return _Once(tied=tied, **worst)


def _compressed(optimized: Optimized, extent: Extent, entry: Machine) -> Compressed:
    """The blocks that so many ranks divide, whose gradients meet over links of their own."""
    found = optimized.of_extent(extent.table, extent.counts)
    return Compressed(found=found, owned=extent.held.owned, links=entry.data[extent.shards])


def _halves(table: PlanTable, entry: Machine, *, arrays: LayoutArrays, counts: FloatArray) -> FloatArray:
    """Seconds to sum the gradients of which tensor ranks have summands, shape (rows, ranks): of thin matrices that all
    of them have whole, and of key-value heads that several have."""
    found = _copies(table, entry, arrays=arrays, counts=counts)
    each = [summed_elements(kind.block) * (kind.backward is Backward.WHOLE) for kind in arrays.kinds]
    if not any(each):
        return found
    sent = (counts[..., :-1] * np.asarray(each, dtype=np.float64)).sum(axis=-1) * entry.sizes.master[:, None]
    return found + np.where((sent > 0.0) & (table.tensor > 1)[:, None], entry.halves.seconds(sent), 0.0)


def _copies(table: PlanTable, entry: Machine, *, arrays: LayoutArrays, counts: FloatArray) -> FloatArray:
    """Of key-value heads alone: those of one number together, as the runtime sums them."""
    sent: dict[int, FloatArray] = {}
    for index, kind in enumerate(arrays.kinds):
        elements, heads = summed_copies(kind.block, table), heads_of(kind.block)
        if elements is not None and heads is not None and kind.backward is Backward.WHOLE:
            rows = kind.rows(table)
            each_shard = entry.sizes.master / np.where(rows.sharding > 0, rows.divided, 1.0)
            more = counts[..., index] * (elements * each_shard)[:, None]
            sent[heads] = sent.get(heads, np.zeros(counts.shape[:2])) + more
    found = np.zeros(counts.shape[:2])
    for heads, size in sent.items():
        found = found + np.where(size > 0.0, entry.copies[heads].seconds(size), 0.0)
    return found


def _weighted(counts: FloatArray, values: list[FloatArray]) -> FloatArray:
    """Sum over kinds of counts times values, shape (rows, ranks)."""
    return np.asarray(np.matmul(counts[..., :-1], np.stack(values, axis=1)[..., None])[..., 0])


def _spans(each: Each, *, shape: Shape, ways: Ways, path: Path | None) -> tuple[FloatArray, FloatArray]:
    """Seconds from the first action to the last without transfers and with them: followed, or by closed forms."""
    if path is not None and path.exact.all():
        return path.still, path.moving
    passes = {"forward": each.forward, "backward": each.backward, "weight": each.weight}
    still = moving = makespan(shape, **passes, reach=np.zeros_like(ways.reach))
    if ways.reach.any() or ways.waits.any():
        waiting = passes | {name: passes[name].later(ways.waits, shape) for name in ("forward", "backward")}
        moving = makespan(shape, **waiting, reach=ways.reach)
    return (still, moving) if path is None else path.instead(still, moving)


def _carried(each: Each, *, shape: Shape, busy: FloatArray) -> FloatArray:
    """The least that a step takes because the slowest link between ranks is `busy` with one microbatch after another.

    What comes before the first crossing and after the last is one microbatch's work, where a rank has one stage.
    """
    crossings = times_crossed(shape.schedule, microbatches=shape.microbatches, chunks=shape.chunks)
    forward, backward, weight = (_of_path(way, shape=shape) for way in (each.forward, each.backward, each.weight))
    around = np.where(shape.chunks > 1.0, 0.0, forward + backward - weight)
    return np.where(shape.pipeline > 1.0, crossings * busy + around, 0.0)


def _of_path(seconds: RankSeconds, *, shape: Shape) -> FloatArray:
    """Seconds of a microbatch on all stages that it passes, shape (rows,), the mean where microbatches differ."""
    if not any(program.paths for program in shape.tables.values()):
        return seconds.everything
    left_out = 1.0 - shape.passed / shape.microbatches[:, None]
    unseen = np.where(shape.valid, seconds.total, 0.0) * left_out
    return np.asarray(seconds.everything - unseen.sum(axis=1), dtype=np.float64)


def _worst(values: FloatArray, valid: BoolArray) -> FloatArray:
    return np.asarray(np.where(valid, values, -np.inf).max(axis=1))


def _input_seconds(table: PlanTable, machines: list[Machine], *, job: JobSpec) -> FloatArray:
    """Seconds to copy a data rank's tokens of one step to its device."""
    tokens = table.microbatch * table.microbatches * job.sequence_length
    slowest = min(entry.group.device.memory_bandwidth * entry.group.device.memory_fraction for entry in machines)
    return np.asarray(_INPUT_BYTES_PER_TOKEN * tokens / slowest, dtype=np.float64)
