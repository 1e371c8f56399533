"""Where memory may be highest in a step of operators that run one by one, parameters sharded by FSDP2 or whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.bucket_bytes import OnTheWay, pieces
from meshwright.cost.holding import Held, Moment, StageHeld
from meshwright.cost.peak_parts import Beside, Rows
from meshwright.cost.software import Software
from meshwright.cost.table import BoolArray
from meshwright.cost.told import Told
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind

# The loss of nn reads logits in chunks of so many elements (nn/loss.py).
_CHUNK_ELEMENTS = {DeviceKind.CPU: 2.0**20}
_ACCELERATOR_CHUNK_ELEMENTS = 2.0**26


class EagerMoments:
    """The moments of a backward of some rows."""

    def __init__(self, at: Rows, *, kind: DeviceKind, software: Software) -> None:
        setting = at.setting
        self.found, self.fixed, self.kind, self.software = at.found, at.entry.fixed, kind, software
        self.way, self.made = at.way, np.maximum(at.entry.all_stages.made, 1.0)
        self.master, self.compute, self.reduced = setting.master, setting.compute, setting.reduced
        self.sharded, self.sums_whole, self.divided = setting.sharded, setting.sums_whole, setting.divided
        self.gathered, self.dropped = setting.gathered, setting.dropped
        self.narrow, self.copied, self.splits, self.read = setting.narrow, setting.copied, setting.splits, setting.read
        plain = 1.0 if kind is DeviceKind.CPU else 0.0
        # What came rounded is there beside what it is in full.
        self.received = np.where(setting.rounded > 0.0, 1.0 + setting.rounded / setting.reduced, plain)

    def backward(self, at: Beside) -> Iterator[Moment]:
        """The head's moments where a stage has one, layers', and the table's."""
        root, grown, freed = self._root(at.stage), self._grown(at), self._freed(at)
        beyond = self._beyond(at)
        told = Told(at, self.fixed + at.sends + root, grown=grown, freed=freed, beyond=beyond)
        early = told
        if self.splits.any():
            sends = np.where(self.splits, at.stage.half_sends, at.sends)
            early = Told(at, self.fixed + sends + root, grown=grown, freed=freed, beyond=beyond)
        if at.stage.head.any():
            yield self._loss(at, early)
            yield from self._head(at, told)
        if at.stage.largest.any():
            yield from self._layers(at, told)
            if self.splits.any():
                yield from self._layers_before(at, early)
        if at.stage.embedding.any() or at.stage.tied.any():
            yield self._table(at, told)
        if self.way is not None and (at.here & at.ends).any():
            yield from self._setting_out(at, self.way)

    def _setting_out(self, at: Beside, way: OnTheWay) -> Iterator[Moment]:
        """Buckets of gradients set out: that of the head, of the first layer and of the last one, and of the table; and
        all of them come, beside what stages that end later keep."""
        told = self._at_end(at)
        stage, head = at.stage, np.where(self._in_root(at.stage), 0.0, at.stage.head_made)
        if stage.head.any():
            yield self._head_out(at, told, way)
        if stage.largest.any():
            behind, others = at.kept - stage.head_kept, np.maximum(at.kept - stage.one_kept, 0.0)
            yield told.moment(
                np.maximum(behind - stage.largest_kept, 0.0),
                np.where(self.sharded & ~self.splits, self.gathered * stage.largest + stage.ahead, 0.0)
                + stage.largest_made * self._summed(at)
                + way.layer
                + self._gone(at, head),
                done=head,
                dropped=head + stage.largest_made,
            )
            inside = np.maximum(stage.made - stage.largest_made - self._last_unit(stage), 0.0)
            yield told.moment(
                others + stage.sent + stage.entered,
                stage.largest_made * self._summed(at) + way.layer + self._gone(at, inside),
                done=inside,
                dropped=inside + stage.largest_made,
            )
        if stage.embedding.any() or stage.tied.any():
            yield self._table_out(at, told, way)
        yield told.moment(np.maximum(at.kept - stage.one_kept, 0.0), way.early, done=stage.made)

    def _at_end(self, at: Beside) -> Told:
        """Of a backward that ends its stage, the only one that is told."""
        ending = replace(at, here=at.here & at.ends)
        grown, freed, beyond = self._grown(at), self._freed(at), self._beyond(at)
        return Told(ending, self.fixed + at.sends + self._root(at.stage), grown=grown, freed=freed, beyond=beyond)

    def _head_out(self, at: Beside, told: Told, way: OnTheWay) -> Moment:
        """The head's gradient is there; where it is sharded, what it was summed from too."""
        stage, splits = at.stage, self.splits
        behind = np.where(splits, at.kept - stage.one_kept + at.waits, at.kept - stage.head_kept)
        alone = np.where(self._in_root(stage), 0.0, stage.head_made)
        summed = np.where(splits, 0.0, self._ahead(stage)) + alone * self._summed(at, alone=True)
        logits = np.where(splits & ~self.sharded, at.logits, at.logits - stage.one_logits)
        whole = np.where(self.sharded, 0.0, stage.head_made)
        return told.moment(
            behind,
            np.where(self.sharded, summed, stage.head_working) + way.head,
            logits=logits,
            done=whole,
            dropped=alone,
        )

    def _table_out(self, at: Beside, told: Told, way: OnTheWay) -> Moment:
        """As the head's, when all else is on its way."""
        stage = at.stage
        unit = self._last_unit(stage)
        others, summed = np.maximum(stage.made - unit, 0.0), unit * self._summed(at, alone=stage.tied == 0.0)
        return told.moment(
            np.maximum(at.kept - stage.one_kept, 0.0) + stage.sent + stage.entered,
            np.where(self.sharded, summed, 0.0) + way.table + self._gone(at, others),
            done=np.where(self.sharded, others, stage.made),
            dropped=stage.made,
        )

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

    def _head(self, at: Beside, told: Told) -> Iterator[Moment]:
        """Its product, which lets go of what it read before its gradient is widened, and its reduction."""
        stage, head, splits = at.stage, at.stage.head_made, self.splits
        # Halves of backwards form gradients when an earlier half has let go of the rest.
        behind = np.where(splits, at.kept - stage.one_kept + at.waits, at.kept - stage.head_kept)
        left = np.where(splits, at.logits, at.logits - stage.one_logits)
        apart = np.where(self._in_root(stage), 0.0, stage.head * self.gathered)
        yield told.moment(
            at.kept,
            stage.head_working + apart + np.where(splits, 0.0, head * self.compute),
            logits=at.logits - (stage.one_logits - stage.loss_logits),
        )
        whole = np.where(self.sharded, 0.0, head)
        yield told.moment(behind, stage.head_working + head * self._forming(at), logits=left, done=whole)
        alone = np.where(self._in_root(stage), 0.0, head)
        reduced = self._reducing(alone, alone, at, alone=True)
        ahead = np.where(splits, 0.0, self._ahead(stage))
        yield told.moment(behind, ahead + reduced, dropped=alone)

    def _layers(self, at: Beside, told: Told) -> Iterator[Moment]:
        """The first layer's backward and its reduction, and the last one's."""
        stage, head, waits = at.stage, at.stage.head_made, self._waiting(at)
        behind, others = self._after_head(at), np.maximum(at.kept - stage.one_kept, 0.0)
        kept = np.where(self.splits, stage.largest_waits, stage.largest_kept)
        end = others + np.where(self.splits, 0.0, stage.sent + stage.apart)
        inside = np.maximum(stage.made - stage.largest_made - stage.embedding, 0.0)
        flies = np.where(self.sharded & (~self.sums_whole | at.ends), self.reduced, 0.0)
        # The layer whose backward comes next is gathered meanwhile, and what it kept comes back.
        several = stage.layers > 1.0
        gathered = np.where(self.splits, 0.0, self.gathered * stage.largest)
        layer = gathered * (1.0 + several) + self._layer(at) + waits
        latest = np.where(stage.experts > 0.0, 0.0, stage.closing)
        reduces = waits + self._reducing(stage.largest_made, latest, at)
        alone = np.where(self._in_root(stage), 0.0, head)
        yield told.moment(behind, layer + stage.ahead + flies * alone + self._gone(at, alone), done=head)
        yield told.moment(
            np.maximum(behind - kept, 0.0),
            gathered + stage.ahead + reduces + self._gone(at, alone),
            done=head,
            dropped=head + stage.largest_made,
        )
        before = np.where(several, stage.largest_made, alone)
        gone = self._gone(at, inside)
        yield told.moment(end + kept, layer + flies * before + gone, done=inside)
        end = others + np.where(self.splits, 0.0, stage.sent + stage.entered)
        yield told.moment(end, reduces + gone, done=inside, dropped=inside + stage.largest_made)

    def _layers_before(self, at: Beside, told: Told) -> Iterator[Moment]:
        """The same of the half that gives the input's gradient: what the other half reads of blocks behind stays."""
        stage, several = at.stage, at.stage.layers > 1.0
        here, scored = at.here & self.splits, at.logits - (stage.one_logits - stage.loss_logits)
        own = np.where(self.sharded, 0.0, self.copied)
        # A matrix's own copy goes with its product, of which the last one is behind.
        layer = self._gathered_two(stage, several) + stage.half - own * stage.formed
        begins = at.kept - stage.head_kept + stage.head_waits
        ends = at.kept - stage.one_kept + at.waits + stage.largest_kept - stage.largest_waits
        for kept, buffers in ((begins, layer + stage.ahead), (ends + stage.sent + stage.apart, layer)):
            yield replace(told.moment(kept, buffers, logits=scored), here=here)
        if stage.embedding.any():
            left = np.maximum(at.kept - stage.one_kept, 0.0) + at.waits + stage.sent + stage.entered
            table = self.compute * stage.embedding + self._table_waits(at)
            yield replace(told.moment(left, table), here=here & self.sharded)

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

    def _table(self, at: Beside, told: Told) -> Moment:
        """The table's gradient is made whole; a tied head's part of it waits, and the sum of both is a third one."""
        stage = at.stage
        both = 2.0 * self.master * np.minimum(stage.embedding, stage.tied)
        whole = np.where(both > 0.0, both, stage.embedding * self._forming(at))
        whole = whole + np.where(at.sums, 0.0, self.master * stage.embedding)
        unit = self._last_unit(stage)
        reduced = self._reducing(unit, unit, at, alone=stage.tied == 0.0)
        # What waits is there when the table's gradient comes, and is gone when the last unit is reduced.
        passed = np.where(self.sharded & self.splits, 0.0, at.waits + stage.sent + stage.entered)
        return told.moment(
            np.maximum(at.kept - stage.one_kept, 0.0) + passed,
            np.where(self.sharded, reduced, whole) + self._gone(at, np.maximum(stage.made - unit, 0.0)),
            done=np.maximum(stage.made - unit, 0.0),
            dropped=stage.made,
        )

    def full(self, entry: Held) -> Moment:
        """As much is held as ever, before any gradient."""
        before = self.found.before
        return Moment(gradients=before, activations=entry.kept + _begun(entry), logits=entry.logits, buffers=self.fixed)

    def others(self, entry: Held) -> list[Moment]:
        """A layer's backward when as much as ever is held on stages without the head, and the optimizer's step, when
        nothing else is there."""
        nothing = np.zeros_like(entry.kept)
        step = Moment(
            gradients=self.found.after,
            activations=nothing,
            logits=nothing,
            buffers=self.fixed + self.found.step,
            freed=self.found.gathered,
        )
        meeting = [] if self.way is None else [replace(step, buffers=self.fixed + self.way.after)]
        if entry.waiting.any():
            # The layer whose half is last has all that it keeps, and nothing yet that waits.
            own = entry.all_stages
            left = Moment(
                gradients=self.found.summed,
                activations=np.maximum(entry.waiting + own.largest_kept - own.largest_waits, 0.0),
                logits=nothing,
                buffers=self.fixed + own.sends + own.half + self._gathered_layer(own),
                here=entry.waiting > 0.0,
            )
            # Then that layer's gradients, as its half gave them and as they are sent, beside what others left.
            sent = np.where(self.sharded, self._given(own), 0.0)
            reduced = replace(
                left,
                activations=np.maximum(entry.waiting - own.largest_waits, 0.0),
                buffers=self.fixed + own.sends + sent,
                freed=np.where(entry.waits_last, self._freed_first(own), 0.0),
                here=left.here & (sent > 0.0),
            )
            formed = np.where(self.sharded, self.compute * own.largest_made, 0.0)
            waits = replace(left, activations=entry.waiting, buffers=self.fixed + own.sends + formed)
            meeting = [*meeting, left, waits, reduced]
        if not entry.alone.any():
            return [step, *meeting]
        stage = entry.all_stages
        layer = self._gathered_two(stage, True) + stage.working
        gradients = np.where(entry.goes_on, self.found.summed, self.found.before)
        buffers = self.fixed + stage.sends + self._root(stage) + layer
        here = entry.alone > 0.0
        alone = Moment(gradients=gradients, activations=entry.alone, logits=nothing, buffers=buffers, here=here)
        return [step, *meeting, alone]

    def _loss(self, at: Beside, told: Told) -> Moment:
        """Forward where that is just done, and backward. A cap gives the gradient of its input beside what it kept. A
        loss of torch's own has beside the log-softmax the gradients of it and of the logits, in fp32 too."""
        stage = at.stage
        forward, back = _chunks_bytes(stage.loss_logits / self.compute, self.compute, kind=self.kind)
        chunk = back if at.follows is None else np.where(at.follows, forward, back)
        chunk = np.maximum(chunk, np.where(stage.one_logits > stage.loss_logits, stage.loss_logits, 0.0))
        more = chunk if self.software.fused_loss else 2.0 * stage.one_logits
        return told.moment(at.kept, 0.0 * more, logits=at.logits + more)

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
        stays = np.where(self.sharded, self.compute, np.where(at.sums, 0.0, self.master))
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
        was rounded is read a piece at a time; of parameters whose gradient `stays` meanwhile that too. Halves of backwards give it in the precision that travels. Where sums are
        whole until a stage `ends`, gradients are added to them or, the `latest` parameter's last, become them.
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


def _chunks_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> tuple[FloatArray, FloatArray]:
    """Copies of one chunk in the loss's forward and in its backward: in fp32 where logits are not, shifted in forward,
    and the last one until it is replaced."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    chunk, narrow = np.minimum(elements, size) * np.maximum(compute, 4.0), 1.0 * (compute < 4.0)
    again = 1.0 * (elements > size)
    return chunk * (1.0 + narrow + again), chunk * narrow * (1.0 + again)


def _begun(entry: Held) -> FloatArray | float:
    """Bytes of slices beside mean ones before any has gone back."""
    return 0.0 if entry.sliced is None else entry.sliced.first.beside
