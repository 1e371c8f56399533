"""The moments of a step that may be the peak of memory, and what lives in each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np

from meshwright.cost.bucket_bytes import OnTheWay
from meshwright.cost.holding import Held, Holdings, Moment
from meshwright.cost.moments_eager import EagerMoments
from meshwright.cost.moments_units import UnitMoments
from meshwright.cost.moments_unlike import UnlikeMoments
from meshwright.cost.peak_parts import Rows, Setting, taken
from meshwright.cost.peak_walk import UNITS, UNLIKE, backwards, least_backwards, least_needs, needs
from meshwright.cost.pipeline import Shape
from meshwright.cost.software import Software
from meshwright.cost.states import StateBytes, States, state_bytes
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind

_PARTS = ("gradients", "activations", "logits", "buffers", "freed")


def heaviest_moment(
    found: States,
    entry: Held,
    source: Holdings,
    *,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    kind: DeviceKind,
    software: Software,
    way: OnTheWay | None = None,
    besides: Sequence[Moment] = (),
    least: bool = False,
) -> dict[str, FloatArray]:
    """The parts of the heaviest moment of a step on every rank, of `besides` too, by the names of Moment's. Gradients
    are on their `way` in some of them.

    At the `least`: of the one backward of every row in which most plans have their peak, which is much sooner found.
    """
    if not software.eager:
        fused = _fused(found, entry, sizes=state_bytes(source.table), software=software)
        return _heaviest((*fused, *besides), like=entry.kept)
    setting = Setting.of(source.table, shape=shape, software=software)
    whole = Rows(setting=setting, found=found, entry=entry, way=way)
    peak = {name: np.zeros(entry.kept.shape) for name in _PARTS}
    asked = least_needs(whole) if least else needs(whole, unlike=source.unlike)
    walks = least_backwards if least else backwards
    for need in np.unique(asked).tolist():
        rows = np.flatnonzero(asked == need)
        at = whole if len(rows) == len(asked) else taken(whole, rows)
        those = {name: counts[name][rows] for name in ("first", "last", "total")}
        if need & UNLIKE:
            at = replace(at, entry=replace(at.entry, all_stages=source.of(those["total"], rows)))
        moments_of = UnlikeMoments if need & UNLIKE else UnitMoments if need & UNITS else EagerMoments
        told = moments_of(at, kind=kind, software=software)
        walked = walks(at, need, counts=those, count=partial(source.of, rows=rows))
        moments = chain.from_iterable(told.backward(beside) for beside in walked)
        full = [told.full(at.entry)] if least else []
        others = (*full, *told.others(at.entry), *(taken(moment, rows) for moment in besides))
        for name, values in _heaviest(chain(moments, others), like=at.entry.kept).items():
            peak[name][rows] = values
    return peak


def _heaviest(found: Iterable[Moment], *, like: FloatArray) -> dict[str, FloatArray]:
    best, peak = np.full(like.shape, -np.inf), {name: np.zeros(like.shape) for name in _PARTS}
    for moment in found:
        total = moment.total
        more = (total > best) & moment.here
        if not more.any():
            continue
        np.copyto(best, total, where=more)
        for name, values in peak.items():
            np.copyto(values, getattr(moment, name), where=more)
    return peak


def _fused(found: States, entry: Held, *, sizes: StateBytes, software: Software) -> list[Moment]:
    """The loss, the head's backward, a layer's backward, the embedding's backward, the optimizer's step.

    Gradients have their buffer already. The head's product writes a stand-in of its weight's shape, and the table's
    gradient is whole before it is added: both in the precision that multiplies. A loss that is not fused has the
    logits beside their exponentials, and their gradient in the precision that multiplies later. A gradient that is
    added to a sum in more precision than its own is widened whole: the table's, when a pass is over.
    """
    master, compute, blocks = sizes.master[:, None], sizes.compute[:, None], entry.all_stages
    given = 0.0 * blocks.one_logits if software.fused_loss else blocks.one_logits * compute / np.maximum(compute, 4.0)
    nothing = np.zeros_like(master * entry.kept)

    def moment(activations: FloatArray, logits: FloatArray, buffers: FloatArray) -> Moment:
        return Moment(gradients=found.before, activations=activations, logits=logits, buffers=entry.fixed + buffers)

    left = entry.logits - (0.0 if software.keeps_logits else blocks.one_logits)
    table = blocks.embedding * (sizes.reduced[:, None] if software.keeps_terms else compute)
    return [
        moment(entry.kept, entry.logits + given, nothing),
        moment(entry.kept, entry.logits + given, blocks.head_working + blocks.head * compute),
        moment(entry.kept - blocks.head_kept, left, blocks.working),
        moment(entry.kept - blocks.one_kept, left, table),
        Moment(gradients=found.after, activations=nothing, logits=nothing, buffers=entry.fixed + found.step),
    ]
