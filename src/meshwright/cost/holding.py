"""What a rank holds whatever the moment, and moments that may be the peak of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.layouts import Backward, Kind, LayoutArrays
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.table import SCHEDULES, BoolArray, PlanTable
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Attention, Embedding, LatentAttention, Layer, Mixture, ModelSpec
from meshwright.spec.plan import ScheduleKind

_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_ONES = (
    "one_logits",
    "largest_kept",
    "head_kept",
    "working",
    "head_working",
    "largest",
    "largest_made",
    "head",
    "head_made",
    "embedding",
    "closing",
    "tied",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds whatever the moment, shape (rows, ranks).

    Bytes of all microbatches in flight: `kept` and `logits`. Of one microbatch: `one_kept` on all blocks of the rank,
    `head_kept`, `one_logits`, `largest_kept` of a layer. `working` beside a layer's backward and `head_working`
    beside the head's. Parameters: `largest` layer, `head`, and what of both
    has gradients (`largest_made`, `head_made`), `embedding`, `closing` of a layer's last product,
    and `tied` of a head that multiplies with the table. `sends` bytes between stages, `fixed` those
    that stay. `after_first` activations of all microbatches in flight when one has left the rank's first stage;
    `follows` where all microbatches are in flight when the first backward begins, and others come behind it.
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
    head_made: FloatArray
    embedding: FloatArray
    closing: FloatArray
    tied: FloatArray
    sends: FloatArray
    fixed: FloatArray
    after_first: FloatArray
    follows: BoolArray


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
    whole = held(shape, first=kept["first"], last=kept["last"], total=kept["total"])
    # Breadth-first all microbatches have left the later stages of a rank before the first one's backwards.
    looped = ((table.schedule == _BREADTH_FIRST) & (shape.chunks > 1.0))[:, None]
    share = np.divide(kept["first"], kept["total"], out=np.ones_like(whole), where=looped & (kept["total"] > 0.0))
    return Held(
        kept=whole,
        after_first=np.maximum(whole * share - kept["first"], 0.0),
        follows=np.broadcast_to(((shape.chunks == 1.0) & (shape.microbatches > 1.0))[:, None], whole.shape),
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
    head = np.maximum(priced.parameters, tied)
    return {
        "head": head,
        "head_made": head * trains,
        "tied": tied * trains,
        "head_kept": priced.bytes.kept,
        "head_working": priced.bytes.working,
        "one_logits": priced.bytes.logits,
    }


def _closing(block: Layer) -> float:
    """Parameters of the last product of a layer, whose gradient comes first."""
    if block.transform is not None:
        experts = block.transform.experts if isinstance(block.transform, Mixture) else 1
        return float(block.transform.width * block.transform.hidden * experts)
    if isinstance(block.mixer, (Attention, LatentAttention)):
        value = block.mixer.head_dim if isinstance(block.mixer, Attention) else block.mixer.value_dim
        return float(block.mixer.width * block.mixer.heads * value)
    return 0.0 if block.mixer is None else float(block.mixer.width * block.mixer.inner)
