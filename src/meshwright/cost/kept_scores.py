"""What attention keeps of scores that are written out, and of masks, where no fused kernel can do it."""

from __future__ import annotations

import numpy as np

from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Attention, LatentAttention


def writes_scores(mixer: Attention, sizes: Sizes) -> bool:
    """Whether caps or sinks have all scores written out, where a mask is dense."""
    return bool(sizes.dense_masks and (mixer.sinks or mixer.softcap is not None))


def written_out(mixer: Attention, heads: FloatArray, query: FloatArray, sizes: Sizes) -> FloatArray:
    """Queries, keys and values repeated for every head, the turned mask, and the scores after each step that keeps
    them: the cap, the softmax (with a column of sinks), its narrow copy."""
    m, e, wide = sizes.tokens, sizes.itemsize, sizes.wide
    scores = sizes.scores * heads
    column = m * heads * wide if mixer.sinks else sizes.zeros
    capped = e * scores if mixer.softcap is not None else sizes.zeros
    return 3.0 * e * m * query + capped + wide * scores + column + _narrow(scores, sizes) + mask_elements(mixer, sizes)


def beside_written_out(mixer: Attention, heads: FloatArray, query: FloatArray, sizes: Sizes) -> FloatArray:
    """What the softmax's backward has beside that: the gradients of what it gave and took, of the values, and of what
    enters the layer; gone by then are the narrow copy of what it gave, the values, and the core's output."""
    scores = np.where(sizes.context > 1.0, 0.0, sizes.scores * heads)  # context ranks meet tile by tile
    rest = sizes.itemsize * sizes.tokens * (mixer.width - query)
    columns = sizes.tokens * heads if mixer.sinks else sizes.zeros
    return 2.0 * sizes.wide * (scores + columns) - _narrow(scores, sizes) + rest


def _narrow(scores: FloatArray, sizes: Sizes) -> FloatArray:
    return np.where(sizes.itemsize < sizes.wide, sizes.itemsize * scores, 0.0)


def mask_elements(mixer: Attention | LatentAttention, sizes: Sizes) -> FloatArray:
    """Of the mask that a kernel is given: one for all sequences, or one each where documents or prompts differ."""
    return sizes.scores / (1.0 if sizes.masked or mixer.prefix else sizes.batch)


def mask_copy(mixer: Attention | LatentAttention, sizes: Sizes) -> FloatArray | None:
    """The kernel's own copy of the mask, a number for every score of one head; None without a mask."""
    chunk = getattr(mixer, "chunk", None)
    narrow = any(limit is not None and limit < sizes.sequence for limit in (mixer.window, chunk))
    dense = sizes.dense_masks and (sizes.masked or narrow or mixer.prefix > 0.0)
    return mask_elements(mixer, sizes) * sizes.attended if dense else None
