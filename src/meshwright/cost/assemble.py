"""From prices of blocks to the seconds of a step: ranks, pipeline, synchronisation, and lines that sum to the whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from meshwright.cost.compute import optimizer_seconds
from meshwright.cost.layouts import LayoutArrays
from meshwright.cost.longest_path import Path
from meshwright.cost.machine import Machine
from meshwright.cost.memory import grid_parameters, local_parameters, owned_parameters
from meshwright.cost.offload import away_seconds, optimizes_away
from meshwright.cost.overlap import LINKS, Slack
from meshwright.cost.pipeline import RankSeconds, Shape, makespan
from meshwright.cost.synchronize import bucketed
from meshwright.cost.table import BoolArray, IntArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.job import JobSpec
from meshwright.spec.model import ModelSpec
from meshwright.spec.report import LineName

_INPUT_BYTES_PER_TOKEN = 24.0  # token, target and document of 8 bytes each, copied once
_NAMES = (
    "forward",
    "backward",
    "recompute",
    "tensor",
    "context",
    "experts",
    "carried",
    "gather",
    "scatter",
    "whole_tensor",
    "whole_context",
    "whole_experts",
    "whole_carried",
    "whole_gather",
    "whole_scatter",
    "slack_work",
    "slack_near",
    "slack_far",
    "slack_lanes",
    "flops",
)
_PASSES = ("down", "up", "late")
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
class Step:
    """Seconds of every row's step and its lines; `busiest` is the column of the rank that the lines tell of.

    `total` are whole seconds of collectives and copies as if none ran beside work, under the names of their `parts`;
    what is done once a step is told of the rank that has most of it.
    """

    seconds: FloatArray
    parts: Mapping[str, FloatArray]
    total: Mapping[str, FloatArray]
    detail: Mapping[tuple[str, str], FloatArray]
    figures: Mapping[str, FloatArray]
    busiest: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class _Each:
    """Seconds of one microbatch on every rank, (rows, ranks) by name, and what the pipeline's formula needs."""

    by_name: Mapping[str, FloatArray]
    forward: RankSeconds
    backward: RankSeconds
    weight: RankSeconds


@dataclass(frozen=True, slots=True, kw_only=True)
class _Once:
    """Seconds once a step on every rank, shape (rows, ranks)."""

    gather: FloatArray
    gradients: FloatArray
    optimizer: FloatArray
    whole_gather: FloatArray
    whole_gradients: FloatArray


def assemble(
    table: PlanTable,
    machines: list[Machine],
    *,
    place: BoolArray,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    everything: FloatArray,
    shape: Shape,
    reach: FloatArray,
    waits: FloatArray,
    path: Path | None,
    model: ModelSpec,
    job: JobSpec,
    detailed: bool,
) -> Step:
    """The step of every row. `place` (rows, ranks, machines) says which machine a rank runs on; the slowest decides.

    A microbatch is `reach` on its way from the first rank to each other; every pass of a stage `waits` for it.

    `path` is the longest one through the schedule of the only row, where it was followed.
    """
    each = _microbatch(machines, place, counts=counts, everything=everything, shape=shape)
    once = _once(table, machines, place, arrays=arrays, counts=counts, each=each, model=model, job=job)
    pipe = _pipe(machines, each, shape=shape, reach=reach, waits=waits, path=path)
    of, passes = pipe.of, shape.microbatches * pipe.stretch
    start, early = _ahead(each, shape=shape)
    agree = np.max([entry.agree for entry in machines], axis=0)
    fixed = max(entry.group.device.step_overhead_seconds for entry in machines)
    after = np.maximum(_worst(once.gradients - early, shape.valid), 0.0) + agree
    before = np.maximum(_worst(once.gather - start, shape.valid), 0.0)
    parts: dict[str, FloatArray] = {line: of(each.by_name[name]) * passes for line, name in _EVERY_PASS.items()}
    parts |= {
        LineName.TRANSFER: pipe.moving - pipe.still,
        LineName.BUBBLE: pipe.still - pipe.own,
        LineName.GRADIENTS: of(each.by_name["scatter"]) * passes + after,
        LineName.PARAMETERS: of(each.by_name["gather"]) * passes + before,
        LineName.OPTIMIZER: _worst(once.optimizer, shape.valid),
        LineName.INPUT: _input_seconds(table, machines, job=job),
        LineName.OTHER: np.full(len(table), fixed),
    }
    total: dict[str, FloatArray] = {line: of(each.by_name[name]) * passes for line, name in _WHOLE.items()}
    total[LineName.GRADIENTS] = total[LineName.GRADIENTS] + _worst(once.whole_gradients, shape.valid) + agree
    total[LineName.PARAMETERS] = total[LineName.PARAMETERS] + _worst(once.whole_gather, shape.valid)
    exchanged = _weighted(counts["total"], [block.tensor_bytes for block in machines[0].blocks])
    return Step(
        seconds=np.sum(list(parts.values()), axis=0),
        parts=parts,
        total=total,
        detail=_detail(machines[0], of, counts=counts, microbatches=passes) if detailed else {},
        figures={
            "flops": of(each.by_name["flops"]) * shape.microbatches,
            "transfer_seconds": np.where(shape.valid, reach, 0.0).max(axis=1),
            "makespan_seconds": pipe.seconds,
            "first_gather_seconds": before,
            "last_reduce_seconds": after,
            "tensor_bytes": of(exchanged) * shape.microbatches,
        },
        busiest=pipe.busiest,
    )


