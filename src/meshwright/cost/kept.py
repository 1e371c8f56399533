"""What backward keeps of every part of a block, tensor by tensor, as the training software runs it.

Here as our own modules run it, operator by operator under torch's autograd; `kept_fused` tells of stacks with fused
kernels. Tests hold every figure of this module against a count of the modules' own saved tensors.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.kept_context import kept_by_meeting, traded_copies
from meshwright.cost.kept_keys import given_features
from meshwright.cost.kept_part import Kept
from meshwright.cost.kept_scores import beside_written_out, mask_copy, writes_scores, written_out
from meshwright.cost.recurrence_work import recurrence_shapes
from meshwright.cost.software import Software
from meshwright.cost.thin import thin_kept, thin_matrices
from meshwright.cost.vocabulary import first_rows
from meshwright.cost.work import FloatArray, Sizes
from meshwright.spec.model import (
    Activation,
    Attention,
    Block,
    Choice,
    Embedding,
    FeedForward,
    Head,
    LatentAttention,
    Mixer,
    Mixture,
    Norm,
    NormKind,
    QueryKeyNorm,
    Recurrence,
    Score,
    Transform,
    Weighing,
)

_INDEX_BYTES = 8.0
_LOSS_BYTES = 9.0  # of every token the column of its target, and whether this rank holds it
# A seed and an offset; flash attention keeps a scalar beside them that it does not use.
_FLASH_STATE_BYTES, _MASKED_STATE_BYTES = 24.0, 16.0


def kept_eager(block: Block, sizes: Sizes, software: Software) -> tuple[Kept, ...]:
    """The parts of `block` in forward order."""
    if isinstance(block, Embedding):
        return (_embedding(block, sizes),)
    if isinstance(block, Head):
        return _head(block, sizes, software)
    parts: list[Kept] = []
    for place, part in block.places.items():
        inside = _mixer(part, sizes) if isinstance(part, Mixer) else _transform(part, sizes, beside=block.dense)
        inside = thin_kept(inside, thin_matrices(block, place, sizes.tensor), sizes)
        before = () if part.norm is None else (_norm(part.norm, sizes),)
        after = () if part.post_norm is None else (_norm(part.post_norm, sizes),)
        parts += [*before, inside, *after]
    if block.sum_norm is not None:
        parts.append(_norm(block.sum_norm, sizes))
    if block.scaled:
        parts.append(Kept(saved=np.where(sizes.itemsize < sizes.wide, sizes.itemsize, 0.0)))
    return tuple(parts)


def _mixer(mixer: Mixer, sizes: Sizes) -> Kept:
    if isinstance(mixer, Attention):
        return _attention(mixer, sizes)
    return _latent_attention(mixer, sizes) if isinstance(mixer, LatentAttention) else recurrence(mixer, sizes)


def _transform(part: Transform, sizes: Sizes, *, beside: FeedForward | None) -> Kept:
    return _feed_forward(part, sizes) if isinstance(part, FeedForward) else _mixture(part, sizes, beside=beside)


def _norm(norm: Norm, sizes: Sizes) -> Kept:
    """Its input and one or two numbers a token, which layer norms on processors keep in the input's precision."""
    rows = sizes.tokens / sizes.split
    copied = sizes.zeros + norm.parameters
    if norm.kind is NormKind.RMS:
        return Kept(saved=_root_mean_square(rows * norm.width, rows, sizes), copied=copied)
    statistics = 2.0 * (sizes.itemsize if sizes.processor else sizes.wide)
    return Kept(saved=rows * (norm.width * sizes.itemsize + statistics), copied=copied)


def _root_mean_square(
    elements: FloatArray, rows: FloatArray, sizes: Sizes, *, scaled: bool = True, shared: bool = False
) -> FloatArray:
    """The input and 1 / rms; written out in fp32 a wide input and, before the scale, a wide output.

    `shared`: something else keeps the input already.
    """
    if sizes.composite_norms:
        own = elements * sizes.wide * (1.0 if scaled else 0.0)
        read = np.where((sizes.itemsize < sizes.wide) | (not shared), elements * sizes.wide, 0.0)
        return own + read + rows * sizes.wide
    return elements * sizes.itemsize * (0.0 if shared else 1.0) + rows * sizes.wide


