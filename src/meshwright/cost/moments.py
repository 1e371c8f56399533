"""The moments of a step that may be the peak of memory, and what lives in each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.layouts import Backward, Kind, LayoutArrays
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.software import Software
from meshwright.cost.states import StateBytes, States, state_bytes
from meshwright.cost.table import SHARDINGS, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.cluster import DeviceKind
from meshwright.spec.model import Attention, Embedding, LatentAttention, Layer, Mixture, ModelSpec
from meshwright.spec.plan import Sharding

_ZERO3 = SHARDINGS.index(Sharding.PARAMETERS)
# The loss of nn reads logits in chunks of so many elements (nn/loss.py).
_CHUNK_ELEMENTS = {DeviceKind.CPU: 2.0**20}
_ACCELERATOR_CHUNK_ELEMENTS = 2.0**26


_ONES = (
    "one_logits",
    "largest_kept",
    "head_kept",
    "working",
    "head_working",
    "largest",
    "largest_made",
    "head",
    "embedding",
    "closing",
    "tied",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds whatever the moment, shape (rows, ranks).

    Bytes of all microbatches in flight: `kept` and `logits`. Of one microbatch: `one_kept` on all blocks of the rank,
    `head_kept`, `one_logits`, `largest_kept` of a layer. `working` beside a layer's backward and `head_working`
    beside the head's. Parameters: `largest` layer, `head`, `embedding`, `closing` of a layer's last product,
    and `tied` of a head that multiplies with the table. `sends` bytes between stages, `fixed` those
    that stay.
    """

    kept: FloatArray
    logits: FloatArray
    one_kept: FloatArray
    head_kept: FloatArray
    one_logits: FloatArray
    largest_kept: FloatArray
    working: FloatArray
    head_working: FloatArray
    largest: FloatArray
    largest_made: FloatArray
    head: FloatArray
    embedding: FloatArray
    closing: FloatArray
    tied: FloatArray
    sends: FloatArray
    fixed: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A moment that may be the peak: bytes by part beside parameters and optimizer state, shape (rows, ranks)."""

    gradients: FloatArray
    activations: FloatArray
    logits: FloatArray
    buffers: FloatArray


def collect(
    table: PlanTable,
    blocks: Sequence[Holds],
    *,
    arrays: LayoutArrays,
    counts: Mapping[str, FloatArray],
    shape: Shape,
    model: ModelSpec,
    hidden: FloatArray,
    fixed: FloatArray,
) -> Held:
    """What every rank holds of its `blocks`; `hidden` bytes of the residual stream of one microbatch, shape (rows,)."""
    total = counts["total"]
    zeros = np.zeros(total.shape[:2])
    most = dict.fromkeys(_ONES, zeros)
    kept = dict.fromkeys(("first", "last", "total"), zeros)
    logits = dict(kept)
    for index, (kind, block) in enumerate(zip(arrays.kinds, blocks, strict=True)):
        for name, values in _of_one(kind, block, table, model=model).items():
            most[name] = np.where(total[..., index] > 0, np.maximum(most[name], values[:, None]), most[name])
        for name in kept:
            number = counts[name][..., index]
            kept[name] = kept[name] + number * block.bytes.kept[:, None]
            logits[name] = logits[name] + number * block.bytes.logits[:, None]
    return Held(
        kept=held(shape, first=kept["first"], last=kept["last"], total=kept["total"]),
        logits=held(shape, first=logits["first"], last=logits["last"], total=logits["total"]),
        one_kept=kept["total"],
        sends=np.where(table.pipeline > 1, 2.0, 0.0)[:, None] * hidden[:, None],
        fixed=fixed,
        **most,
    )


def _of_one(kind: Kind, priced: Holds, table: PlanTable, *, model: ModelSpec) -> dict[str, FloatArray]:
    """What one block of `kind` adds to Held, shape (rows,)."""
    block, trains = kind.block, kind.backward is Backward.WHOLE
    if isinstance(block, Layer):
        return {
            "working": priced.bytes.working,
            "largest": priced.parameters,
            "largest_made": priced.parameters * trains,
            "largest_kept": priced.bytes.kept,
            "closing": _closing(block) / table.tensor * trains,
        }
    if isinstance(block, Embedding):
        return {"working": priced.bytes.working, "embedding": priced.parameters * trains}
    tied = np.asarray((model.head.matrix_parameters if model.head.tied else 0.0) / table.tensor)
    return {
        "head": np.maximum(priced.parameters, tied),
        "tied": tied * trains,
        "head_kept": priced.bytes.kept,
        "head_working": priced.bytes.working,
        "one_logits": priced.bytes.logits,
    }


def moments(table: PlanTable, found: States, entry: Held, *, kind: DeviceKind, software: Software) -> list[Moment]:
    """Every moment of a step that may be the peak."""
    sizes = state_bytes(table)
    if software.eager:
        return _eager(table, found, entry, sizes=sizes, kind=kind, software=software)
    return _fused(found, entry, sizes=sizes, software=software)


def _eager(
    table: PlanTable, found: States, entry: Held, *, sizes: StateBytes, kind: DeviceKind, software: Software
) -> list[Moment]:
    """The loss, the head's backward, a layer's backward, the last layer's of all, the end of the last backward
    or the optimizer's step.

    A loss of torch's own has beside the log-softmax the gradients of it and of the logits, in fp32 too.
    """
    master, compute, reduced = (size[:, None] for size in (sizes.master, sizes.compute, sizes.reduced))
    sharded = table.sharding[:, None] > 0
    gathered = np.where(table.sharding[:, None] == _ZERO3, compute, 0.0)
    # Gradients are made as backward goes where no sum and no bucket waits for them.
    made = ~sharded & (found.before == 0.0)
    head = np.where(made, master * entry.head, 0.0)
    first = head + np.where(made, master * entry.closing, 0.0)
    late = np.where(made, master * (entry.largest_made + entry.embedding - entry.closing), 0.0)
    buffers = entry.sends + entry.fixed
    chunk = _chunk_bytes(entry.one_logits / compute, compute, kind=kind)
    moved = np.where(sharded, np.maximum(entry.largest, entry.head) * (compute + 2.0 * reduced), 0.0)
    unit = buffers + entry.largest * 2.0 * gathered + moved + found.wire
    # The table's gradient is made whole; a tied head's part of it waits, and the sum of both is a third one.
    both = 2.0 * master * np.minimum(entry.embedding, entry.tied)
    alone = np.where(made & (compute == master), 0.0, entry.embedding * compute)
    table_gradient = np.where(both > 0.0, both, alone)
    return [
        Moment(
            gradients=found.before,
            activations=entry.kept,
            logits=entry.logits + (chunk if software.fused_loss else 2.0 * entry.one_logits),
            buffers=buffers,
        ),
        Moment(
            gradients=found.before + head,
            activations=entry.kept,
            logits=entry.logits,
            buffers=buffers + entry.head_working + entry.head * (gathered + np.where(made, 0.0, compute)),
        ),
        Moment(
            gradients=found.before + first,
            activations=entry.kept - entry.head_kept,
            logits=entry.logits - entry.one_logits,
            buffers=unit + entry.working,
        ),
        Moment(
            gradients=found.after - late,
            activations=np.minimum(entry.largest_kept, entry.kept),
            logits=0.0 * entry.logits,
            buffers=unit + entry.working,
        ),
        Moment(
            gradients=found.after,
            activations=0.0 * entry.kept,
            logits=0.0 * entry.logits,
            buffers=buffers + np.maximum(np.where(sharded, moved, table_gradient), found.step),
        ),
    ]


def _closing(block: Layer) -> float:
    """Parameters of the last product of a layer, whose gradient comes first."""
    if block.transform is not None:
        experts = block.transform.experts if isinstance(block.transform, Mixture) else 1
        return float(block.transform.width * block.transform.hidden * experts)
    if isinstance(block.mixer, (Attention, LatentAttention)):
        value = block.mixer.head_dim if isinstance(block.mixer, Attention) else block.mixer.value_dim
        return float(block.mixer.width * block.mixer.heads * value)
    return 0.0 if block.mixer is None else float(block.mixer.width * block.mixer.inner)


def _fused(found: States, entry: Held, *, sizes: StateBytes, software: Software) -> list[Moment]:
    """The loss, the head's backward, a layer's backward, the embedding's backward, the optimizer's step.

    Gradients have their buffer already. The head's product writes a stand-in of its weight's shape, and the table's
    gradient is whole before it is added: both in the precision that multiplies. A loss that is not fused has the
    logits beside their exponentials, and their gradient in the precision that multiplies later.
    """
    master, compute = sizes.master[:, None], sizes.compute[:, None]
    given = 0.0 * entry.one_logits if software.fused_loss else entry.one_logits * compute / np.maximum(compute, 4.0)
    nothing = np.zeros_like(master * entry.kept)

    def moment(activations: FloatArray, logits: FloatArray, buffers: FloatArray) -> Moment:
        return Moment(gradients=found.before, activations=activations, logits=logits, buffers=entry.fixed + buffers)

    return [
        moment(entry.kept, entry.logits + given, nothing),
        moment(entry.kept, entry.logits + given, entry.head_working + entry.head * compute),
        moment(entry.kept - entry.head_kept, entry.logits - entry.one_logits, entry.working),
        moment(entry.kept - entry.one_kept, entry.logits - entry.one_logits, entry.embedding * compute),
        Moment(gradients=found.after, activations=nothing, logits=nothing, buffers=entry.fixed + found.step),
    ]


def _chunk_bytes(elements: FloatArray, compute: FloatArray, *, kind: DeviceKind) -> FloatArray:
    """Copies of one chunk: shifted, in fp32 before that where logits are not, and the last one until it is replaced."""
    size = _CHUNK_ELEMENTS.get(kind, _ACCELERATOR_CHUNK_ELEMENTS)
    chunk = np.minimum(elements, size) * np.maximum(compute, 4.0)
    return np.asarray(chunk * (1.0 + (compute < 4.0) + (elements > size)), dtype=np.float64)