def _ahead(each: _Each, *, shape: Shape) -> tuple[FloatArray, FloatArray]:
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
    machines: list[Machine], each: _Each, *, shape: Shape, reach: FloatArray, waits: FloatArray, path: Path | None
) -> _Pipe:
    passes = {"forward": each.forward, "backward": each.backward, "weight": each.weight}
    still = moving = makespan(shape, **passes, reach=np.zeros_like(reach))
    if reach.any() or waits.any():
        waiting = passes | {name: passes[name].later(waits, shape) for name in ("forward", "backward")}
        moving = makespan(shape, **waiting, reach=reach)
    if path is not None:
        still, moving = path.instead(still, moving)
    cost = each.forward.everything + each.backward.everything
    least = [
        entry.sharing.least_seconds(each=cost, microbatches=shape.microbatches, stages=shape.pipeline)
        for entry in machines
    ]
    seconds = np.maximum(moving, np.max(least, axis=0))
    busy = np.where(shape.valid, each.forward.total + each.backward.total, -1.0) * shape.microbatches[:, None]
    busiest = busy.argmax(axis=1)
    own = np.take_along_axis(busy, busiest[:, None], axis=1)[:, 0]
    stretch = 1.0 + (seconds - moving) / np.maximum(own, 1e-30)
    return _Pipe(still=still, moving=moving, seconds=seconds, own=own, stretch=stretch, busiest=busiest)


def _microbatch(
    machines: list[Machine], place: BoolArray, *, counts: Mapping[str, FloatArray], everything: FloatArray, shape: Shape
) -> _Each:
    if len(machines) == 1:
        values = _values(machines[0])
        stacked = np.stack([values[name] for name in (*_NAMES, *_PASSES)], axis=2)
        summed = np.matmul(counts["total"], stacked)
        by_name = {name: summed[..., index] for index, name in enumerate(_NAMES)}
        passes = stacked[..., len(_NAMES) :]
        ranks = {name: np.matmul(counts[name], passes) for name in ("first", "last", "first_upto", "last_upto")}
        ranks["total"] = summed[..., len(_NAMES) :]
        all_of = np.matmul(everything[:, None, :], passes)[:, 0]
        forward, backward, weight = (
            RankSeconds(**{name: array[..., way] for name, array in ranks.items()}, everything=all_of[:, way])
            for way in range(len(_PASSES))
        )
        return _Each(by_name=by_name, forward=forward, backward=backward, weight=weight)
    return _slowest(machines, place, counts=counts, shape=shape)


