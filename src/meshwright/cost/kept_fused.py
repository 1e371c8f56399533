"""What backward keeps of every part of a block under Megatron-Core: fused norms, activations, attention and loss.

Transformer Engine's norms keep their input and a number a token, products their input (one byte an element under
eight-bit recipes), a fused activation what the product before it gives and nothing of its own, attention its inputs,
its output and the log-sum-exp (2205.05198 counts the same without fused attention). With sequence parallel each rank
keeps its share of the tokens and gathers them again. What backward has beside these is told net: it frees as it goes.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept import recurrence
from meshwright.cost.kept_part import Kept
from meshwright.cost.repeated import Repeated
from meshwright.cost.software import Software
from meshwright.cost.thin import thin_kept, thin_matrices
from meshwright.cost.vocabulary import first_rows
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import (
    Attention,
    Block,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
)

_STATISTIC_BYTES = 4.0
_TARGET_BYTES = 8.0
_ROUTER_BYTES = 9.0  # of a token and expert: its probability, whether it is chosen, the row it is sent to


def kept_fused(block: Block, sizes: Sizes, software: Software) -> tuple[Kept, ...]:
    """The parts of `block` in forward order."""
    if isinstance(block, Embedding):
        hidden = sizes.tokens * block.width * sizes.itemsize / sizes.split
        return (Kept(saved=sizes.tokens * _TARGET_BYTES, working=hidden),)
    if isinstance(block, Head):
        return _head(block, sizes, software)
    parts: list[Kept] = []
    for place, part in block.places.items():
        inside = thin_kept(_inside(part, sizes), thin_matrices(block, place, sizes.tensor), sizes)
        before = () if part.norm is None else (_norm(part.norm, sizes),)
        after = () if part.post_norm is None else (_norm(part.post_norm, sizes),)
        parts += [*before, inside, *after]
        if software.dropout:
            parts.append(Kept(saved=sizes.tokens * part.width / sizes.split))
    if block.sum_norm is not None:
        parts.append(_norm(block.sum_norm, sizes))
    return tuple(parts)


def _inside(part: Attention | LatentAttention | Recurrence | FeedForward | Mixture, sizes: Sizes) -> Kept:
    if isinstance(part, Attention):
        return _attention(part, sizes)
    if isinstance(part, LatentAttention):
        return _latent_attention(part, sizes)
    if isinstance(part, FeedForward):
        return _feed_forward(part, sizes)
    return _mixture(part, sizes) if isinstance(part, Mixture) else recurrence(part, sizes)


def _norm(norm: Norm, sizes: Sizes) -> Kept:
    statistics = _STATISTIC_BYTES * (2.0 if norm.kind is NormKind.LAYER else 1.0)
    return Kept(saved=sizes.tokens / sizes.split * (norm.width * sizes.itemsize + statistics))


def _entering(width: int, sizes: Sizes) -> FloatArray:
    """Bytes of the input of a divided product: a rank's share of the tokens."""
    return sizes.tokens * width * sizes.kept_itemsize / sizes.split


def _passing(width: int, sizes: Sizes) -> tuple[FloatArray, FloatArray]:
    """Bytes of the residual stream's gradient on a rank, and of the same gathered where it is divided."""
    whole = sizes.tokens * width * sizes.itemsize
    return whole / sizes.split, np.where(sizes.split > 1.0, whole, 0.0)


def _core(
    *, inputs: FloatArray, written: FloatArray, heads: FloatArray, sizes: Sizes, keys: float = 1.0
) -> tuple[FloatArray, FloatArray]:
    """Bytes that attention keeps beside its inputs and output, and what its backward has beside them.

    The gradients of the output and the inputs; those of the queries are added up in fp32.
    """
    m, e = sizes.tokens, sizes.itemsize
    if sizes.unfused:
        scores = sizes.scores * keys * heads
        return sizes.score_bytes * scores, e * (scores + m * (inputs + written))
    return _STATISTIC_BYTES * m * heads, m * (e * (inputs + written) + 4.0 * written)


def _attention(mixer: Attention, sizes: Sizes) -> Kept:
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    heads, key_heads = mixer.heads / t, np.maximum(mixer.kv_heads / t, 1.0)
    query, key = heads * mixer.head_dim, key_heads * mixer.head_dim * mixer.keys
    core, backward = _core(inputs=query + 2.0 * key, written=query, heads=heads, keys=mixer.keys, sizes=sizes)
    normed = sizes.zeros
    if mixer.qk_norm is not QueryKeyNorm.NONE:
        normed = m * (e * (query + key) + _STATISTIC_BYTES * (heads + key_heads))
    if mixer.value_norm:
        normed = normed + m * (e * key + _STATISTIC_BYTES * key_heads)
    residual, gathered = _passing(mixer.width, sizes)
    entering = _entering(mixer.width, sizes)
    given = e * m * query + _quantized(query, sizes)
    gates = 2.0 * e * m * query if mixer.gated else sizes.zeros  # the gate, and what it multiplies
    return Kept(
        saved=entering + e * m * (query + 2.0 * key) + given + core + normed + gates,
        core=core,
        working=residual + np.maximum(backward, gathered + e * m * query),
        again={Repeated.NORMED_INSIDE: entering, Repeated.CONTEXT: given},
    )


