"""What a backward of operators that run one by one has in its moments: what is gathered, formed, reduced and freed."""

from __future__ import annotations

import numpy as np

from meshwright.cost.bucket_bytes import pieces
from meshwright.cost.holding import StageHeld
from meshwright.cost.peak_parts import Beside, Rows
from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind


class EagerBytes:
    """Bytes of some rows whose parameters are sharded by FSDP2 or whole, shape (rows, ranks)."""

    def __init__(self, at: Rows, *, kind: DeviceKind, software: Software) -> None:
        setting = at.setting
        self.found, self.fixed, self.kind, self.software = at.found, at.entry.fixed, kind, software
        self.way, self.made = at.way, np.maximum(at.entry.all_stages.made, 1.0)
        self.master, self.compute, self.reduced = setting.master, setting.compute, setting.reduced
        self.sharded, self.sums_whole, self.divided = setting.sharded, setting.sums_whole, setting.divided
        self.gathered, self.dropped = setting.gathered, setting.dropped
        self.pairs, self.first_kept = setting.in_pairs, at.entry.first_kept
        self.unsummed = setting.unsummed
        self.narrow, self.copied, self.splits, self.read = setting.narrow, setting.copied, setting.splits, setting.read
        plain = 1.0 if kind is DeviceKind.CPU else 0.0
        # What came rounded is there beside what it is in full.
        self.received = np.where(setting.rounded > 0.0, 1.0 + setting.rounded / setting.reduced, plain)

    def _gone(self, at: Beside, done: FloatArray) -> FloatArray:
        """Bytes of buckets under way when units that are `done` have their gradients in a stage's last backward; those
        of stages that ended before have come."""
        if self.way is None:
            return np.zeros_like(done)
        return np.where(at.ends, self.way.sent * np.minimum(done / self.made, 1.0), 0.0)

    def _summed(self, at: Beside, *, alone: BoolArray | bool = False) -> FloatArray:
        """Bytes of a parameter of a sharded unit whose gradients are summed, beside sums that are whole: what is sent,
        and this rank's part. Where it is `alone` in its unit it has its gradient until then (FSDP2 lets go of all but
        the last, and of all where one rank has the whole)."""
        summed, alone = at.sums & self.sums_whole, alone & (self.divided > 1.0)
        given = np.where(alone, np.where(self.splits, self.reduced, self.compute), 0.0)
        kept = np.where(summed, np.where(alone, 0.0, -self.reduced), given)
        return np.where(self.sharded, self.reduced * (1.0 + 1.0 / self.divided) + kept, 0.0)

    def _waiting(self, at: Beside) -> FloatArray:
        """Bytes of gradients of a tied head and of a table that wait until layers are done."""
        stage, waits = at.stage, self._table_waits(at)
        if not stage.tied.any():
            return waits
        tied = np.where(self.sharded, self.compute * stage.head_made, self._tied(at))
        return waits + np.where(stage.tied > 0.0, tied, 0.0)

    def _table_waits(self, at: Beside) -> FloatArray:
        """Bytes of a table's gradient, which comes with the inputs' and is reduced when the matrices' are formed."""
        if not self.splits.any():
            return np.zeros_like(at.kept)
        alone = self.splits & self.sharded & ~(at.sums & self.sums_whole)
        return np.where(alone, self.reduced * at.stage.embedding, 0.0)

    def _after_head(self, at: Beside) -> FloatArray:
        """Bytes of activations when the head is done; of halves of backwards those between them are left, which form
        gradients when earlier ones have let go of the rest."""
        stage = at.stage
        halved = at.kept - stage.one_kept + at.waits - stage.head_waits
        return np.where(self.splits, halved, at.kept - stage.head_kept)

    def _grown(self, at: Beside) -> FloatArray:
        """Bytes of gradients per parameter that are there once its unit is done, beyond those before."""
        after = np.where(self.sharded, self.master * self.found.share, self.master)
        sums = np.where(self.sums_whole, self.master, after)
        return np.where(at.ends, after, sums) - np.where(at.sums, sums, 0.0)

    def _beyond(self, at: Beside) -> FloatArray | float:
        """As `_grown`, of units of experts beyond the rest."""
        if not np.any(self.found.beyond):
            return 0.0
        left = np.where(self.sharded & (at.ends | ~self.sums_whole), self.found.beyond, 0.0)
        return left - np.where(self.sharded & at.sums & ~self.sums_whole, self.found.beyond, 0.0)

    def _freed(self, at: Beside) -> FloatArray:
        """Bytes of whole parameters that a unit gives back when its gradients are there."""
        return np.where(at.ends, self.dropped, 0.0)

    def _ahead(self, stage: StageHeld) -> FloatArray:
        """Bytes of the layer before the head, which is gathered while the head goes back."""
        return self.gathered * stage.behind_head

    def _table_ahead(self, stage: StageHeld) -> FloatArray:
        """Bytes of a table that is gathered while the last layer goes back."""
        return np.where(self._in_root(stage), 0.0, self.gathered * stage.embedding)

    def _gathered_layer(self, stage: StageHeld) -> FloatArray:
        """The most bytes of a layer that is gathered for a pass."""
        return self.gathered * stage.largest

    def _gathered_two(self, stage: StageHeld, several: BoolArray | bool) -> FloatArray:
        """Bytes of a layer that is gathered for a pass and, of `several`, of the one that is gathered meanwhile."""
        return self._gathered_layer(stage) * (1.0 + several)

    def _freed_first(self, stage: StageHeld) -> FloatArray:
        """Bytes of the whole parameters that are gone when a layer's first gradients are reduced."""
        return self.dropped * stage.largest

    def _given(self, stage: StageHeld) -> FloatArray:
        """Bytes of a layer's gradients as halves of backwards give them and as they are sent."""
        each = np.where(self.sums_whole, self.compute, 2.0 * self.reduced)
        return each * stage.largest_made

    def _root(self, stage: StageHeld) -> FloatArray:
        """A stage with a tied head gathers what no layer holds once, and reduces its gradients last."""
        return np.where(stage.tied > 0.0, self.gathered * self._last_unit(stage), 0.0)

    def _in_root(self, stage: StageHeld) -> BoolArray:
        return (stage.tied > 0.0) & self.sharded

    def _last_unit(self, stage: StageHeld) -> FloatArray:
        together = np.maximum(stage.embedding, stage.tied) + stage.head_own
        return np.where(self._in_root(stage), together, stage.embedding)

    def _tied(self, at: Beside) -> FloatArray:
        """A tied head's part of a table's whole gradient waits for the other one, where others are there already."""
        return np.where(at.sums, self.master * np.minimum(at.stage.embedding, at.stage.tied), 0.0)

    def _forming(self, at: Beside) -> FloatArray:
        """Bytes per parameter of a gradient that is formed, beside the one that stays: as the product gives it, and
        in the master's precision before it is added; of a half of a backward what it gave and the copy that stays."""
        whole = self.narrow + np.where(at.sums, self.master, 0.0)
        given = np.where(self.splits, 2.0 * self.compute, self.compute)
        return np.asarray(np.where(self.sharded, given, whole))

    def _layer(self, at: Beside) -> FloatArray:
        """Bytes of a layer's backward: when its last product has given both gradients, of which the matrix's is added
        or stays, or its experts have given all of theirs; when it has most of its own; and, of a unit that is reduced
        whole, when it comes to the mixer. Where halves form gradients, one matrix's or one set of experts'."""
        stage = at.stage
        of_unit = np.where(stage.unit > 0.0, self.compute * stage.unit - stage.largest_kept, 0.0)
        whole = np.maximum(self._in_layer(at), stage.mixing + of_unit)
        half = stage.closing * self._forming(at) + self.compute * (stage.closing - stage.formed)
        return np.where(self.splits, half, whole)

    def _in_layer(self, at: Beside) -> FloatArray:
        """Bytes of a layer's backward before it comes to the mixer."""
        stage = at.stage
        whole_ones = ~self.sharded | (stage.experts > 0.0)
        both = np.where(whole_ones, self.master + self.narrow - self.copied, self.compute)
        stays = np.where(self.sharded, self.compute, np.where(at.sums, 0.0, self.master) - self.copied)
        return np.maximum(stage.ending + both * stage.closing, stage.working + stays * stage.formed)

    def _reducing(
        self,
        parameters: FloatArray,
        latest: FloatArray,
        at: Beside,
        *,
        alone: BoolArray | bool = False,
        stays: FloatArray | float = 0.0,
    ) -> FloatArray:
        """Bytes of a unit whose gradients are reduced, beside sums that are whole: as backward gave them beside the
        copy that is sent, then that copy beside this rank's part and, rounded or on processors, what is received; what
        was rounded is read a piece at a time; of parameters whose gradient `stays` meanwhile that too. Halves of
        backwards give it in the precision that travels. Where sums are whole until a stage `ends`, gradients are added
        to them or, the `latest` parameter's last, become them.
        """
        if not self.sharded.any():
            return np.zeros_like(parameters)
        given = np.where(at.sums & self.sums_whole, 0.0, np.where(self.splits, self.reduced, self.compute))
        sent = parameters * (self._summed(at, alone=alone) + self.reduced * self.received) + given * stays
        if self.read.any():
            processor = self.kind is DeviceKind.CPU
            sent = sent + self.read * pieces(parameters / self.divided, processor=processor)
        sends = np.maximum(parameters * (given + self.reduced), sent)
        widens = (self.compute < self.reduced) & ~at.sums
        kept = np.where(widens, self.reduced * parameters + self.compute * latest, self.compute * parameters)
        return np.asarray(np.where(self.sharded, np.where(self.sums_whole & ~at.ends, kept, sends), 0.0))