def _slowest(machines: list[Machine], place: BoolArray, *, counts: Mapping[str, FloatArray], shape: Shape) -> _Each:
    """As `_microbatch` where ranks lie on unlike machines: each rank runs at the pace of its slowest one."""
    names = (*_NAMES, *_PASSES)
    best: dict[str, dict[str, FloatArray]] = {}
    slowest = np.full(shape.valid.shape, -1.0)
    for position, entry in enumerate(machines):
        values = _values(entry)
        sums = {
            which: {name: np.matmul(counts[which], values[name][..., None])[..., 0] for name in names}
            for which in ("total", "first", "last")
        }
        pace = np.where(place[..., position], sums["total"]["down"] + sums["total"]["up"], -1.0)
        wins = pace > slowest
        slowest = np.maximum(pace, slowest)
        best = {
            which: {name: np.where(wins, array, best[which][name] if best else 0.0) for name, array in arrays.items()}
            for which, arrays in sums.items()
        }

    def ranks(way: str) -> RankSeconds:
        first, last, total = (np.where(shape.valid, best[which][way], 0.0) for which in ("first", "last", "total"))
        return RankSeconds(
            total=total,
            first=first,
            last=last,
            first_upto=np.cumsum(first, axis=1),
            last_upto=np.cumsum(last, axis=1),
            everything=total.sum(axis=1),
        )

    by_name = {name: best["total"][name] for name in _NAMES}
    return _Each(by_name=by_name, forward=ranks("down"), backward=ranks("up"), weight=ranks("late"))


def pass_seconds(entry: Machine) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Seconds of one block forward, backward and of its weights' gradients by kind; what a stage costs besides last."""
    values = _values(entry)
    return values["down"], values["up"], values["late"]


def _values(entry: Machine) -> dict[str, FloatArray]:
    """Seconds of one block by kind, shape (rows, kinds + 1); the last column is what every stage costs besides."""
    blocks, syncs = entry.blocks, entry.syncs
    slacks = [block.back.slack + block.late for block in blocks]
    zeros = np.zeros_like(entry.action)

    def column(values: list[FloatArray], stage: FloatArray) -> FloatArray:
        return np.stack([*values, stage], axis=1)

    values = {
        "forward": column([b.forward for b in blocks], entry.action),
        "backward": column([b.backward for b in blocks], entry.action),
        "recompute": column([b.recompute for b in blocks], zeros),
        "tensor": column([b.forth.tensor + b.back.tensor for b in blocks], zeros),
        "context": column([b.forth.context + b.back.context for b in blocks], zeros),
        "experts": column([b.forth.experts + b.back.experts for b in blocks], zeros),
        "carried": column([b.forth.copies + b.back.copies for b in blocks], zeros),
        "whole_tensor": column([b.forth.whole_tensor + b.back.whole_tensor for b in blocks], zeros),
        "whole_context": column([b.forth.whole_context + b.back.whole_context for b in blocks], zeros),
        "whole_experts": column([b.forth.whole_experts + b.back.whole_experts for b in blocks], zeros),
        "whole_carried": column([b.forth.whole_copies + b.back.whole_copies for b in blocks], zeros),
        "gather": column([s.each_gather_forward[0] + s.each_gather_backward[0] for s in syncs], zeros),
        "scatter": column([s.each_scatter[0] for s in syncs], zeros),
        "whole_gather": column([s.each_gather_forward[1] + s.each_gather_backward[1] for s in syncs], zeros),
        "whole_scatter": column([s.each_scatter[1] for s in syncs], zeros),
        "slack_work": column([slack.work for slack in slacks], zeros),
        "slack_near": column([slack.near for slack in slacks], zeros),
        "slack_far": column([slack.far for slack in slacks], zeros),
        "slack_lanes": column([slack.lanes for slack in slacks], zeros),
        "flops": column([3.0 * b.flops for b in blocks], zeros),
    }
    down = [b.whole_forward + s.each_gather_forward[0] for b, s in zip(blocks, syncs, strict=True)]
    up = [b.whole_backward + s.each_gather_backward[0] + s.each_scatter[0] for b, s in zip(blocks, syncs, strict=True)]
    apart = [np.where(b.late.near > 0.0, s.each_scatter[0], 0.0) for b, s in zip(blocks, syncs, strict=True)]
    late = column([b.weight + more for b, more in zip(blocks, apart, strict=True)], zeros)
    return values | {"down": column(down, entry.action), "up": column(up, entry.action), "late": late}


