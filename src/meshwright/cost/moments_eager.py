"""Where memory may be highest in a step of operators that run one by one, parameters sharded by FSDP2 or whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from meshwright.cost.bucket_bytes import OnTheWay
from meshwright.cost.eager_bytes import EagerBytes
from meshwright.cost.holding import Held, Moment, StageHeld
from meshwright.cost.loss_chunks import chunks_bytes
from meshwright.cost.peak_parts import Beside
from meshwright.cost.table import BoolArray
from meshwright.cost.told import Told
from meshwright.cost.work import FloatArray


class EagerMoments(EagerBytes):
    """The moments of a backward of some rows."""

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
            if self.unsummed.any():
                # Its matrix is cast before it is gathered, and each rank has a summand of more logits than it keeps.
                summands = at.logits + self.unsummed * at.stage.one_logits
                yield early.moment(at.kept + self.copied * at.stage.head_made, 0.0 * at.kept, logits=summands)
            yield self._loss(at, early)
            yield from self._head(at, told)
        if at.follows is not None and (at.stage.making.any() or at.stage.unit.any()):
            yield from self._forward(at, told, at.follows)
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

    def _head(self, at: Beside, told: Told) -> Iterator[Moment]:
        """Its product, which lets go of what it read before its gradient is widened, and its reduction."""
        stage, head, splits = at.stage, at.stage.head_made, self.splits
        # Halves of backwards form gradients when an earlier half has let go of the rest.
        behind = np.where(splits, at.kept - stage.one_kept + at.waits, at.kept - stage.head_kept)
        left = np.where(splits, at.logits, at.logits - stage.one_logits)
        apart = np.where(self._in_root(stage), 0.0, stage.head * self.gathered)
        ahead = np.where(splits, 0.0, self._ahead(stage))
        yield told.moment(
            at.kept,
            stage.head_working + apart + ahead + np.where(splits, 0.0, head * self.compute),
            logits=at.logits - (stage.one_logits - stage.loss_logits),
        )
        whole = np.where(self.sharded, 0.0, head)
        yield told.moment(behind, stage.head_working + head * self._forming(at), logits=left, done=whole)
        alone = np.where(self._in_root(stage), 0.0, head)
        reduced = self._reducing(alone, alone, at, alone=True)
        # What it read has its gradient; of halves the earlier one has sent that.
        reads = np.where(splits, 0.0, stage.entered)
        yield told.moment(behind, ahead + reduced + reads, dropped=alone)

    def _forward(self, at: Beside, told: Told, follows: BoolArray) -> Iterator[Moment]:
        """The last layer's forward, where that is just done: once its experts are, and while they multiply, when what
        they were gathered by is there too."""
        stage, here = at.stage, at.here & follows
        gathered = self._gathered_layer(stage)
        for beside in (stage.making, stage.inside + self.gathered * stage.unit):
            yield replace(told.moment(at.kept - stage.head_kept, gathered + beside), here=here)

    def _layers(self, at: Beside, told: Told) -> Iterator[Moment]:
        """The first layer's backward and its reduction, the second one's, when more may be on its way, and the last."""
        stage, head, waits = at.stage, at.stage.head_made, self._waiting(at)
        behind, others = self._after_head(at), np.maximum(at.kept - stage.one_kept, 0.0)
        kept = np.where(self.splits, stage.largest_waits, stage.largest_kept)
        end = others + np.where(self.splits, 0.0, stage.sent + stage.apart + stage.shared)
        inside = np.maximum(stage.made - stage.largest_made - stage.embedding, 0.0)
        flies = np.where(self.sharded & (~self.sums_whole | at.ends), self.reduced, 0.0)
        # The layer whose backward comes next is gathered meanwhile, and what it kept comes back.
        several = stage.layers > 1.0
        gathered = np.where(self.splits, 0.0, self.gathered * stage.largest)
        layer = gathered + self._layer(at) + waits
        latest = np.where(stage.experts > 0.0, 0.0, stage.closing)
        reduces = waits + self._reducing(stage.largest_made, latest, at)
        alone = np.where(self._in_root(stage), 0.0, head)
        ahead = gathered * several + stage.ahead
        yield told.moment(behind, layer + ahead + flies * alone + self._gone(at, alone), done=head)
        yield told.moment(
            np.maximum(behind - kept, 0.0),
            gathered + stage.ahead + reduces + self._gone(at, alone),
            done=head,
            dropped=head + stage.largest_made,
        )
        one = np.where(stage.layers > 2.0, stage.largest_made, 0.0)
        larger = at.here & (flies * one > flies * alone)
        if larger.any():
            second = told.moment(
                np.maximum(behind - kept * (one > 0.0), 0.0),
                layer + ahead + flies * np.maximum(one, alone) + self._gone(at, alone + one),
                done=head + one,
            )
            yield replace(second, here=larger)
        before = np.where(several, stage.largest_made, alone)
        gone = self._gone(at, inside)
        table = np.where(self.splits, 0.0, self._table_ahead(stage))
        less = (((table > 0.0) & (table < gathered)) | (stage.ahead > 0.0)) & (stage.layers > 2.0)
        if less.any():
            last_but_one = told.moment(
                end - stage.apart + 2.0 * kept,
                layer + gathered + stage.ahead + flies * before + self._gone(at, inside - stage.largest_made),
                done=np.maximum(inside - stage.largest_made, 0.0),
            )
            yield replace(last_but_one, here=last_but_one.here & less)
        ahead = np.where(table > 0.0, table, gathered * several)
        yield told.moment(end + kept, layer + ahead + flies * before + gone, done=inside)
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
        own = np.where(at.up, self.first_kept, stage.one_kept)
        return told.moment(
            np.maximum(at.kept - own, 0.0) + passed,
            np.where(self.sharded, reduced, whole) + self._gone(at, np.maximum(stage.made - unit, 0.0)),
            logits=np.where(at.up, at.logits, told.left),
            done=np.maximum(stage.made - unit - at.done, 0.0),
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
            if own.head.any():
                meeting += self._head_half(own, waits)
        if not entry.alone.any():
            return [step, *meeting]
        stage = entry.all_stages
        layer = self._gathered_two(stage, True) + stage.working
        gradients = np.where(entry.goes_on, self.found.summed, self.found.before)
        buffers = self.fixed + stage.sends + self._root(stage) + layer
        here = entry.alone > 0.0
        alone = Moment(gradients=gradients, activations=entry.alone, logits=nothing, buffers=buffers, here=here)
        return [step, *meeting, alone]

    def _head_half(self, own: StageHeld, waits: Moment) -> list[Moment]:
        """The head's half, which comes first of all that `waits`: it reads the gradient of the logits, and where that
        is sharded its own is reduced then. Of pairs few have halves, and those when little else is there."""
        fixed, here = self.fixed + own.sends, waits.here & (own.head > 0.0) & ~self.pairs
        given = self.compute + np.where(self.sharded, self.compute, self.master)
        formed = replace(waits, logits=own.one_logits, buffers=fixed + own.head_made * given, here=here)
        sent = self.reduced * (2.0 + 1.0 / self.divided)
        behind = np.maximum(waits.activations - own.head_waits, 0.0)
        reduced = replace(waits, activations=behind, buffers=fixed + own.head_made * sent)
        return [formed, replace(reduced, here=here & self.sharded & ~self.sums_whole)]

    def _loss(self, at: Beside, told: Told) -> Moment:
        """Forward where that is just done, and backward. A cap gives the gradient of its input beside what it kept. A
        loss of torch's own has beside the log-softmax the gradients of it and of the logits, in fp32 too."""
        stage = at.stage
        forward, back = chunks_bytes(stage.loss_logits / self.compute, self.compute, kind=self.kind)
        chunk = back if at.follows is None else np.where(at.follows, forward, back)
        chunk = np.maximum(chunk, np.where(stage.one_logits > stage.loss_logits, stage.loss_logits, 0.0))
        more = chunk if self.software.fused_loss else 2.0 * stage.one_logits
        return told.moment(at.kept, 0.0 * more, logits=at.logits + more)


def _begun(entry: Held) -> FloatArray | float:
    """Bytes of slices beside mean ones before any has gone back."""
    return 0.0 if entry.sliced is None else entry.sliced.first.beside
