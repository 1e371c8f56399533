"""Where memory may be highest in a backward whose layers have experts that are units of their own.

Experts that are shards of other ranks than the rest of their layer are gathered apart from it. Their gradients are all
there, and reduced, before backward comes to the mixer: what is sent of them is there until the rest is reduced, which
is small beside them, and what the layer is given to the next one is that rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy

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
        self.experts = copy(self)
        self.experts.divided = at.setting.experts_divided
        # Halves of backwards reduce when the other half is done, on stages that go down and up a V too.
        self.halves = self.splits | ((at.entry.waiting > 0.0) & ~at.setting.in_pairs)

    def _layers(self, at: Beside, told: Told) -> Iterator[Moment]:
        """The first layer's backward, and the last one's: its experts', their reduction, the mixer's, and what is left
        to reduce."""
        stage, head, waits = at.stage, at.stage.head_made, self._waiting(at)
        others = np.maximum(at.kept - stage.one_kept, 0.0)
        several, alone = stage.layers > 1.0, np.where(self._in_root(stage), 0.0, head)
        flies = np.where(self.sharded & (~self.sums_whole | at.ends), self.reduced, 0.0)
        inside = np.maximum(stage.made - stage.largest_made - stage.embedding, 0.0)
        rest = np.where(self.splits, 0.0, self.gathered * (stage.largest - stage.unit))
        table = np.where(self.splits, 0.0, self._table_ahead(stage))
        first = waits + stage.ahead + self._gone(at, alone) + rest * several
        kept = np.where(self.splits, stage.largest_waits, stage.largest_kept)
        yield from self._layer_apart(at, told, self._after_head(at), buffers=first, flying=flies * alone, done=head)
        one = np.where(stage.layers > 2.0, stage.largest_made, 0.0)
        rest_made = np.where(one > 0.0, one - self._unit_made(stage), 0.0)
        if (flies * rest_made > flies * alone).any():
            second = np.maximum(self._after_head(at) - kept * (one > 0.0), 0.0)
            flying = flies * np.maximum(rest_made, alone)
            yield from self._layer_apart(at, told, second, buffers=first, flying=flying, done=head + one)
        before = np.where(several, stage.largest_made - self._unit_made(stage), alone)
        end = others + kept + np.where(self.splits, 0.0, stage.sent + stage.apart)
        last = waits + self._gone(at, inside) + np.where(table > 0.0, table, rest * several)
        yield from self._layer_apart(at, told, end, buffers=last, flying=flies * before, done=inside)

    def _layer_apart(
        self,
        at: Beside,
        told: Told,
        kept: FloatArray,
        *,
        buffers: FloatArray,
        flying: FloatArray,
        done: FloatArray,
    ) -> Iterator[Moment]:
        """Of a layer before which as much is `kept` and units are `done`, of the last of which bytes are `flying`."""
        stage, splits = at.stage, self.splits
        unit, made = stage.unit, self._unit_made(stage)
        rest, rest_made = stage.largest - unit, stage.largest_made - made
        both, own = (np.where(splits, 0.0, self.gathered * size) for size in (stage.largest, rest))
        whole = np.where(splits, self._layer(at), self._in_layer(at))
        yield told.moment(kept, buffers + both + whole + flying, done=done)
        # Computed again experts are gathered by a copy, which is there until the next unit is gathered.
        twice = np.where(~splits & (stage.again > 0.0), self.gathered * (stage.largest + unit) + stage.again, 0.0)
        yield told.moment(kept, buffers + twice + flying, done=done)
        left = np.maximum(kept - np.where(splits, stage.largest_waits, stage.largest_kept), 0.0)
        giving = np.where(splits, 0.0, stage.giving + self.compute * made)
        yield told.moment(left, buffers + both + giving + flying, done=done)
        beside = np.where(self.halves, self.compute * rest_made, own + stage.given)
        reduced = self.experts._reducing(made, stage.closing, at, stays=stage.closing)
        yield told.moment(left, buffers + beside + reduced, done=done, dropped=done + made)
        sent = np.where(~self.halves & self.sharded & (~self.sums_whole | at.ends), self.reduced, 0.0) * made
        mixer = np.where(splits, 0.0, own + stage.mixing)
        yield told.moment(
            left, buffers + mixer + sent, done=done, dropped=done + made, unit=np.where(self.halves, 0.0, made)
        )
        reduced = self._reducing(rest_made, 0.0 * rest_made, at)
        yield told.moment(left, buffers + reduced, unit=made, done=done, dropped=done + stage.largest_made)

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