def _once(
    table: PlanTable,
    machines: list[Machine],
    place: BoolArray,
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    each: _Each,
    model: ModelSpec,
    job: JobSpec,
) -> _Once:
    names = ("gather", "gradients", "optimizer", "whole_gather", "whole_gradients")
    worst = {name: np.zeros(place.shape[:2]) for name in names}
    for position, entry in enumerate(machines):
        parameters = local_parameters(table, entry.blocks, arrays=arrays, counts=counts, model=model)
        slack = Slack(**{name: each.by_name[f"slack_{name}"] for name in LINKS})
        apart = grid_parameters(table, entry.blocks, counts=counts)
        exposed, whole = bucketed(
            [(entry.data, parameters - apart), (entry.expert_data, apart)],
            slack,
            table,
            sizes=entry.sizes,
            contention=entry.contention,
        )
        owned = owned_parameters(table, parameters, apart)
        step = optimizer_seconds(owned, device=entry.group.device, clipped=job.optimizer.clip_norm is not None)
        step = step * (entry.sharing.everyone / entry.sharing.speed)[:, None]
        away = optimizes_away(table)
        if away.any():
            step = np.where(away[:, None], away_seconds(owned, sizes=entry.sizes, group=entry.group), step)
        total = counts["total"]
        found = {
            "gather": _weighted(total, [s.once_gather[0] for s in entry.syncs]),
            "gradients": _weighted(total, [s.once_gradients[0] for s in entry.syncs]) + exposed,
            "optimizer": step,
            "whole_gather": _weighted(total, [s.once_gather[1] for s in entry.syncs]),
            "whole_gradients": _weighted(total, [s.once_gradients[1] for s in entry.syncs]) + whole,
        }
        for name, values in found.items():
            worst[name] = np.maximum(worst[name], np.where(place[..., position], values, 0.0))
    return _Once(**worst)


def _weighted(counts: FloatArray, values: list[FloatArray]) -> FloatArray:
    """Sum over kinds of counts times values, shape (rows, ranks)."""
    return np.asarray(np.matmul(counts[..., :-1], np.stack(values, axis=1)[..., None])[..., 0])


def _worst(values: FloatArray, valid: BoolArray) -> FloatArray:
    return np.asarray(np.where(valid, values, -np.inf).max(axis=1))


def _input_seconds(table: PlanTable, machines: list[Machine], *, job: JobSpec) -> FloatArray:
    """Seconds to copy a data rank's tokens of one step to its device."""
    tokens = table.microbatch * table.microbatches * job.sequence_length
    slowest = min(entry.group.device.memory_bandwidth * entry.group.device.memory_fraction for entry in machines)
    return np.asarray(_INPUT_BYTES_PER_TOKEN * tokens / slowest, dtype=np.float64)


def _detail(
    entry: Machine,
    of: Callable[[FloatArray], FloatArray],
    *,
    counts: Mapping[str, FloatArray],
    microbatches: FloatArray,
) -> dict[tuple[str, str], FloatArray]:
    """Seconds of one step by pass and part on the busiest rank; what is left of a pass is host time."""
    found: dict[tuple[str, str], FloatArray] = {}
    for index, block in enumerate(entry.blocks):
        number = of(counts["total"][..., index]) * microbatches
        for name in block.parts:
            forward, backward = block.part_seconds(name)
            for line, seconds in ((LineName.FORWARD, forward), (LineName.BACKWARD, backward)):
                key = (str(line), name)
                found[key] = found.get(key, np.zeros_like(number)) + number * seconds
    return found
