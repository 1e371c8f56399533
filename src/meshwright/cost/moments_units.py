"""Where memory may be highest in a backward whose layers have experts that are units of their own.

Experts that are shards of other ranks than the rest of their layer are gathered apart from it. Their gradients are all
there, and reduced, before backward comes to the mixer: what is sent of them is there until the rest is reduced, which
is small beside them, and what the layer is given to the next one is that rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import numpy as np

from meshwright.cost.holding import Moment, StageHeld
from meshwright.cost.moments_eager import EagerMoments
from meshwright.cost.peak_parts import Beside, Rows
from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray
from meshwright.cost.told import Told
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind


class UnitMoments(EagerMoments):
    """The moments of a backward of rows whose experts are units of their own."""

    def __init__(self, at: Rows, *, kind: DeviceKind, software: Software) -> None:
        super().__init__(at, kind=kind, software=software)
        # Halves of backwards reduce when the other half is done, on stages that go down and up a V too.
        self.halves = self.splits | ((at.entry.waiting > 0.0) & ~at.setting.in_pairs)
        self.experts = copy(self)
        self.experts.divided, self.experts.splits = at.setting.experts_divided, self.halves

    def _layers(self, at: Beside, told: Told) -> Iterator[Moment]:
        """The first layer's backward, the second one's, when more may be on its way, the last but one's, which has
        another layer before it and no table, and the last one's."""
        stage, head, waits = at.stage, at.stage.head_made, self._waiting(at)
        behind, made = self._after_head(at), self._unit_made(stage)
        several, alone = stage.layers > 1.0, np.where(self._in_root(stage), 0.0, head)
        flies = np.where(self.sharded & (~self.sums_whole | at.ends), self.reduced, 0.0)
        inside = np.maximum(stage.made - stage.largest_made - stage.embedding, 0.0)
        rest = np.where(self.splits, 0.0, self.gathered * (stage.largest - stage.unit))
        table = np.where(self.splits, 0.0, self._table_ahead(stage))
        kept = np.where(self.splits, stage.largest_waits, stage.largest_kept)
        first = waits + stage.ahead + self._gone(at, alone)
        yield from self._layer_apart(at, told, behind, first, rest * several, flying=flies * alone, done=head)
        one = np.where(stage.layers > 2.0, stage.largest_made, 0.0)
        left = np.where(one > 0.0, one - made, 0.0)
        if (flies * left > flies * alone).any():
            second, flying = np.maximum(behind - kept * (one > 0.0), 0.0), flies * np.maximum(left, alone)
            yield from self._layer_apart(at, told, second, first, rest, flying=flying, done=head + one)
        before = np.where(several, stage.largest_made - made, alone)
        end = (
            np.maximum(at.kept - stage.one_kept, 0.0)
            + kept
            + np.where(self.splits, 0.0, stage.sent + stage.apart + stage.shared)
        )
        last = waits + self._gone(at, inside)
        less = (((table > 0.0) & (table < rest)) | (stage.ahead > 0.0)) & (one > 0.0)
        if less.any():
            done = np.maximum(inside - one, 0.0)
            held, beside = end - stage.apart + kept, last + stage.ahead
            moments = self._layer_apart(at, told, held, beside, rest, flying=flies * before, done=done)
            yield from (replace(moment, here=moment.here & less) for moment in moments)
        ahead = np.where(table > 0.0, table, rest * several)
        yield from self._layer_apart(at, told, end, last, ahead, flying=flies * before, done=inside)

    def _layer_apart(
        self,
        at: Beside,
        told: Told,
        kept: FloatArray,
        beside: FloatArray,
        ahead: FloatArray,
        *,
        flying: FloatArray,
        done: FloatArray,
    ) -> Iterator[Moment]:
        """Of a layer before which as much is `kept` and units are `done`, of the last of which bytes are `flying`: its
        experts' backward, their reduction, the mixer's backward, and the reduction of what is left. Bytes of the next
        unit are gathered `ahead` once its experts go back."""
        stage, splits = at.stage, self.splits
        made = self._unit_made(stage)
        rest = stage.largest_made - made
        both, own = (
            np.where(splits, 0.0, self.gathered * size) for size in (stage.largest, stage.largest - stage.unit)
        )
        yield from self._gathered_twice(at, told, kept, beside + both, flying=flying, done=done)
        whole, buffers = np.where(splits, self._layer(at), self._in_layer(at)), beside + ahead
        yield told.moment(kept, buffers + both + whole + flying, done=done)
        left = np.maximum(kept - np.where(splits, stage.largest_waits, stage.largest_kept), 0.0)
        giving = np.where(splits, 0.0, stage.giving + self.compute * made)
        yield told.moment(left, buffers + both + giving + flying, done=done)
        others = np.maximum(stage.layers / 2.0 - 1.0, 0.0) * (stage.largest_kept - stage.largest_waits)
        apart = np.maximum(left - np.where(self.halves & ~splits, others, 0.0), 0.0)
        given = np.where(self.halves, self.compute * rest, own + stage.given)
        reduced = self.experts._reducing(made, stage.closing, at, stays=stage.closing)
        yield told.moment(apart, buffers + given + reduced, done=done, dropped=done + made)
        sent = np.where(~self.halves & self.sharded & (~self.sums_whole | at.ends), self.reduced, 0.0) * made
        mixer = np.where(splits, 0.0, own + stage.mixing)
        unit = np.where(self.halves, 0.0, made)
        yield told.moment(left, buffers + mixer + sent, done=done, dropped=done + made, unit=unit)
        reduced = self._reducing(rest, 0.0 * rest, at)
        yield told.moment(left, buffers + reduced, unit=made, done=done, dropped=done + stage.largest_made)

    def _gathered_twice(
        self, at: Beside, told: Told, kept: FloatArray, buffers: FloatArray, *, flying: FloatArray, done: FloatArray
    ) -> Iterator[Moment]:
        """Experts whose copy that they were gathered by is there too, where they are gathered for their backward, or
        for that of a layer that is computed again."""
        if not self.gathered.any() or self.splits.all():
            return
        beside = self.gathered * at.stage.unit + at.stage.gathering + flying
        yield replace(told.moment(kept, buffers + beside, done=done), here=at.here & ~self.splits)

    def _unit_made(self, stage: StageHeld) -> FloatArray:
        return np.where(stage.largest_made > 0.0, stage.unit, 0.0)

    def _ahead(self, stage: StageHeld) -> FloatArray:
        return np.maximum(super()._ahead(stage) - self.gathered * stage.unit, 0.0)

    def _gathered_two(self, stage: StageHeld, several: BoolArray | bool) -> FloatArray:
        return self.gathered * (stage.largest + several * (stage.largest - stage.unit))

    def _freed_first(self, stage: StageHeld) -> FloatArray:
        return self.dropped * stage.unit

    def _given(self, stage: StageHeld) -> FloatArray:
        made = self._unit_made(stage)
        each = np.where(self.sums_whole, self.compute, 2.0 * self.reduced)
        return each * made + self.compute * (stage.largest_made - made)