def _quantized(features: FloatArray, sizes: Sizes) -> FloatArray:
    """Bytes of a product's own narrow copy of an input that another keeps as it was."""
    narrow = sizes.kept_itemsize < sizes.itemsize
    return np.where(narrow, sizes.tokens * features * sizes.kept_itemsize, 0.0)


def _latent_attention(mixer: LatentAttention, sizes: Sizes) -> Kept:
    """Latents before and after their norms, whole on every tensor rank, and queries, keys and values of its heads."""
    m, e = sizes.tokens, sizes.itemsize
    heads = mixer.heads / sizes.tensor
    query, value = heads * (mixer.nope_dim + mixer.rope_dim), heads * mixer.value_dim
    core, backward = _core(inputs=2.0 * query + value, written=value, heads=heads, sizes=sizes)
    ranks = float(mixer.kv_rank + (mixer.query_rank or 0))
    normed = m / sizes.split * sizes.kept_itemsize * ranks
    latents = m / sizes.split * (e * (ranks + mixer.rope_dim) + 2.0 * _STATISTIC_BYTES)
    residual, gathered = _passing(mixer.width, sizes)
    entering, raised = _entering(mixer.width, sizes), normed + e * m * (2.0 * query + value)
    given = e * m * value + _quantized(value, sizes)
    return Kept(
        saved=entering + latents + raised + given + core,
        core=core,
        working=residual + np.maximum(backward, gathered + e * m * value),
        again={Repeated.NORMED: entering, Repeated.LATENTS: raised, Repeated.CONTEXT: given},
    )


def _hidden(hidden: FloatArray, rows: FloatArray, sizes: Sizes, *, gated: bool) -> tuple[FloatArray, FloatArray]:
    """Bytes kept between the two products, and what backward has beside them when the activation's ends.

    It has the gradients of what it gave and of what it read, and the last product's input is gone.
    """
    e, read = sizes.itemsize, (2.0 if gated else 1.0) * hidden
    kept = rows * (e * read + sizes.kept_itemsize * hidden)
    return kept, rows * (e * (hidden + read) - sizes.kept_itemsize * hidden)


def _feed_forward(part: FeedForward, sizes: Sizes) -> Kept:
    m, e, h = sizes.tokens, sizes.itemsize, part.hidden / sizes.tensor
    kept, activation = _hidden(h, m, sizes, gated=part.gated)
    residual, gathered = _passing(part.width, sizes)
    entering, given = _entering(part.width, sizes), m * sizes.kept_itemsize * h
    return Kept(
        saved=entering + kept,
        working=residual + np.maximum(activation, gathered + e * m * h),
        again={Repeated.NORMED_INSIDE: entering, Repeated.DENSE: kept - given, Repeated.ACTIVATED: given},
    )


def _mixture(part: Mixture, sizes: Sizes) -> Kept:
    """Rows sent to experts, their hidden features and weights; weights are applied there, so that what comes back is
    added up and not kept."""
    m, e = sizes.tokens, sizes.itemsize
    grid = np.asarray(sizes.expert + sizes.zeros) > 0.0
    slices = np.where(grid, sizes.expert_tensor, sizes.tensor)
    routed, h = m * part.top_k * part.routing.kept_share * slices / sizes.tensor, part.hidden / slices
    kept, activation = _hidden(h, routed, sizes, gated=part.gated)
    shares, entering = m / sizes.split, m / sizes.split * e * part.width
    sent, given = routed * (sizes.kept_itemsize * part.width + _STATISTIC_BYTES), routed * sizes.kept_itemsize * h
    saved = entering + shares * _ROUTER_BYTES * part.experts + sent + kept
    again = {Repeated.EXPERTS: sent + kept - given, Repeated.EXPERTS_ACTIVATED: given}
    for norm in part.inner_norms:
        saved = saved + np.where(grid, 1.0 / sizes.tensor, 1.0) * m * (e * norm.width + _STATISTIC_BYTES)
    if part.shared is not None:
        again[Repeated.SHARED] = _hidden(part.shared.hidden / sizes.tensor, m, sizes, gated=part.shared.gated)[0]
        saved = saved + again[Repeated.SHARED] + np.where(sizes.kept_itemsize < e, _entering(part.width, sizes), 0.0)
    residual, _ = _passing(part.width, sizes)
    moved = e * routed * part.width
    return Kept(
        saved=saved,
        working=residual + np.maximum(activation, moved + np.maximum(moved, e * routed * h)),
        again={Repeated.NORMED: entering, **again},
    )


def _head(block: Head, sizes: Sizes, software: Software) -> tuple[Kept, ...]:
    """Logits as the product gives them, over which a fused loss writes their gradient, or their fp32 exponentials."""
    m, v = sizes.tokens, first_rows(block.vocab, sizes.tensor)
    norms = () if block.norm is None else (_norm(block.norm, sizes),)
    logit = sizes.itemsize if software.fused_loss else sizes.wide
    whole = m * block.width * sizes.itemsize
    residual, gathered = _passing(block.width, sizes)
    head = Kept(
        saved=whole / sizes.split + _TARGET_BYTES * m,
        working=gathered + np.where(sizes.split > 1.0, whole, residual),
        logits=m * v * logit,
    )
    return (*norms, head)