def _attention(mixer: Attention, sizes: Sizes) -> Kept:
    """Input, queries, keys, values and output, what the core keeps inside, and the inputs of norms on the former."""
    m, t, e = sizes.tokens, sizes.tensor, sizes.itemsize
    heads, key_heads = mixer.heads / t, np.maximum(mixer.kv_heads / t, 1.0)
    query, key = heads * mixer.head_dim, key_heads * mixer.head_dim
    held = key * mixer.keys
    normed = mixer.qk_norm is not QueryKeyNorm.NONE
    same = mixer.shared_key_value and mixer.rotary is None and not normed and not mixer.value_norm
    read = query + (1.0 if same else 2.0) * held
    scores = sizes.scores * mixer.keys * heads if sizes.unfused else sizes.zeros
    if sizes.unfused:
        inside = e * m * read + sizes.score_bytes * scores
    elif writes_scores(mixer, sizes):
        inside = written_out(mixer, heads, query, sizes)
    else:
        mask = mask_copy(mixer, sizes)
        given = given_features(query, held, read, sizes, masked=mask is not None)
        inside = _fused_core(
            read=query + 2.0 * held, written=query, heads=heads, inputs=given, sizes=sizes, flash=mask is None
        )
        inside = inside if mask is None else inside + mask
    met = held * traded_copies(key_heads, sizes)
    inside = kept_by_meeting(inside, query=query, key=met, value=0.0 * met if same else met, heads=heads, sizes=sizes)
    # The sinks' copy in less precision is an input that only a repeated core needs.
    core = inside - e * m * read - (np.where(e < sizes.wide, e * heads, 0.0) if mixer.sinks else 0.0)
    width = sizes.zeros + mixer.width
    matrices = width * (2.0 * query + (1.0 if mixer.shared_key_value else 2.0) * key)
    working = e * (m * (2.0 * query + 2.0 * held + width) + 2.0 * scores)
    if writes_scores(mixer, sizes):
        working = np.maximum(working, beside_written_out(mixer, heads, query, sizes))
    return Kept(
        saved=e * m * (width + query) + inside + _head_norms(mixer, query, key, sizes) + _value_norm(mixer, key, sizes),
        core=core,
        working=working,
        ending=e * m * (query + width),
        fed=e * m * width,
        waits=e * m * (2.0 * width + 2.0 * query + (1.0 if mixer.shared_key_value else 2.0) * key),
        copied=matrices + _head_norm_parameters(mixer, query, key),
        handed=e * m * 2.0 * held,
    )


def _fused_core(
    *, read: FloatArray, written: FloatArray, heads: FloatArray, inputs: FloatArray, sizes: Sizes, flash: bool
) -> FloatArray:
    """Inputs and the log-sum-exp of a fused kernel; where they are widened, wide inputs and output.

    The memory-efficient kernel takes what `flash` attention does not: masks, values of another width.
    """
    m, e, wide = sizes.tokens, sizes.itemsize, sizes.attended
    held = np.where(wide > e, wide * (read + written), e * inputs)
    state = 0.0 if sizes.processor else _FLASH_STATE_BYTES if flash else _MASKED_STATE_BYTES
    return m * held + m * heads * sizes.wide + state


def _head_norms(mixer: Attention, query: FloatArray, key: FloatArray, sizes: Sizes) -> FloatArray:
    """Norms of queries and keys: over each head, or over all heads at once, which tensor ranks write out together."""
    if mixer.qk_norm is QueryKeyNorm.NONE:
        return sizes.zeros
    m, scaled = sizes.tokens, mixer.qk_norm is not QueryKeyNorm.UNSCALED
    whole = mixer.qk_norm is QueryKeyNorm.FULL
    found = sizes.zeros
    for features, shared in ((query, False), (key, mixer.shared_key_value and not mixer.value_norm)):
        rows = m * (1.0 if whole else features / mixer.head_dim)
        one = _root_mean_square(m * features, rows, sizes, scaled=scaled, shared=shared)
        apart = m * (2.0 * features + 1.0) * sizes.wide
        found = found + (np.where(sizes.tensor > 1.0, apart, one) if whole else one)
    return found


