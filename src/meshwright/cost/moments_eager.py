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
        self.buffers = entry.sends + entry.fixed

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
        return [self._loss(), *self._backward(first), *self._backward(second), self._end(first), *self._last()]

    def _loss(self) -> Moment:
        """A loss of torch's own has beside the log-softmax the gradients of it and of the logits, in fp32 too."""
        entry = self.entry
        chunk = _chunk_bytes(entry.one_logits / self.compute, self.compute, kind=self.kind)
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
        layer = self.buffers + 2.0 * self.gathered * entry.largest + self.found.wire + entry.working
        formed = np.where(self.sharded, self.compute, self.master) * entry.closing
        flies = np.where(self.sharded & ~self.zero1, self.reduced, 0.0)

        def moment(activations: FloatArray, buffers: FloatArray, *, gradients: FloatArray | float = 0.0) -> Moment:
            return Moment(gradients=at.gradients + gradients, activations=activations, logits=logits, buffers=buffers)

        return [
            Moment(
                gradients=at.gradients + head,
                activations=at.kept,
                logits=at.logits,
                buffers=self.buffers
                + entry.head_working
                + entry.head * self.gathered
                + entry.head_made * self._forming(at),
            ),
            moment(kept, self.buffers + self.gathered * entry.largest + self._reducing(entry.head_made, last=False)),
            moment(kept, layer + formed + flies * entry.head_made, gradients=head),
            moment(between, layer + formed + flies * entry.largest_made, gradients=head),
            moment(
                between, self.buffers + self.gathered * entry.largest + self._reducing(entry.largest_made, last=False)
            ),
        ]

    def _end(self, at: _Beside) -> Moment:
        """The table's gradient is made, and other microbatches are still under way."""
        entry, found = self.entry, self.found
        return Moment(
            gradients=np.where(at.sums, found.before, found.summed),
            activations=np.maximum(entry.after_first, 0.0),
            logits=np.maximum(entry.logits - entry.one_logits, 0.0),
            buffers=self.buffers + np.where(self.sharded, self._reducing(entry.embedding, last=False), self._table(at)),
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

        table = np.where(self.sharded, self._reducing(entry.embedding, last=True), self._table(at))
        layer = 2.0 * self.gathered * entry.largest + found.wire + entry.working
        return [
            moment(found.before, one, self._reducing(entry.head_made, last=True)),
            moment(
                found.before - given,
                np.maximum(one - entry.largest_kept, 0.0),
                self._reducing(entry.largest_made, last=True),
            ),
            moment(found.after - late, np.minimum(entry.largest_kept, entry.kept), layer),
            moment(found.after, nothing, np.maximum(table, found.step)),
        ]

    def _forming(self, at: _Beside) -> FloatArray:
        """Bytes per parameter of a gradient that is formed, beside the one that stays: as the product gives it, and
        in the master's precision before it is added."""
        narrow = np.where(self.compute < self.master, self.compute, 0.0)
        whole = narrow + np.where(at.sums, self.master, 0.0)
        return np.asarray(np.where(self.sharded, self.compute, whole))

    def _reducing(self, parameters: FloatArray, *, last: bool) -> FloatArray:
        """Bytes of a unit whose gradients are reduced: as backward gave them, whole as they are sent and, on
        processors, received, and this rank's part; zero1 adds them to whole sums until the `last` backward."""
        sent = self.reduced * ((2.0 if self.kind is DeviceKind.CPU else 1.0) + 1.0 / self.divided)
        sent = sent if last else np.where(self.zero1, self.reduced, sent)
        return np.asarray(np.where(self.sharded, parameters * (self.compute + sent), 0.0))

    def _table(self, at: _Beside) -> FloatArray:
        """The table's gradient is made whole; a tied head's part of it waits, and the sum of both is a third one."""
        both = 2.0 * self.master * np.minimum(self.entry.embedding, self.entry.tied)
        return np.asarray(np.where(both > 0.0, both, self.entry.embedding * self._forming(at)))


def _chunk_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> FloatArray:
    """Copies of one chunk: shifted, in fp32 before that where logits are not, and the last one until it is replaced."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    chunk = np.minimum(elements, size) * np.maximum(compute, 4.0)
    return np.asarray(chunk * (1.0 + (compute < 4.0) + (elements > size)), dtype=np.float64)
