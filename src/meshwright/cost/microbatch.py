"""What one microbatch costs on every pipeline rank: sums over the blocks of its stages, on its slowest machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from meshwright.cost.machine import Machine
from meshwright.cost.pipeline import RankSeconds, Shape
from meshwright.cost.table import BoolArray, IntArray
from meshwright.cost.work import FloatArray

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """Seconds of one microbatch on every rank, (rows, ranks) by name, and what the pipeline's formula needs.

    `paced` is which of the machines each rank's seconds are of, the slowest that it lies on.
    """

    by_name: Mapping[str, FloatArray]
    forward: RankSeconds
    backward: RankSeconds
    weight: RankSeconds
    paced: IntArray


def microbatch(
    machines: list[Machine], place: BoolArray, *, counts: Mapping[str, FloatArray], everything: FloatArray, shape: Shape
) -> Each:
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
        paced = np.zeros(shape.valid.shape, dtype=np.int64)
        return Each(by_name=by_name, forward=forward, backward=backward, weight=weight, paced=paced)
    return _slowest(machines, place, counts=counts, shape=shape)


def _slowest(machines: list[Machine], place: BoolArray, *, counts: Mapping[str, FloatArray], shape: Shape) -> Each:
    """As `_microbatch` where ranks lie on unlike machines: each rank runs at the pace of its slowest one."""
    names = (*_NAMES, *_PASSES)
    best: dict[str, dict[str, FloatArray]] = {}
    slowest, paced = np.full(shape.valid.shape, -1.0), np.zeros(shape.valid.shape, dtype=np.int64)
    for position, entry in enumerate(machines):
        values = _values(entry)
        sums = {
            which: {name: np.matmul(counts[which], values[name][..., None])[..., 0] for name in names}
            for which in ("total", "first", "last")
        }
        pace = np.where(place[..., position], sums["total"]["down"] + sums["total"]["up"], -1.0)
        wins = pace > slowest
        slowest, paced = np.maximum(pace, slowest), np.where(wins, position, paced)
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
    return Each(by_name=by_name, forward=ranks("down"), backward=ranks("up"), weight=ranks("late"), paced=paced)


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
        "flops": column([b.flops for b in blocks], zeros),
    }
    down = [b.whole_forward + s.each_gather_forward[0] for b, s in zip(blocks, syncs, strict=True)]
    up = [b.whole_backward + s.each_gather_backward[0] + s.each_scatter[0] for b, s in zip(blocks, syncs, strict=True)]
    apart = [np.where(b.late.near > 0.0, s.each_scatter[0], 0.0) for b, s in zip(blocks, syncs, strict=True)]
    late = column([b.weight + more for b, more in zip(blocks, apart, strict=True)], zeros)
    return values | {"down": column(down, entry.action), "up": column(up, entry.action), "late": late}
