"""What a rank holds whatever the moment, and moments that may be the peak of its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.block_bytes import Holds
from meshwright.cost.layouts import Backward, Kind, LayoutArrays
from meshwright.cost.pipeline import Shape, held
from meshwright.cost.states import state_bytes
from meshwright.cost.table import SCHEDULES, BoolArray, PlanTable
from meshwright.cost.thin import closing_elements, thin_matrices
from meshwright.cost.work import FloatArray
from meshwright.spec.model import Attention, Embedding, LatentAttention, Layer, Mixture, ModelSpec
from meshwright.spec.plan import ScheduleKind

_SAME = 1.0 + 1e-9
_SPLIT = [SCHEDULES.index(kind) for kind in (ScheduleKind.ZERO_BUBBLE_H1, ScheduleKind.ZERO_BUBBLE_H2)]
_BREADTH_FIRST = SCHEDULES.index(ScheduleKind.BREADTH_FIRST)
_PATIENT_SENDS = 2.0  # gradients that a stage has sent and does not wait for (parallel/torch_compat.py)
_ONES = (
    "one_logits",
    "loss_logits",
    "largest_kept",
    "head_kept",
    "working",
    "ending",
    "mixing",
    "head_working",
    "largest",
    "largest_made",
    "head",
    "head_made",
    "head_own",
    "embedding",
    "closing",
    "formed",
    "tied",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a rank holds whatever the moment, shape (rows, ranks).

    Bytes of all microbatches in flight: `kept` and `logits` when they are most, and `alone` where a stage without a
    head keeps more at another time. Of one microbatch: `one_kept` on all blocks of the rank, `head_kept`, `one_logits`,
    `largest_kept` of a layer, `loss_logits` of the copy that the loss reads. Beside a layer's backward `working`, when
    its last product has both gradients `ending`, when it comes to the mixer `mixing`; beside the head's `head_working`.
    Parameters: `largest` layer, `head`, and what of both has gradients (`largest_made`, `head_made`), `embedding`,
    `closing` of a layer's last product, `formed` of them when its backward has most, `tied` of a head that multiplies
    with the table, and `head_own` beside it. `sends` bytes of gradients on their way to other stages and of room for
    what comes, `fixed` those that stay. `after_first` activations of all microbatches in flight when one has left the
    rank's first stage; `follows` where all microbatches are in flight when the first backward begins, and others come
    behind it.
    """

    kept: FloatArray
    alone: FloatArray
    logits: FloatArray
    one_kept: FloatArray
    head_kept: FloatArray
    one_logits: FloatArray
    loss_logits: FloatArray
    largest_kept: FloatArray
    working: FloatArray
    ending: FloatArray
    mixing: FloatArray
    head_working: FloatArray
    largest: FloatArray
    largest_made: FloatArray
    head: FloatArray
    head_made: FloatArray
    head_own: FloatArray
    embedding: FloatArray
    closing: FloatArray
    formed: FloatArray
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
    eager: bool,
) -> Held:
    """What every rank holds of its `blocks`; `hidden` bytes of the residual stream of one microbatch, shape (rows,).

    Where operators do not run one by one, stages let go of what they sent, and halves of backwards keep what they read.
    """
    total = counts["total"]
    zeros = np.zeros(total.shape[:2])
    most = dict.fromkeys(_ONES, zeros)
    kept = dict.fromkeys(("first", "last", "total"), zeros)
    logits, waits = dict(kept), zeros
    for index, (kind, block) in enumerate(zip(arrays.kinds, blocks, strict=True)):
        for name, values in _of_one(kind, block, table, model=model).items():
            most[name] = np.where(total[..., index] > 0, np.maximum(most[name], values[:, None]), most[name])
        for name in kept:
            number = counts[name][..., index]
            kept[name] = kept[name] + number * block.bytes.kept[:, None]
            logits[name] = logits[name] + number * block.bytes.logits[:, None]
        waits = waits + total[..., index] * np.asarray(block.bytes.waits)[..., None]
    for name in kept if eager else ():
        kept[name] = kept[name] + hidden[:, None] * _outputs(counts[name], arrays=arrays, model=model)
    waits = waits if eager else kept["total"]
    whole = held(shape, first=kept["first"], last=kept["last"], total=kept["total"], waits=waits)
    scored = held(shape, **logits)
    both = held(shape, **{name: kept[name] + logits[name] for name in kept}, waits=waits + logits["total"])
    # Breadth-first all microbatches have left the later stages of a rank before the first one's backwards.
    looped = ((table.schedule == _BREADTH_FIRST) & (shape.chunks > 1.0))[:, None]
    share = np.divide(kept["first"], kept["total"], out=np.ones_like(whole), where=looped & (kept["total"] > 0.0))
    return Held(
        kept=both - scored,
        alone=np.where(whole > (both - scored) * _SAME, whole, 0.0),
        after_first=np.maximum(whole * share - kept["first"] + np.where(_splits(table), waits, 0.0), 0.0),
        follows=np.broadcast_to(((shape.chunks == 1.0) & (shape.microbatches > 1.0))[:, None], whole.shape),
        logits=scored,
        one_kept=kept["total"],
        sends=hidden[:, None] * _on_the_way(total, table, arrays=arrays, model=model),
        fixed=fixed,
        **most,
    )