def _value_norm(mixer: Attention, key: FloatArray, sizes: Sizes) -> FloatArray:
    """Of values, over each head and without a scale; keys that are values are kept by their own norm already, or as
    they are by a fused core."""
    if not mixer.value_norm:
        return sizes.zeros
    m, as_they_are = sizes.tokens, mixer.rotary is None and not mixer.sinks and mixer.softcap is None
    shared = mixer.shared_key_value and (mixer.qk_norm is not QueryKeyNorm.NONE or as_they_are)
    return _root_mean_square(m * key, m * key / mixer.head_dim, sizes, scaled=False, shared=shared)


def _head_norm_parameters(mixer: Attention, query: FloatArray, key: FloatArray) -> FloatArray | float:
    if mixer.qk_norm is QueryKeyNorm.FULL:
        return query + key
    return 2.0 * mixer.head_dim if mixer.qk_norm is QueryKeyNorm.HEAD else 0.0


def _latent_attention(mixer: LatentAttention, sizes: Sizes) -> Kept:
    """Latents with their norms on every tensor rank, and the queries, keys and values of its heads.

    Values are a slice of what the up-projection gives, and keep it whole. Processors have no fused kernel for values
    of another width than the keys', and write the scores out in fp32, with a copy of the values unless one sequence of
    that precision needs none.
    """
    m, e, wide = sizes.tokens, sizes.itemsize, sizes.wide
    heads = mixer.heads / sizes.tensor
    query, value = heads * (mixer.nope_dim + mixer.rope_dim), heads * mixer.value_dim
    inputs = 2.0 * query + heads * (mixer.nope_dim + mixer.value_dim)
    even = mixer.nope_dim + mixer.rope_dim == mixer.value_dim
    if sizes.processor and not even:
        slices = (np.asarray(sizes.batch + sizes.zeros) > 1.0) | (e < wide)
        values = np.where(slices, value, heads * (mixer.nope_dim + mixer.value_dim))
        inside = wide * (m * (2.0 * query + values) + sizes.scores * heads)
    else:
        mask = mask_copy(mixer, sizes)
        inside = _fused_core(
            read=2.0 * query + value,
            written=value,
            heads=heads,
            inputs=inputs,
            sizes=sizes,
            flash=even and mask is None,
        )
        inside = inside if mask is None else inside + mask
    # Values that are traded are copied out of what the up-projection gave.
    met = np.where(np.asarray(sizes.inner) > 1.0, value, inputs - 2.0 * query)
    inside = kept_by_meeting(inside, query=query, key=query, value=met, heads=heads, sizes=sizes)
    core = inside - e * m * inputs
    width, rank, latent = sizes.zeros + mixer.width, mixer.query_rank, float(mixer.kv_rank + mixer.rope_dim)
    around = _root_mean_square(m * mixer.kv_rank, m, sizes) + e * m * mixer.kv_rank
    whole = not sizes.composite_norms
    around = around + np.where(whole | (e >= wide), e * m * mixer.rope_dim, 0.0)
    copied = width * (latent + value) + mixer.kv_rank * (heads * (mixer.nope_dim + mixer.value_dim) + 1.0)
    fed = e * m * (width + mixer.kv_rank)
    above = query + latent + heads * (mixer.nope_dim + mixer.value_dim) + width + value
    if rank is None:
        copied = copied + width * query
    else:
        fed, above = fed + e * m * rank, above + rank
        around = around + _root_mean_square(m * rank, m, sizes) + e * m * rank
        copied = copied + rank * (width + query + 1.0)
    return Kept(
        saved=e * m * (width + value) + inside + around,
        core=core,
        working=e * m * (2.0 * query + value + width),
        ending=e * m * (value + width),
        fed=fed,
        waits=fed + e * m * above,
        copied=copied,
        handed=e * m * (query + value),
    )


