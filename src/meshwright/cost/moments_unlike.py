"""Where memory may be highest in a backward of a stage whose blocks are sharded in unlike ways.

Blocks whose parameters are freed between passes are gathered as backward comes to them, and may give back their
gradients but for a share; others keep both until their stage ends. So memory rises and falls as backward goes from one
run of layers to the next, and each run is looked at where it begins and where it ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from meshwright.cost.holding import Moment, StageHeld
from meshwright.cost.moments_eager import EagerMoments
from meshwright.cost.peak_parts import Beside
from meshwright.cost.told import Told, experts_grown
from meshwright.cost.unlike import End, LayerRun, Unlike
from meshwright.cost.work import FloatArray

_OF_LAYER = ("working", "ending", "mixing", "largest", "largest_made", "largest_kept", "closing", "formed")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Behind:
    """What backward has passed, shape (rows, ranks): trained parameters, bytes of gradients that have come, of whole
    parameters that are gone and of activations, and those of the last unit's gradients, on their way."""

    made: FloatArray
    grown: FloatArray
    freed: FloatArray
    kept: FloatArray
    flying: FloatArray


class UnlikeMoments(EagerMoments):
    """The moments of a backward of rows whose stages have blocks that are sharded in unlike ways."""

    def backward(self, at: Beside) -> Iterator[Moment]:
        """The head's moments where a stage has one, those of every run of layers, and the table's."""
        stage, unlike = at.stage, _of(at.stage)
        head = self._under(unlike.head)
        buffers = self.fixed + at.sends + self._root(stage)
        told = Told(at, buffers, grown=head._grown(at), freed=head._freed(at))
        if stage.head.any():
            yield self._loss(at, told)
            product, formed, reduced = head._head(at, told)
            ahead = np.where(self.splits, 0.0, self._ahead(stage))
            yield from (replace(moment, buffers=moment.buffers + ahead) for moment in (product, formed))
            yield reduced
            if self.way is not None:
                yield head._head_out(at, head._at_end(at), self.way)
        # A tied head is in the stage's root, whose gradients and parameters go last.
        alone = np.where(self._in_root(stage), 0.0, stage.head_made)
        behind = _Behind(
            made=alone,
            grown=head._grown(at) * alone,
            freed=head._freed(at) * alone,
            kept=stage.head_kept + 0.0 * alone,
            flying=head._flies(at) * alone,
        )
        buffers = buffers + np.where(stage.tied > 0.0, self.compute * stage.head_made, 0.0)
        for run, after in zip(unlike.runs, self._after(stage), strict=True):
            own = self._under(run)
            yield from own._run(at, run, behind, after=after, buffers=buffers)
            behind = own._passed(at, run, behind)
        if stage.embedding.any() or stage.tied.any():
            table = self._under(unlike.table)
            root = head if stage.tied.any() else table
            yield from root._end(at, behind, buffers=self.fixed + at.sends + self._root(stage))

    def _run(
        self, at: Beside, run: LayerRun, behind: _Behind, *, after: FloatArray, buffers: FloatArray
    ) -> Iterator[Moment]:
        """The first layer's backward and its reduction, the last one's, and in between the second one's, which has a
        layer on both sides; `after` are bytes of the unit that follows the run, gathered ahead."""
        stage = replace(at.stage, **{name: getattr(run, name) for name in _OF_LAYER})
        inside = replace(at, stage=stage, here=at.here & (run.number > 0.0))
        grown, freed, several = self._grown(at), self._freed(at), run.number > 1.0
        own, left = self.gathered * run.largest, at.logits - at.stage.one_logits
        layer = own + self._layer(inside) + buffers
        reduces = self._reducing(run.largest_made, run.closing, inside) + buffers
        ahead = np.where(several, own, after)

        def moment(done: FloatArray, dropped: FloatArray, kept: FloatArray, held: FloatArray) -> Moment:
            return Moment(
                gradients=at.gradients
                + behind.grown
                + grown * done * run.largest_made
                + experts_grown(at, behind.made + done * run.largest_made),
                activations=np.maximum(at.kept - behind.kept - kept * run.largest_kept, 0.0),
                logits=left,
                buffers=held + self._gone(at, behind.made + done * run.largest_made),
                freed=at.freed + behind.freed + freed * dropped * run.largest_made,
                here=inside.here,
            )

        none, one, all_ = 0.0 * run.number, 1.0 + 0.0 * run.number, run.number
        own_flying = self._flies(at) * run.largest_made
        flying = np.where(several, own_flying, behind.flying)
        yield moment(none, none, none, layer + ahead + behind.flying)
        yield moment(none, one, one, reduces + np.where(self.splits, 0.0, ahead))
        yield replace(moment(one, one, one, layer + own + own_flying), here=inside.here & (run.number > 2.0))
        yield moment(all_ - 1.0, all_ - 1.0, all_ - 1.0, layer + after + flying)
        yield moment(all_ - 1.0, all_, all_, reduces + np.where(self.splits, 0.0, after))
        if self.way is not None:
            out = run.largest_made * self._summed(inside) + self.way.layer + buffers
            first = moment(none, one, one, out + np.where(self.splits, 0.0, ahead))
            last = moment(all_ - 1.0, all_, all_, out + np.where(self.splits, 0.0, after))
            yield from (replace(entry, here=inside.here & at.ends) for entry in (first, last))

    def _passed(self, at: Beside, run: LayerRun, behind: _Behind) -> _Behind:
        """As `behind`, the run with it."""
        made = run.number * run.largest_made
        return _Behind(
            made=behind.made + made,
            grown=behind.grown + self._grown(at) * made,
            freed=behind.freed + self._freed(at) * made,
            kept=behind.kept + run.number * run.largest_kept,
            flying=np.where(run.number > 0.0, self._flies(at) * run.largest_made, behind.flying),
        )

    def _end(self, at: Beside, behind: _Behind, *, buffers: FloatArray) -> Iterator[Moment]:
        """The table's gradient, when all else is behind."""
        unit = self._last_unit(at.stage)
        last = replace(
            at,
            stage=replace(at.stage, made=unit),
            gradients=at.gradients + behind.grown + at.apart * at.stage.experts,
            apart=0.0,
            freed=at.freed + behind.freed,
        )
        told = Told(
            last,
            buffers + self._gone(at, np.maximum(at.stage.made - unit, 0.0)),
            grown=self._grown(at),
            freed=self._freed(at),
        )
        yield self._table(last, told)
        if self.way is not None:
            yield replace(self._table_out(last, told, self.way), here=at.here & at.ends)

    def _under(self, way: LayerRun | End) -> UnlikeMoments:
        """The same of blocks that are sharded so. Where one rank has all of a block, FSDP2 divides a copy of its
        gradients by one beside those that it sends."""
        found = copy(self)
        found.gathered, found.dropped = self.compute * way.frees, self.compute * (1.0 - way.frees)
        found.sums_whole, found.divided = way.sums > 0.0, np.maximum(way.ranks, 1.0)
        found.received = np.where(found.divided > 1.0, self.received, 1.0)
        found.found = replace(self.found, share=way.share)
        return found

    def _flies(self, at: Beside) -> FloatArray:
        """Bytes per parameter of gradients that are reduced while the next unit goes back."""
        return np.where(~self.sums_whole | at.ends, self.reduced, 0.0)

    def _after(self, stage: StageHeld) -> list[FloatArray]:
        """Bytes of the unit that is gathered ahead in the last layer of every run."""
        unlike, found = _of(stage), []
        bytes_ = np.where(self._in_root(stage), 0.0, self.compute * unlike.table.frees * stage.embedding)
        for run in reversed(unlike.runs):
            found.append(bytes_)
            bytes_ = np.where(run.number > 0.0, self.compute * run.frees * run.largest, bytes_)
        return found[::-1]

    def _ahead(self, stage: StageHeld) -> FloatArray:
        found = 0.0 * stage.largest
        for run in reversed(_of(stage).runs):
            found = np.where(run.number > 0.0, self.compute * run.frees * run.largest, found)
        return found

    def _gathered_layer(self, stage: StageHeld) -> FloatArray:
        each = [self.compute * run.frees * run.largest * (run.number > 0.0) for run in _of(stage).runs]
        return np.asarray(np.max(each, axis=0), dtype=np.float64)

    def _root(self, stage: StageHeld) -> FloatArray:
        return np.where(stage.tied > 0.0, self.compute * _of(stage).head.frees * self._last_unit(stage), 0.0)


def _of(stage: StageHeld) -> Unlike:
    assert stage.unlike is not None, "rows of like blocks have EagerMoments"
    return stage.unlike