def _splits(table: PlanTable) -> BoolArray:
    """Rows whose only stage on a rank gives the gradients of inputs first, shape (rows, 1)."""
    return np.isin(table.schedule, _SPLIT)[:, None]


def _outputs(counts: FloatArray, *, arrays: LayoutArrays, model: ModelSpec) -> FloatArray:
    """Stages of those counted that send what they give: each keeps it until its gradient is back, (rows, ranks)."""
    return np.asarray(counts[..., -1] - (arrays.of(model.head, counts) > 0), dtype=np.float64)


def _on_the_way(counts: FloatArray, table: PlanTable, *, arrays: LayoutArrays, model: ModelSpec) -> FloatArray:
    """Hidden features on their way at once, (rows, ranks): gradients that a stage has sent, and what it makes room
    for."""
    receives = counts[..., -1] - (arrays.of(model.embedding, counts) > 0)
    sent = np.minimum(_PATIENT_SENDS, table.microbatches - 1.0)[:, None]
    return np.asarray(np.where(receives > 0, receives * sent + 1.0, 0.0))


def _of_one(kind: Kind, priced: Holds, table: PlanTable, *, model: ModelSpec) -> dict[str, FloatArray]:
    """What one block of `kind` adds to Held, shape (rows,)."""
    block, trains = kind.block, kind.backward is Backward.WHOLE
    if isinstance(block, Layer):
        sparse = isinstance(block.transform, Mixture)
        tensor = table.tensor.astype(np.float64)
        slices = np.where(sparse & table.on_grid, table.expert * table.expert_tensor, tensor)
        thin = closing_elements(block, tensor)
        closing = _closing(block) / slices if thin is None else thin
        compute = state_bytes(table).compute
        changed = compute * _changed(block, tensor, slices) * trains
        return {
            "working": priced.bytes.working,
            "ending": priced.bytes.ending + compute * (_experts(block) / slices * trains),
            "mixing": np.where(table.sharding > 0, np.asarray(priced.bytes.mixing) + changed, 0.0),
            "largest": priced.parameters,
            "largest_made": priced.parameters * trains,
            "largest_kept": priced.bytes.kept,
            "closing": closing * trains,
            "formed": 0.0 * slices if sparse else closing * trains,
        }
    if isinstance(block, Embedding):
        return {"working": priced.bytes.working, "embedding": priced.parameters * trains}
    tied = np.asarray((model.head.matrix_parameters if model.head.tied else 0.0) / table.tensor)
    head = np.maximum(priced.parameters, tied)
    return {
        "head": head,
        "head_made": head * trains,
        "tied": tied * trains,
        "head_own": priced.parameters,
        "head_kept": priced.bytes.kept,
        "head_working": priced.bytes.working,
        "one_logits": priced.bytes.logits,
        "loss_logits": priced.bytes.logits / (1.0 if block.softcap is None else 2.0),
    }


def _changed(block: Layer, tensor: FloatArray, slices: FloatArray) -> FloatArray:
    """Parameters of a layer's transforms, whose gradients are there when backward comes to its mixer."""
    parts = {place: part for place, part in block.places.items() if place != "mixer"}
    whole = sum((float(part.matrix_parameters) for part in parts.values()), 0.0)
    thin = (each.parameters for place in parts for each in thin_matrices(block, place, tensor))
    return np.asarray(whole / slices + sum(thin))


def _experts(block: Layer) -> float:
    """Parameters of all experts of a layer, whose gradients come one by one before they are one tensor."""
    part = block.transform
    return (
        float(part.width * part.hidden * part.experts * (3 if part.gated else 2)) if isinstance(part, Mixture) else 0.0
    )


def _closing(block: Layer) -> float:
    """Parameters of the last product of a layer, whose gradient comes first."""
    if block.transform is not None:
        experts = block.transform.experts if isinstance(block.transform, Mixture) else 1
        return float(block.transform.width * block.transform.hidden * experts)
    if isinstance(block.mixer, (Attention, LatentAttention)):
        value = block.mixer.head_dim if isinstance(block.mixer, Attention) else block.mixer.value_dim
        return float(block.mixer.width * block.mixer.heads * value)
    return 0.0 if block.mixer is None else float(block.mixer.width * block.mixer.inner)
