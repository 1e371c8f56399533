"""Where memory may be highest in a step of operators that run one by one, parameters sharded by FSDP2 or whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.cost.holding import Held, Moment
from meshwright.cost.software import Software
from meshwright.cost.states import States, state_bytes
from meshwright.cost.table import SHARDINGS, BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.plan import Sharding

_ZERO1 = SHARDINGS.index(Sharding.OPTIMIZER)
_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
# The loss of nn reads logits in chunks of so many elements (nn/loss.py).
_CHUNK_ELEMENTS = {DeviceKind.CPU: 2.0**20}
_ACCELERATOR_CHUNK_ELEMENTS = 2.0**26


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """What a backward begins beside, shape (rows, ranks): `gradients`, `kept` activations and `logits`; `sums` where
    gradients are added to those of earlier microbatches."""

    gradients: FloatArray
    kept: FloatArray
    logits: FloatArray
    sums: BoolArray


class EagerMoments:
    """The moments of a step. `found` are the states, `entry` what is held whatever the moment."""

    def __init__(self, table: PlanTable, found: States, entry: Held, *, kind: DeviceKind, software: Software) -> None:
        sizes = state_bytes(table)
        self.found, self.entry, self.kind, self.software = found, entry, kind, software
        self.master, self.compute, self.reduced = (x[:, None] for x in (sizes.master, sizes.compute, sizes.reduced))
        sharding = table.sharding[:, None]
        self.sharded, self.zero1 = sharding > 0, sharding == _ZERO1
        self.gathered = np.where(sharding == _ZERO3, self.compute, 0.0)
        self.divided = np.asarray(table.divided, dtype=np.float64)[:, None]
        # A stage with a tied head gathers what no layer holds once, and reduces its gradients last.
        self.tied = (entry.tied > 0.0) & self.sharded
        together = np.where(self.tied, np.maximum(entry.embedding, entry.tied) + entry.head_own, 0.0)
        self.last_unit = np.where(self.tied, together, entry.embedding)
        self.root = self.gathered * together
        self.buffers = entry.sends + entry.fixed + self.root

    def all(self) -> list[Moment]:
        """The loss; a backward when as much as ever is held, and the one after it where the first one begins the sum
        of gradients; the end of a backward of the first stage; the last backward and the optimizer's step."""
        found, entry = self.found, self.entry
        first = _Beside(gradients=found.before, kept=entry.kept, logits=entry.logits, sums=found.before > 0.0)
        follows = entry.follows & ~first.sums
        second = _Beside(
            gradients=np.where(follows, found.summed, found.before),
            kept=np.where(follows, entry.kept - entry.one_kept, entry.kept),
            logits=np.where(follows, entry.logits - entry.one_logits, entry.logits),
            sums=first.sums | follows,
        )
        apart = self._without_head(first)
        return [self._loss(), *self._backward(first), *self._backward(second), apart, self._end(first), *self._last()]

    def _loss(self) -> Moment:
        """A cap gives the gradient of its input beside what it kept. A loss of torch's own has beside the log-softmax
        the gradients of it and of the logits, in fp32 too."""
        entry = self.entry
        chunk = _chunk_bytes(entry.loss_logits / self.compute, self.compute, kind=self.kind)
        chunk = np.maximum(chunk, np.where(entry.one_logits > entry.loss_logits, entry.loss_logits, 0.0))
        return Moment(
            gradients=self.found.before,
            activations=entry.kept,
            logits=entry.logits + (chunk if self.software.fused_loss else 2.0 * entry.one_logits),
            buffers=self.buffers,
        )

    def _backward(self, at: _Beside) -> list[Moment]:
        """The head's, its reduction, the layer's after it, one between layers, and a layer's reduction."""
        entry, made = self.entry, ~self.sharded & ~at.sums
        kept, logits = at.kept - entry.head_kept, at.logits - entry.one_logits
        between = np.maximum(kept - entry.largest_kept, 0.0)
        head = np.where(made, self.master * entry.head_made, 0.0)
        waits = np.where(self.tied, self.compute * entry.head_made, 0.0)
        layer = self.buffers + 2.0 * self.gathered * entry.largest + self.found.wire + self._layer(at) + waits
        alone = np.where(self.tied, 0.0, entry.head_made)
        flies = np.where(self.sharded & ~self.zero1, self.reduced, 0.0)

        def moment(activations: FloatArray, buffers: FloatArray, *, gradients: FloatArray | float = 0.0) -> Moment:
            return Moment(gradients=at.gradients + gradients, activations=activations, logits=logits, buffers=buffers)

        return [
            Moment(
                gradients=at.gradients + head,
                activations=at.kept,
                logits=at.logits - (entry.one_logits - entry.loss_logits),
                buffers=self.buffers
                + entry.head_working
                + np.where(self.tied, 0.0, entry.head * self.gathered)
                + entry.head_made * self._forming(at),
            ),
            moment(
                kept,
                self.buffers
                + self.gathered * entry.largest
                + self._reducing(alone, last=False, alone=True, sums=at.sums),
            ),
            moment(kept, layer + flies * alone, gradients=head),
            moment(between, layer + flies * entry.largest_made, gradients=head),
            moment(
                between,
                self.buffers
                + self.gathered * entry.largest
                + self._reducing(entry.largest_made, last=False, sums=at.sums),
            ),
        ]

    def _without_head(self, at: _Beside) -> Moment:
        """A layer's backward when as much as ever is held on stages without the head."""
        entry = self.entry
        layer = self.buffers + 2.0 * self.gathered * entry.largest + self.found.wire + self._layer(at)
        nothing = np.zeros_like(entry.kept)
        return Moment(gradients=at.gradients, activations=entry.alone, logits=nothing, buffers=layer)

    def _end(self, at: _Beside) -> Moment:
        """The table's gradient is made, and other microbatches are still under way."""
        entry, found = self.entry, self.found
        return Moment(
            gradients=np.where(at.sums, found.before, found.summed),
            activations=np.maximum(entry.after_first, 0.0),
            logits=np.maximum(entry.logits - entry.one_logits, 0.0),
            buffers=self.buffers
            + np.where(
                self.sharded, self._reducing(self.last_unit, last=False, alone=~self.tied, sums=True), self._table(at)
            ),
        )

    def _last(self) -> list[Moment]:
        """Nothing else is under way: where zero1 reduces whole gradients, the head's and a layer's; the last layer's
        backward; the table's gradient or the optimizer's step."""
        entry, found = self.entry, self.found
        nothing = np.zeros_like(entry.kept)
        one = np.maximum(np.minimum(entry.one_kept, entry.kept) - entry.head_kept, 0.0)
        sums = found.before > 0.0
        made = ~self.sharded & ~sums
        late = np.where(made, self.master * (entry.largest_made + entry.embedding - entry.closing), 0.0)
        given = np.where(self.zero1 & sums, self.master * entry.head_made * (1.0 - 1.0 / self.divided), 0.0)
        at = _Beside(gradients=found.before, kept=entry.kept, logits=nothing, sums=sums)

        def moment(gradients: FloatArray, activations: FloatArray, buffers: FloatArray) -> Moment:
            return Moment(gradients=gradients, activations=activations, logits=nothing, buffers=self.buffers + buffers)

        table = np.where(self.sharded, self._reducing(self.last_unit, last=True, alone=~self.tied), self._table(at))
        layer = 2.0 * self.gathered * entry.largest + found.wire + entry.working
        return [
            moment(found.before, one, self._reducing(entry.head_made, last=True, alone=True)),
            moment(
                found.before - given,
                np.maximum(one - entry.largest_kept, 0.0),
                self._reducing(entry.largest_made, last=True),
            ),
            moment(found.after - late, np.minimum(entry.largest_kept, entry.kept), layer),
            moment(found.after, nothing, np.maximum(table, found.step - self.root)),
        ]

    def _forming(self, at: _Beside) -> FloatArray:
        """Bytes per parameter of a gradient that is formed, beside the one that stays: as the product gives it, and
        in the master's precision before it is added."""
        whole = self._narrow + np.where(at.sums, self.master, 0.0)
        return np.asarray(np.where(self.sharded, self.compute, whole))

    @property
    def _narrow(self) -> FloatArray:
        return np.where(self.compute < self.master, self.compute, 0.0)

    def _layer(self, at: _Beside) -> FloatArray:
        """Bytes of a layer's backward: when its last product has given both gradients, of which the matrix's is added
        or stays, or its experts have given all of theirs; when it has most of its own; and, of a unit that is reduced
        whole, when it comes to the mixer."""
        entry = self.entry
        both = np.where(self.sharded, self.compute, self.master + self._narrow)
        stays = np.where(self.sharded, self.compute, np.where(at.sums, 0.0, self.master))
        return np.asarray(
            np.maximum(
                entry.ending + both * entry.closing, np.maximum(entry.working + stays * entry.formed, entry.mixing)
            ),
            dtype=np.float64,
        )

    def _reducing(
        self, parameters: FloatArray, *, last: bool, alone: BoolArray | bool = False, sums: BoolArray | bool = False
    ) -> FloatArray:
        """Bytes of a unit whose gradients are reduced: as backward gave them beside the copy that is sent, then that
        copy beside this rank's part and, on processors, what is received. A parameter that is `alone` in its unit has
        its gradient until then (FSDP2 lets go of all but the last). Until the `last` backward zero1 adds them to
        whole `sums`, or where there are none keeps them, in the precision of sums."""
        received = 1.0 if self.kind is DeviceKind.CPU else 0.0
        sent = self.reduced * (1.0 + received + 1.0 / self.divided) + np.where(alone, self.compute, 0.0)
        most = np.maximum(self.compute + self.reduced, sent)
        kept = self.compute + np.where(sums | (self.compute == self.reduced), 0.0, self.reduced)
        most = most if last else np.where(self.zero1, kept, most)
        return np.asarray(np.where(self.sharded, parameters * most, 0.0))

    def _table(self, at: _Beside) -> FloatArray:
        """The table's gradient is made whole; a tied head's part of it waits, and the sum of both is a third one."""
        both = 2.0 * self.master * np.minimum(self.entry.embedding, self.entry.tied)
        return np.asarray(np.where(both > 0.0, both, self.entry.embedding * self._forming(at)))


def _chunk_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> FloatArray:
    """Copies of one chunk: shifted, in fp32 before that where logits are not, and the last one until it is replaced."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    chunk = np.minimum(elements, size) * np.maximum(compute, 4.0)
    return np.asarray(chunk * (1.0 + (compute < 4.0) + (elements > size)), dtype=np.float64)