def recurrence(mixer: Recurrence, sizes: Sizes) -> Kept:
    """An estimate, for no module of ours runs one: the input of the first product and what it gives, what the scan and
    its norm give, and by the delta rule keys, queries and values as they meet; backward has gradients of those beside
    what it convolves again and, of Mamba-2, states and their gradients in fp32 and narrow."""
    m, e, shapes = sizes.tokens, sizes.itemsize, recurrence_shapes(mixer, sizes)
    given = 2.0 * shapes.inner + 2.0 * shapes.shared + shapes.heads
    met = shapes.mixed if mixer.delta else 0.0
    states = (2.0 if mixer.delta else 2.0 + 8.0 / e) * shapes.states
    return Kept(
        saved=e * m * (mixer.width + given + 3.0 * shapes.inner + met),
        working=e * m * (given + 2.0 * shapes.mixed + shapes.inner + states),
        copied=mixer.matrix_parameters / sizes.tensor,
    )


def hidden_copies(*, gated: bool, activation: Activation) -> float:
    """Copies of the hidden features that backward keeps: what the activation reads or gives, the two factors of a
    gate, and the input of the last product. A plain relu gives what the product reads, and needs no more; a clamped
    gate forms again what it gave."""
    relu = activation is Activation.RELU or (gated and activation is Activation.CLAMPED_SWIGLU)
    return (3.0 if relu else 4.0) if gated else (1.0 if relu else 2.0)


def _hidden_beside(*, gated: bool, activation: Activation) -> float:
    """Copies that the activation's backward has beside those: gradients of what it gave and read, where the last
    product's input is gone and no relu needs it, and what a clamped gate forms again."""
    if gated and activation is Activation.CLAMPED_SWIGLU:
        return 4.5
    return 2.0 if gated or activation in (Activation.RELU, Activation.RELU_SQUARED) else 1.0


def _feed_forward(part: FeedForward, sizes: Sizes) -> Kept:
    m, e, h = sizes.tokens, sizes.itemsize, part.hidden / sizes.tensor
    inside = hidden_copies(gated=part.gated, activation=part.activation) * h
    beside = _hidden_beside(gated=part.gated, activation=part.activation)
    late = 0.0 if part.activation is Activation.RELU and not part.gated else h
    return Kept(
        saved=e * m * (part.width + inside),
        working=e * m * (beside * h + part.width),
        ending=e * m * (h + part.width),
        fed=e * m * (part.width + late),
        late=e * m * late,
        waits=e * m * (2.0 * part.width + (3.0 if part.gated else 2.0) * h),
        copied=part.matrix_parameters / sizes.tensor,
    )


def _mixture(part: Mixture, sizes: Sizes, *, beside: FeedForward | None) -> Kept:
    """Router, rows sorted by expert, experts, and rows before and after their weights.

    Backward has most when rows are given their weights' gradients, of which forward kept one set that is gone by then;
    when the experts' are all there; and, of experts in one kernel, at their activation. Of every choice the index of
    its expert, its place in the order twice, its weight before and after sorting. On a grid of experts a rank routes
    its own tokens, sends the choices of those and receives others; a shared branch reads the tokens of all tensor ranks
    beside them.
    """
    m, e = sizes.tokens, sizes.itemsize
    grid = np.asarray(sizes.expert + sizes.zeros) > 0.0
    slices = np.where(grid, sizes.expert_tensor, sizes.tensor)
    holders = np.where(grid, sizes.expert, 1.0)
    own = m / np.where(grid, sizes.tensor, 1.0)
    chosen, h = own * part.top_k, part.hidden / slices
    passes = sizes.slices + sizes.zeros
    once = np.ceil(chosen / passes * part.routing.kept_share)
    sent = passes * once
    received = np.where(grid, slices * passes * _received(once, holders, experts=part.experts), sent)
    inside = hidden_copies(gated=part.gated, activation=part.activation) * h
    choices = chosen * (3.0 * _INDEX_BYTES + e) + _scores_kept(part, own, chosen, sizes)
    read = np.where((part.shared is not None) & (own < m), own + m, own)
    saved = e * (read * part.width + received * (part.width + inside) + 2.0 * sent * part.width) + choices
    waits = m * (part.width + part.experts) + received * (2.0 * part.width + (3.0 if part.gated else 2.0) * h)
    experts = float(part.width * part.hidden * (3 if part.gated else 2) * part.experts) / (slices * holders)
    saved = saved + _gate(part, sizes, tokens=own, beside=beside)
    copied = sum(norm.parameters for norm in part.inner_norms) + part.width * part.experts + experts
    if part.shared is not None:
        shared = hidden_copies(gated=part.shared.gated, activation=part.shared.activation)
        saved = saved + e * m * shared * part.shared.hidden / sizes.tensor
        products = 3.0 if part.shared.gated else 2.0
        waits = waits + m * (part.width + products * part.shared.hidden / sizes.tensor)
        copied = copied + part.shared.matrix_parameters / sizes.tensor
    if part.shared_gate:
        saved, waits, copied = saved + e * m * (part.width + 1.0), waits + m, copied + part.width
    hidden = _hidden_beside(gated=part.gated, activation=part.activation) * received * h - 2.0 * sent * part.width
    least = 2.0 * sent * part.width
    return Kept(
        saved=saved,
        working=e * (m * part.width + np.where(sizes.groups_experts, np.maximum(hidden, least), least)),
        ending=e * (m * part.width - received * inside),
        waits=e * waits,
        copied=copied,
        experts=experts,
    )


