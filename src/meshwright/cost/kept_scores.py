"""What attention keeps of scores that are written out, and of masks, where no fused kernel can do it."""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_keys import all_joined, going_runs, mean_runs
from meshwright.cost.table import BoolArray
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import Attention, LatentAttention


def writes_scores(mixer: Attention, sizes: Sizes) -> bool:
    """Whether caps or sinks have all scores written out, where a mask is dense."""
    return bool(sizes.dense_masks and (mixer.sinks or mixer.softcap is not None))


def written_out(mixer: Attention, heads: FloatArray, query: FloatArray, sizes: Sizes) -> FloatArray:
    """Queries, keys and values repeated for every head, the turned mask, and the scores after each step that keeps
    them: the cap, the softmax (with a column of sinks), its narrow copy."""
    column = sizes.tokens * heads * sizes.wide if mixer.sinks else sizes.zeros
    return sizes.itemsize * sizes.tokens * query + column + grows_with_keys(mixer, heads, query, sizes)


def grows_with_keys(mixer: Attention, heads: FloatArray, query: FloatArray, sizes: Sizes) -> FloatArray:
    """What of that is more the more keys there are."""
    scores = sizes.met_scores * heads
    given = 2.0 * sizes.itemsize * sizes.tokens * query * mean_runs(sizes)
    capped = sizes.itemsize * scores if mixer.softcap is not None else sizes.zeros
    return given + capped + sizes.wide * scores + _narrow(scores, sizes) + mask_elements(mixer, sizes)


def beside_written_out(mixer: Attention, heads: FloatArray, query: FloatArray, sizes: Sizes) -> FloatArray:
    """What the softmax's backward has beside that: the gradients of what it gave and took, of the values, and of what
    enters the layer; gone by then are the narrow copy of what it gave, the values, and the core's output."""
    met = sizes.met_scores * heads * going_runs(sizes) / mean_runs(sizes)
    scores = np.where(sizes.context > 1.0, 0.0, met)  # context ranks meet tile by tile
    rest = sizes.itemsize * sizes.tokens * (mixer.width - query)
    columns = sizes.tokens * heads if mixer.sinks else sizes.zeros
    return 2.0 * sizes.wide * (scores + columns) - _narrow(scores, sizes) + rest


def _narrow(scores: FloatArray, sizes: Sizes) -> FloatArray:
    return np.where(sizes.itemsize < sizes.wide, sizes.itemsize * scores, 0.0)


def mask_elements(mixer: Attention | LatentAttention, sizes: Sizes) -> FloatArray:
    """Of the mask that a kernel is given: one for all sequences, or one each where documents or prompts differ."""
    return sizes.met_scores / (1.0 if sizes.masked or mixer.prefix else sizes.batch)


def first_masked(mixer: Attention | LatentAttention, sizes: Sizes) -> BoolArray:
    """Whether kernels take a mask of a microbatch, or of its first slice."""
    chunk = getattr(mixer, "chunk", None)
    limits = [limit for limit in (mixer.window, chunk) if limit is not None]
    length = sizes.sequence / np.asarray(sizes.slices + sizes.zeros)
    always = sizes.masked or mixer.prefix > 0.0
    return np.asarray(sizes.dense_masks & (always | (length > min(limits, default=np.inf))))


def mask_copy(mixer: Attention | LatentAttention, sizes: Sizes) -> FloatArray:
    """The kernel's own copy of the mask, a number for every score of one head; 0 without a mask, which slices but the
    first have in any case: they are the last queries of the keys that they meet."""
    slices = np.asarray(sizes.slices + sizes.zeros)
    later = sizes.scores / sizes.batch * all_joined(slices) / slices**2
    return sizes.attended * np.where(first_masked(mixer, sizes), mask_elements(mixer, sizes), later)