def _received(sent: FloatArray, holders: FloatArray, *, experts: int) -> FloatArray:
    """Choices that the fullest of `holders` of experts receives where each of them sends as many to every expert: what
    is left over is of the first ones."""
    here, each = experts / holders, np.floor(sent / experts)
    return np.asarray(holders * (here * each + np.minimum(sent - experts * each, here)), dtype=np.float64)


def _scores_kept(part: Mixture, tokens: FloatArray, choices: FloatArray, sizes: Sizes) -> FloatArray:
    """In fp32 at the least the weights of choices, a softmax over them alone; or the scores of all experts, and what is
    chosen of them with its sum where one is divided by the other."""
    how = part.routing
    parted = how.weighing is Weighing.NORMALIZED and how.choice is not Choice.PROTOTYPES
    alone = parted and how.score is Score.SOFTMAX and how.groups == 1
    if alone and not how.bias_rate and not how.balance_loss:
        return choices * sizes.wide
    return sizes.wide * (tokens * part.experts + ((choices + tokens) if parted else 0.0))


def _gate(part: Mixture, sizes: Sizes, *, tokens: FloatArray, beside: FeedForward | None) -> FloatArray:
    """Norms of what the router and the experts read, and the weights of choices before the scales of experts, with
    those scales.

    Both norms keep what enters, as the norm of a branch `beside` does where its tokens are the same. The router keeps
    what it multiplies whether it was normed or not.
    """
    found, e = sizes.zeros, sizes.itemsize
    known = beside is not None and beside.norm is not None
    for _ in part.inner_norms:
        found = found + _root_mean_square(tokens * part.width, tokens, sizes, shared=known)
        known = True
    if part.expert_scale:
        found = found + sizes.tokens * part.top_k * np.where(e < sizes.wide, 2.0 * e, e)
    return found


def _embedding(block: Embedding, sizes: Sizes) -> Kept:
    """The tokens; where ranks share the table, also which rows are here."""
    split = np.where(sizes.tensor > 1.0, 1.0, 0.0)
    return Kept(saved=sizes.tokens * (_INDEX_BYTES + split), working=sizes.tokens * block.width * sizes.itemsize)


def _head(block: Head, sizes: Sizes, software: Software) -> tuple[Kept, ...]:
    """One copy of the logits, over which backward writes their gradient, another inside a soft cap.

    A loss of torch's own keeps their log-softmax in fp32 instead.
    """
    m, e = sizes.tokens, sizes.itemsize
    norms = () if block.norm is None else (_norm(block.norm, sizes),)
    rows = first_rows(block.vocab, sizes.tensor)
    logits = m * (float(block.vocab) if software.whole_logits else rows)
    capped = 0.0 if block.softcap is None else e * logits
    head = Kept(
        saved=m * (e * block.width + _LOSS_BYTES + sizes.wide),
        working=e * m * block.width,
        fed=e * m * block.width,
        waits=e * m * block.width,
        logits=capped + logits * (e if software.fused_loss or software.narrow_loss else sizes.wide),
        copied=rows * block.width,
    )
    return (*norms, head)
